"""Products in 8 bits: their scales, what they are without a mesh, and how many numbers lie at an edge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.backend import CPU
from megajax.core.models.grouped import GroupRule, in_blocks, multiplied_by_group
from megajax.core.parallel.float8 import Float8Rule, Scaled, copies_by_dims, copies_of, scaled
from megajax.core.parallel.products import DenseRule, products
from megajax.core.parallel.shards import NOT_SHARDED, Sharding
from megajax.core.precision import E4M3
from megajax.verify.comparison import _ROUNDING, _STEP

HUGE, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_subnormal)


@jax.jit
def in_float8(x: jax.Array) -> Scaled:
    return scaled(x, 1, E4M3)


def values(x: list[float], dtype: type = np.float32) -> np.ndarray:
    """What a row counts as."""
    found = in_float8(np.array([x], dtype))
    return np.asarray(found.values, np.float64)[0] * np.asarray(found.scale, np.float64)[0]


@pytest.mark.parametrize(
    ("row", "scale"),
    [
        ([0.0, 0.0], 2.0**-126),  # the least normal number; what is 0 stays so
        ([448.0, 1.0], 1.0),  # the largest one of e4m3
        ([np.nextafter(np.float32(448), np.float32(449)), 1.0], 2.0),
        ([-3 * 448.0, 0.0], 4.0),
        ([HUGE, 1.0], 2.0**120),
        ([2.0**-100, 0.0], 2.0**-108),
        ([TINY, 0.0], 2.0**-126),
        ([np.inf, 1.0], np.nan),
        ([np.nan, 1.0], np.nan),
        ([-np.inf, np.nan], np.nan),
    ],
)
def test_the_scale_is_the_least_power_of_two_that_leaves_nothing_beyond(row: list[float], scale: float) -> None:
    found = in_float8(np.array([row], np.float32))
    np.testing.assert_array_equal(found.scale, [scale])
    if np.isfinite(scale):  # else all of the row is NaN, and the step is skipped
        assert np.all(np.abs(found.values.astype(np.float32)) <= 448)
        assert np.abs(found.values.astype(np.float32)).max() > 223 or max(map(abs, row)) < 2.0**-117


def test_a_row_is_rounded_to_e4m3_and_small_numbers_to_its_subnormal_ones() -> None:
    np.testing.assert_array_equal(values([448, 2.0**-9, 2.0**-11, 17.0, 0]), [448, 2.0**-9, 0, 16, 0])
    assert values([HUGE, -HUGE])[0] == -values([HUGE, -HUGE])[1] == 2.0**128  # 1.999… x 2^127, to the next number
    assert np.isnan(values([np.inf, 1])).all() and np.isnan(values([1, np.nan])).all()


def test_scales_are_of_bf16_and_fp64_as_of_fp32() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 7)) * np.exp(np.random.default_rng(1).normal(0, 20, (50, 1)))
    narrow = jnp.asarray(rows.astype(np.float32)).astype(jnp.bfloat16)
    with jax.enable_x64(True):
        wide = scaled(jnp.asarray(narrow.astype(jnp.float32), jnp.float64), 1, E4M3)
    for one, other in zip(in_float8(narrow), wide, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def dequantized(x: np.ndarray) -> np.ndarray:
    """Rows as they count."""
    found = in_float8(x)
    return np.asarray(found.values, np.float64) * np.asarray(found.scale, np.float64)[..., None]


def drawn(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return (rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))).astype(np.float32)


HOW = Float8Rule(DenseRule(1, CPU), (), (), (0, 0))


@jax.jit
def both(x: jax.Array, w: jax.Array, v: jax.Array, *grads: jax.Array, wide: jax.Array | None = None) -> tuple:
    """Outputs of two products of one input, and the gradients of all."""

    def outputs(x: jax.Array, w: jax.Array, v: jax.Array) -> list[jax.Array]:
        copies = [copies_of(each, 0, 1, E4M3, ((), ()), both=True)._replace(wide=wide) for each in (w, v)]
        return products(HOW, x, [w, v], copies)

    y, pull_back = jax.vjp(outputs, x, w, v)
    return y, *pull_back(list(grads))


def test_products_are_those_of_what_rows_and_columns_count_as() -> None:
    x, w, v, dy, dz = drawn(5, 24), drawn(24, 16), drawn(24, 2, 3), drawn(5, 16), drawn(5, 2, 3)
    (y, z), dx, dw, dv = both(x, w, v, dy, dz)
    flat, dz_flat = v.reshape(24, 6), dz.reshape(5, 6)
    np.testing.assert_allclose(y, dequantized(x) @ dequantized(w.T).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(z.reshape(5, 6), dequantized(x) @ dequantized(flat.T).T, rtol=1e-5, atol=1e-5)
    expected = dequantized(dy) @ dequantized(w).T + dequantized(dz_flat) @ dequantized(flat).T
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, x.T @ dy, rtol=1e-5, atol=1e-5)  # not in 8 bits
    np.testing.assert_allclose(dv.reshape(24, 6), x.T @ dz_flat, rtol=1e-5, atol=1e-5)


def test_products_of_a_wide_layer_are_not_in_8_bits() -> None:
    x, w, v, dy, dz = drawn(5, 24), drawn(24, 16), drawn(24, 2, 3), drawn(5, 16), drawn(5, 2, 3)
    for wide, expected in ((0, dequantized(x) @ dequantized(w.T).T), (1, x @ w)):
        (y, _), *_ = both(x, w, v, dy, dz, wide=np.float32(wide))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_infinities_and_nan_reach_all_that_their_row_gives_and_zeros_stay() -> None:
    x, w, v, dy, dz = drawn(5, 24), drawn(24, 16), drawn(24, 2, 3), drawn(5, 16), drawn(5, 2, 3)
    (y, _), dx, *_ = both(x, w, v, dy, dz)
    x[1], x[2, 3], dy[3, 4], w[5, 6] = 0, np.inf, np.nan, -np.inf
    (y_after, _), dx_after, *_ = both(x, w, v, dy, dz)
    wrong_y, wrong_dx = (np.zeros(each.shape, bool) for each in (y, dx))
    wrong_y[2], wrong_y[:, 6], wrong_dx[3], wrong_dx[:, 5] = True, True, True, True
    np.testing.assert_array_equal(y_after, np.where(wrong_y, np.nan, np.where(x.any(1, keepdims=True), y, 0)))
    np.testing.assert_array_equal(dx_after, np.where(wrong_dx, np.nan, dx))


@pytest.mark.full
def test_two_halves_of_a_batch_are_the_whole_to_the_bit() -> None:
    x, w, v, dy, dz = drawn(8, 24), drawn(24, 16), drawn(24, 2, 3), drawn(8, 16), drawn(8, 2, 3)
    (y, z), dx, *_ = both(x, w, v, dy, dz)
    halves = [both(x[rows], w, v, dy[rows], dz[rows]) for rows in (slice(0, 4), slice(4, 8))]
    for whole, parts in ((y, [h[0][0] for h in halves]), (z, [h[0][1] for h in halves]), (dx, [h[1] for h in halves])):
        np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("at_once", [1, 2])
def test_experts_in_blocks_are_those_with_their_own_rows(at_once: int) -> None:
    w, x = drawn(3, 12, 10), drawn(8, 12)
    group = np.array([0, 2, 2, 0, 1, 2, 0, 2], np.int32)
    blocks, place = in_blocks(group, 3, 2, at_once)
    rows = np.zeros((2 * blocks.group_MG.size, 12), np.float32)
    rows[place] = x

    @jax.jit
    def both_ways(w: jax.Array, rows: jax.Array, x: jax.Array) -> list[jax.Array]:
        how = Float8Rule(GroupRule(3), (), (), (0,), multiplied_by_group)
        given = [w], [copies_of(w, 1, 1, E4M3, ((), ()), both=True)]
        return products(how, rows, *given, blocks) + products(how, jnp.stack([x] * 3), *given)

    out, alone = both_ways(w, rows, x)
    expected = np.stack([dequantized(x)[n] @ dequantized(w[e].T).T for n, e in enumerate(group)])
    np.testing.assert_allclose(np.asarray(out)[place], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(alone)[group, np.arange(8)], expected, rtol=1e-5, atol=1e-5)


def test_numbers_at_an_edge_are_as_many_as_the_limit_of_verify_says() -> None:
    """Rounding of bf16 carries so many over it, each by a step."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 500)).astype(np.float32)
    other = (x * (1 + _ROUNDING * rng.uniform(-1, 1, x.shape))).astype(np.float32)
    a, b = dequantized(x), dequantized(other)
    squared = np.sum((a - b) ** 2) / np.sum(a**2)
    assert 0.3 < squared / (_ROUNDING * _STEP) <= 1.0, squared / (_ROUNDING * _STEP)
    assert 0.2 < np.mean(a != b) / (_ROUNDING / _STEP) <= 1.0, np.mean(a != b) / (_ROUNDING / _STEP)


@pytest.mark.parametrize(("inner", "outer", "stacked"), [(1, 1, 0), (1, 2, 0), (2, 1, 0), (1, 1, 1)])
def test_copies_are_sharded_along_the_dim_of_their_weight(inner: int, outer: int, stacked: int) -> None:
    """Copies of a shard are the shards of the copies, whichever dim is sharded; scales of other dims are whole."""
    shape = (2, 4, 6, 8)[-(inner + outer + stacked) :]
    copies = functools.partial(copies_of, stacked=stacked, inner=inner, dtype=E4M3, over=((), ()), both=True)
    whole = jax.eval_shape(copies, jax.ShapeDtypeStruct(shape, np.float32))
    for dim in range(-len(shape), 0):
        along = functools.partial(Sharding(dim, ("data",)).along, ndim=len(shape))
        how = copies_by_dims(along, stacked, inner, len(shape), both=True)
        shard = jax.eval_shape(copies, jax.ShapeDtypeStruct(halved(shape, dim), np.float32))
        for copy, sharding, part in zip(*map(jax.tree.leaves, (whole, how, shard)), strict=True):
            assert part.shape == (copy.shape if sharding == NOT_SHARDED else halved(copy.shape, sharding.dim))


def halved(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(size // 2 if place - len(shape) == dim else size for place, size in enumerate(shape))
