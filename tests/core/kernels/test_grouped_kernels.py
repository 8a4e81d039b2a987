"""Products by kernels of rows with their groups' weights are those of a loop, and so are both gradients, with groups
that are empty, have one row or all of them: in Pallas' interpreter of kernels for GPUs."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from megajax.core.models.grouped import GroupRule, in_blocks, multiplied_by_group
from megajax.core.parallel.float8 import Float8Rule, copies_of
from megajax.core.parallel.products import products
from megajax.core.private import has_gpu_kernels, interpreted_kernels

pytestmark = pytest.mark.skipif(not has_gpu_kernels(), reason="its JAX has no such kernels, which 0.11 has")

BLOCK, INNER = 128, 128
SPREAD, ALL_IN_ONE = [130, 0, 1], [0, 200, 0]


def found(counts: Sequence[int], dtype: str, outer: int, *, by_kernel: bool) -> list[Array]:
    """The rows' products and gradients, and the gradient of the weights."""
    rng, groups = np.random.default_rng(0), len(counts)
    group_N = rng.permutation(np.repeat(np.arange(groups + 1, dtype=np.int32), [*counts, 3]))  # 3 of another device
    blocks, place_N = in_blocks(jnp.asarray(group_N), groups, BLOCK, at_once=2, by_kernel=by_kernel)
    sizes = (len(group_N), INNER), (groups, INNER, outer), (len(group_N), outer)
    wide = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    draw = rng.normal if wide != dtype else partial(rng.integers, -1, 2)  # sums of the latter are exact in any order
    x_NI, weight_EIO, grad_NO = (jnp.asarray(draw(size=size), wide) for size in sizes)

    def in_their_places(x_N: Array) -> Array:
        return jnp.zeros((blocks.group_MG.size * BLOCK, x_N.shape[1]), x_N.dtype).at[place_N].set(x_N, mode="drop")

    @jax.jit
    def outputs(x_NI: Array, weight_EIO: Array, grad_NO: Array) -> list[Array]:
        rows_RI, grad_RO = in_their_places(x_NI), in_their_places(grad_NO)
        rule = GroupRule(groups)
        if wide != dtype:
            how = Float8Rule(rule, (), (), (0,), multiplied_by_group)
            given = [weight_EIO], [copies_of(weight_EIO, 1, 1, dtype, ((), ()), both=True)], blocks
            return [*how.forward(rows_RI, *given), how.input_gradient([grad_RO], *given)]
        out_R, pullback = jax.vjp(lambda x, weight: products(rule, x, [weight], blocks), rows_RI, weight_EIO)
        return [*out_R, *pullback([grad_RO])]

    inputs = x_NI, weight_EIO, grad_NO
    assert ("smem" in str(jax.make_jaxpr(outputs)(*inputs))) == by_kernel
    return [np.asarray(x, np.float32) for x in outputs(*inputs)]


def by_kernel_and_loop(counts: Sequence[int], dtype: str, outer: int, *, detect_races: bool = False) -> bool:
    """Compare both; whether a race was found. In float8, which is scaled, sums of 128 products in another order round
    as often differently."""
    with interpreted_kernels(detect_races=detect_races) as races:
        kernel = found(counts, dtype, outer, by_kernel=True)
        raced = races()
    for one, other in zip(kernel, found(counts, dtype, outer, by_kernel=False), strict=True):
        rounds = 2 * float(jnp.finfo("bfloat16").eps) if dtype == "float8_e4m3fn" else 0
        np.testing.assert_allclose(one, other, rtol=rounds, atol=1e-3 * bool(rounds))
        assert np.abs(one).max() > 1
    return raced


def test_kernels_multiply_as_a_loop_does() -> None:
    by_kernel_and_loop(SPREAD, "bfloat16", 128)


@pytest.mark.full
@pytest.mark.parametrize("outer", [256, 384])
@pytest.mark.parametrize("counts", [SPREAD, ALL_IN_ONE, [5, 5, 300]], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_no_race(counts: Sequence[int], dtype: str, outer: int) -> None:
    assert not by_kernel_and_loop(counts, dtype, outer, detect_races=True)
