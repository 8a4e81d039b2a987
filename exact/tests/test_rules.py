"""Every rule for elements and arrays gives what JAX gives, on integers, which floats can hold, and on quotients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import Agreement, Case, names_in
from jax import lax

from jaxequal.arrays import ARRAYS
from jaxequal.functions import FUNCTIONS

RNG = np.random.default_rng(0)
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)
Y = np.array([[1, 2, 3, -4], [5, -1, 7, 8], [9, 2, -11, 12]], np.float32)
LOW = np.array([[1, -np.inf, 0, 3], [-np.inf, 2, 5, 4], [0, 1, 2, 3]], np.float32)
M, N = X.astype(np.int32), Y.astype(np.int32)
WIDE = np.array([2**31 - 1, -(2**31), 7, -8], np.int32)
UNSIGNED = np.array([2**32 - 1, 2**31, 7, 0], np.uint32)
BITS = np.array([0, 31, 32, 40], np.int32)
TRUE, FLAGS = np.array([True, True, False, False]), np.array([True, False, True, False])
ZERO, ONE = np.zeros(2, np.float32), np.ones(2, np.float32)
TIES = np.array([[2, 5, 5, 1], [3, 3, -7, 3], [0, -2, -2, 0]], np.float32)
CUBE = RNG.integers(-9, 9, (2, 3, 4)).astype(np.float32)
THREE = np.array([[0, 1, 2, 2], [1, 0, 0, 2], [2, 2, 1, 0]], np.int32)

PAIRS: dict[str, Any] = {
    **{"add": lax.add, "sub": lax.sub, "mul": lax.mul, "max": lax.max, "min": lax.min, "rem": lax.rem, "div": lax.div},
    **{"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge},
}
SINGLE: dict[str, Any] = {
    **{"neg": lax.neg, "abs": lax.abs, "sign": lax.sign, "square": lax.square},
    "integer_pow": lambda x: lax.integer_pow(x, 3),
}
AT_ZERO = (
    *(lax.exp, lax.exp2, lax.expm1, lax.log1p, lax.logistic, lax.sqrt, lax.tanh, lax.erf, lax.erf_inv, lax.erfc),
    *(lax.cbrt, lax.sin, lax.cos, lax.tan, lax.asin, lax.atan, lax.sinh, lax.cosh, lax.asinh, lax.atanh),
)
OF_ELEMENTS: dict[str, Case] = {
    **{f"{name} of floats": (function, (X, Y)) for name, function in PAIRS.items()},
    **{f"{name} of integers": (function, (M, N)) for name, function in PAIRS.items()},
    **{f"{name} of large integers": (PAIRS[name], (WIDE, WIDE[::-1].copy())) for name in ("add", "sub", "mul", "lt")},
    **{f"{name} of unsigned integers": (PAIRS[name], (UNSIGNED, UNSIGNED + 1)) for name in ("add", "sub", "mul", "lt")},
    **{f"{name} of floats": (function, (X,)) for name, function in SINGLE.items()},
    **{f"{name} of integers": (function, (M,)) for name, function in SINGLE.items()},
    **{f"{function.__name__} of 0": (function, (ZERO,)) for function in AT_ZERO},
    **{f"{function.__name__} of 1": (function, (ONE,)) for function in (lax.log, lax.sqrt, lax.rsqrt)},
    **{f"{name} of 0": (getattr(lax, name), (ZERO,)) for name in ("log2", "one_minus_square") if hasattr(lax, name)},
    "a sum with a scalar": (lambda x: 2.0 - x, (X,)),
    "a negative power": (lambda x: lax.integer_pow(x, -2), (Y,)),
    "a power by integers": (lax.pow, (Y, np.clip(N, -2, 3))),
    "a power by floats that are integers": (lax.pow, (Y, np.abs(X))),
    "floor, ceil and round": (lambda x: (lax.floor(x), lax.ceil(x), lax.round(x)), (X,)),
    "clamp of floats": (lambda x: lax.clamp(-2.0, x, 3.0), (X,)),
    "clamp of integers": (lambda x: lax.clamp(-2, x, 3), (M,)),
    "is_finite": (lax.is_finite, (X,)),
    "bits": (lambda x, y: (x & y, x | y, x ^ y, ~x, lax.population_count(x)), (WIDE, WIDE[::-1].copy())),
    "truth": (lambda x, y: (x & y, x | y, x ^ y, ~x), (TRUE, FLAGS)),
    "shifts": (lambda x, n: (lax.shift_left(x, n), lax.shift_right_logical(x, n)), (WIDE, BITS)),
    "arithmetic shifts": (lax.shift_right_arithmetic, (WIDE, BITS)),
    "unsigned shifts": (lambda x, n: (x << n, x >> n), (UNSIGNED, BITS.astype(np.uint32))),
    "a total order": (lambda x: lax.sort(x), (TIES,)),
    "casts of floats": (lambda x: [x.astype(t) for t in (jnp.bfloat16, jnp.int32, bool, jnp.int8)], (X,)),
    "casts of integers": (lambda x: [x.astype(t) for t in (jnp.float32, jnp.float16, jnp.int8, bool)], (M,)),
    "casts of truth": (lambda x: [x.astype(t) for t in (jnp.float32, jnp.int32)], (TRUE,)),
    "the lowest: sums": (lambda x, y: (x + y, y + x, x - y), (LOW, X)),
    "the lowest: products": (lambda x: (x * 3, x / 2, 1 / x), (np.where(LOW == 0, 1, LOW),)),
    "the lowest: order": (lambda x, y: (jnp.maximum(x, y), jnp.minimum(x, y), x < y, jnp.sign(x)), (LOW, X)),
    "the lowest: functions": (lambda x: (jnp.exp(x), lax.logistic(x)), (np.full(2, -np.inf, np.float32),)),
    "log of 0": (lambda x: (lax.log(x), lax.log1p(x - 1)), (ZERO,)),
}

PADS = [[tuple(map(int, RNG.integers((-2, -1, 0), (3, 3, 3)))) for _ in range(2)] for _ in range(12)]
MATRICES = RNG.integers(-9, 9, (3, 2, 4, 5)).astype(np.float32)
OTHERS = RNG.integers(-9, 9, (5, 3, 2, 6)).astype(np.float32)
LONG = RNG.integers(-9, 9, (2, 70)).astype(np.float32)


IMAGES = RNG.integers(-9, 9, (2, 4, 5, 6)).astype(np.float32)
KERNELS = RNG.integers(-9, 9, (4, 2, 2, 3)).astype(np.float32)


def product(x: Any, y: Any, **more: Any) -> Any:
    """Over the 5, and over both batch dims."""
    return lax.dot_general(x, y, (((3,), (0,)), ((0, 1), (1, 2))), **more)


SUMS = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
OF_ARRAYS: dict[str, Case] = {
    **{f"pad by {pads}": (lambda x, pads=pads: lax.pad(x, jnp.ones((), x.dtype), pads), (X,)) for pads in PADS},
    "pad of integers with the lowest": (lambda x: lax.pad(x, -jnp.inf, [(1, 0, 1), (-1, 2, 0)]), (X,)),
    "reshape, squeeze, transpose": (
        lambda x: (x.reshape(4, 6), lax.squeeze(x[:, :1], [1]), x.transpose(2, 0, 1), lax.expand_dims(x, [0, 2])),
        (CUBE,),
    ),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (2, 3, 5, 4), (1, 3)), (X,)),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (X,)),
    "reversed": (lambda x: lax.rev(x, (0, 2)), (CUBE,)),
    "split": (lambda x: lax.split(x, (1, 2, 1), axis=2), (CUBE,)),
    "concatenated and stacked": (
        lambda x, y: (lax.concatenate([x, y, x], 1), jnp.stack([x, y], 1), jnp.unstack(x, axis=1)),
        (X, Y),
    ),
    "sliced": (lambda x: (lax.slice(x, (0, 1), (3, 4), (2, 2)), x[1:]), (X,)),
    "iota": (lambda: (lax.iota(jnp.float32, 5), lax.broadcasted_iota(jnp.int32, (2, 3, 4), 1)), ()),
    "the same": (lambda x: (lax.stop_gradient(x), lax.optimization_barrier(x), lax.reduce_precision(x, 8, 23)), (X,)),
    "copied": (lambda x: (jnp.array(x, copy=True), jax.device_put(x)), (X,)),
    "the derivative of a tanh": (jax.grad(lambda x: lax.tanh(x).sum()), (ZERO,)),
    **{f"{name} of floats": (lambda x, name=name: getattr(lax, name)(x, (0, 2)), (CUBE,)) for name in SUMS},
    **{f"{name} of integers": (lambda x, name=name: getattr(lax, name)(x, (1,)), (M,)) for name in SUMS},
    "sums of none": (lambda x: (lax.reduce_sum(x, (0,)), lax.reduce_prod(x, (0,))), (X[:0],)),
    "sums of truth": (lambda x: (x.all(0), x.any(1), x.sum(0), jnp.max(x)), (X > 0,)),
    "sums with the lowest": (lambda x: (lax.reduce_sum(x, (1,)), jnp.max(x, 1), jnp.min(x, 0), x.sum()), (LOW,)),
    "places": (lambda x: [f(x, 1, t) for f in (lax.argmax, lax.argmin) for t in (jnp.int32, jnp.int8)], (TIES,)),
    **{
        f"{function.__name__}, reverse {back}": (
            lambda x, i, function=function, back=back: (function(x, 1, back), function(i, 0, back)),
            (Y, N),
        )
        for function in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)
        for back in (False, True)
    },
    "a running sum with the lowest": (lambda x: (lax.cumsum(x, 1), lax.cumsum(x, 1, reverse=True)), (LOW,)),
    "sorted by two keys": (
        lambda *all_of: lax.sort(all_of, dimension=1, num_keys=2),
        (TIES, np.flip(M, 1).copy(), CUBE[0], THREE),
    ),
    "sorted by one, stable": (lambda *all_of: lax.sort(all_of, dimension=0, num_keys=1), (THREE, M, X)),
    "the largest": (lambda x, i: (lax.top_k(x, 3), lax.top_k(i, 2)), (TIES, M)),
    "selected of three": (lambda which, *cases: lax.select_n(which, *cases), (THREE, X, Y, TIES)),
    "selected by a scalar": (lambda x, y: lax.select_n(jnp.array(True), x, y), (X, Y)),
    "selected": (lambda which, x, y: jnp.where(which, x, y), (X > 0, X, Y)),
    "products": (product, (MATRICES, OTHERS)),
    "products of integers": (
        lambda x, y: product(x, y, preferred_element_type=jnp.int32),
        (MATRICES.astype(np.int8), OTHERS.astype(np.int8)),
    ),
    "products of long rows": (lambda x: (x @ x.T, jnp.outer(x[0], x[1]), x[0] @ x[1]), (LONG,)),
    "products of nothing": (lambda x: x.T @ x, (X[:0],)),
    "products with the lowest": (lambda x, y: (x @ y, y.T @ x.T), (LOW[:2], np.abs(Y).T.copy())),
    "products of floats and integers": (
        lambda x, w: (
            lax.dot_general(x, w, (((1,), (1,)), ((), ()))),
            lax.dot(w, w.T, preferred_element_type=jnp.float32),
        ),
        (X, N.astype(np.int8)),
    ),
    **{
        f"ragged products, {name}": (
            lambda x, y, sizes, dims=dims: lax.ragged_dot_general(x, y, sizes, lax.RaggedDotDimensionNumbers(*dims)),
            (*shapes, np.array([3, 0, 2], np.int32)),
        )
        for name, dims, shapes in (
            (
                "rows",
                ((((1,), (1,)), ((), ())), [0], [0]),
                (MATRICES[0, 0].T, RNG.integers(-9, 9, (3, 4, 2)).astype(np.float32)),
            ),
            ("terms", ((((0,), (0,)), ((), ())), [0], []), (MATRICES[0, 0].T, MATRICES[0, 1].T)),
        )
    },
    **{
        f"convolution, {more}": (
            lambda x, y, more=more: lax.conv_general_dilated(x, y, **more),
            (IMAGES, KERNELS if "batch_group_count" not in more else KERNELS[:2].repeat(2, 1)),
        )
        for more in (
            {"window_strides": (1, 2), "padding": ((1, 2), (0, -1)), "feature_group_count": 2},
            {"window_strides": (2, 1), "padding": ((0, 1), (2, 2)), "lhs_dilation": (2, 1), "feature_group_count": 2},
            {"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 1), "batch_group_count": 2},
        )
    },
    "convolution, channels last": (
        lambda x, y: lax.conv_general_dilated(x, y, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        (CUBE, RNG.integers(-9, 9, (3, 4, 2)).astype(np.float32)),
    ),
    **{
        f"windows by {name}": (
            lambda x, i, init=init, two=two: [
                lax.reduce_window(y, np.asarray(init, y.dtype), two, (2, 2), (1, 2), ((1, 0), (0, 1)), (1, 2), (1, 2))
                for y in (x, i)
            ],
            (X, M),
        )
        for name, init, two in (("sum", 0, lax.add), ("product", 1, lax.mul))
    },
    "windows by max and min": (
        lambda x: [
            lax.reduce_window(x, -s * jnp.inf, two, (2, 3), (1, 1), "SAME") for s, two in ((1, lax.max), (-1, lax.min))
        ],
        (X,),
    ),
    **{
        f"triangles, {more}": (
            lambda a, b, more=more: lax.linalg.triangular_solve(a, b, unit_diagonal=True, **more),
            (
                np.tril(MATRICES[..., :4]) if more["lower"] else np.triu(MATRICES[..., :4]),
                MATRICES.swapaxes(-1, -2)[..., :4, :],
            ),
        )
        for more in ({"left_side": True, "lower": True}, {"left_side": False, "lower": False, "transpose_a": True})
    },
    "a linear solve": (
        lambda x: lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, y: y / 2, symmetric=True),
        (X,),
    ),
    "elimination": (lax.linalg.lu, (np.array([[[0, 2, 1], [4, 0, 8], [2, 4, 4]], np.diag([1, 2, 4])], np.float32),)),
    "a solution": (jnp.linalg.solve, (np.array([[0, 2, 1], [4, 0, 8], [2, 4, 4]], np.float32), X[:3, :3])),
    "running sums of exponentials": (
        lambda x: lax.cumlogsumexp(x, 1),
        (np.array([[0, -np.inf, -np.inf]], np.float32),),
    ),
    "a running sum of nothing": (lambda x: jnp.cumsum(x, 0), (X[:0],)),
    "nearly the largest": (lambda x: (lax.approx_max_k(x, 2), lax.approx_min_k(x, 2)), (X,)),
    "bits of integers": (
        lambda x, y: (
            lax.bitcast_convert_type(x, jnp.uint32),
            lax.bitcast_convert_type(x, jnp.uint8),
            lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint8), jnp.int32),
            lax.bitcast_convert_type(y, jnp.float32),
        ),
        (WIDE, np.array([1, 127, 130, 254], np.int32) << 23),
    ),
    "bits of float8": (
        lambda x: (
            lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float32),
            lax.bitcast_convert_type(x, jnp.float8_e5m2).astype(jnp.float32),
        ),
        (np.array([0, 1, 56, 60, 123, 200, 254], np.uint8),),
    ),
}

PLACES = np.array([[0, 2], [-1, 5], [2, 1]], np.int32)  # two of them outside
STARTS = [np.array(n, np.int32) for n in (2, -5)]
MODES = ("clip", "fill")
BATCHING = lax.GatherDimensionNumbers(
    offset_dims=(1,),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)
OF_INDICES: dict[str, Case] = {
    "a slice beyond the end": (lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 3)), (X, *STARTS)),
    "an update beyond the end": (lambda x, y, i, j: lax.dynamic_update_slice(x, y, (i, j)), (X, Y[:2, :3], *STARTS)),
    **{f"rows, {m}": (lambda x, i, m=m: x.at[i].get(mode=m), (X, PLACES)) for m in MODES},
    **{f"rows of integers, {m}": (lambda x, i, m=m: x.at[i].get(mode=m), (M, PLACES)) for m in MODES},
    "rows of unsigned integers": (lambda x, i: x.at[i].get(mode="fill"), (M.astype(np.uint32), PLACES)),
    "rows of truth": (lambda x, i: x.at[i].get(mode="fill"), (X > 0, PLACES)),
    "rows, filled": (lambda x, i: x.at[i].get(mode="fill", fill_value=7.0), (X, PLACES)),
    "elements": (lambda x, i, j: x[i, j], (X, THREE, THREE[::-1].copy())),
    "blocks": (lambda x, i: jax.vmap(lambda n: lax.dynamic_slice(x, (n, n), (2, 2)))(i), (X, PLACES.ravel())),
    "along a dim": (lambda x, i: jnp.take_along_axis(x, i, 1), (X, THREE)),
    "with batching dims": (
        lambda x, i: lax.gather(x, i, BATCHING, (1, 1, 4), mode="fill"),
        (np.stack([X, Y]), np.array([[1], [3]], np.int32)),
    ),
    "rows of a batch": (jax.vmap(lambda x, i: x[i]), (np.stack([X, Y]), np.array([[2, 0], [1, 1]], np.int32))),
    **{
        f"{way} rows, {m}": (lambda x, i, y, way=way, m=m: getattr(x.at[i], way)(y, mode=m), (X, PLACES, UPDATES))
        for way in ("add", "max", "min", "mul")
        for m in ("clip", "drop")
        for UPDATES in [RNG.integers(-9, 9, (3, 2, 4)).astype(np.float32)]
    },
    "added integers": (lambda x, i, y: x.at[i, i].add(y), (M, PLACES, PLACES)),
    "set rows": (lambda x, i, y: x.at[i].set(y, mode="drop"), (X, np.array([2, 7], np.int32), Y[:2])),
    "set elements": (lambda x, i, y: x.at[:, i].set(y), (X, np.array([3, 0], np.int32), Y[:, :2])),
    "added in a batch": (jax.vmap(lambda x, i, y: x.at[i].add(y)), (CUBE, THREE[:2, :2], CUBE[:, :2])),
    "added the lowest": (lambda x, i, y: x.at[i].add(y), (X, np.array([1, 1, 0], np.int32), LOW)),
}
ALL = OF_ELEMENTS | OF_ARRAYS | OF_INDICES


@pytest.fixture(scope="module")
def agreement() -> Agreement:
    return Agreement(ALL)


@pytest.mark.parametrize("name", ALL)
def test_the_interpreter_gives_what_jax_gives(name: str, agreement: Agreement) -> None:
    agreement.check(name)


def test_every_rule_has_a_case() -> None:
    """But for functions whose results are no integers, and what is only traced in a step or on a mesh."""
    used = {name for function, args in ALL.values() for name in names_in(jax.make_jaxpr(function)(*args).jaxpr)}
    others = {
        "empty",
        "vary_unreduced_cast",
        "vary_unreduced_cast_p",
        "reduced_vary_cast",
        "reduced_vary_cast_p",
        "preduced",
        "acos",
        "acosh",
        "atan2",
        "lgamma",
        "digamma",
        "pvary",
        "sharding_constraint",
        "reshard",
        "name",
    }
    others |= {"add_any", "stop_gradient", "copy", "lt_to", "le_to", "nextafter", "debug_print"}
    others |= {"one_minus_square", "log2"} if jax.__version_info__ < (0, 11) else set()
    assert {*FUNCTIONS, *ARRAYS} - used <= others
