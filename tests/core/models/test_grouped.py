"""Products of rows with their groups' weights are numpy's, row by row, and so are both gradients: with several blocks
of a group, a group without rows, and rows of no group."""

import jax
import numpy as np
import pytest
from jax import Array

from megajax.core.models.grouped import GroupRule, in_blocks
from megajax.core.parallel.products import products

GROUPS, SIZE, INNER, OUTER = 4, 3, 5, 2
GROUP_N = np.array([0, 3, 0, 1, GROUPS, 0, 3, 0, 1, 0, 3, GROUPS, 0, 0, 1, 3], np.int32)  # three blocks of 0, none of 2


@pytest.mark.parametrize("at_once", [1, 4])
def test_products_and_gradients_are_numpy_s(at_once: int) -> None:
    rng = np.random.default_rng(0)
    rows_NI, grad_NO = (rng.normal(size=(len(GROUP_N), width)).astype(np.float32) for width in (INNER, OUTER))
    weight_EIO = rng.normal(size=(GROUPS, INNER, OUTER)).astype(np.float32)
    blocks, place_N = jax.jit(in_blocks, static_argnums=(1, 2, 3))(GROUP_N, GROUPS, SIZE, at_once)
    inside_N, place_N = GROUP_N < GROUPS, np.asarray(place_N)
    size = blocks.group_MG.size * SIZE
    assert float(blocks.used) == 3 + 1 + 0 + 2 and (place_N[~inside_N] == size).all()

    def in_their_places(x: np.ndarray) -> np.ndarray:
        out = np.zeros((size, x.shape[1]), np.float32)
        out[place_N[inside_N]] = x[inside_N]
        return out

    @jax.jit
    def both(rows_RI: Array, weight_EIO: Array, grad_RO: Array) -> tuple[Array, ...]:
        rule = GroupRule(GROUPS)
        (out_RO,), pullback = jax.vjp(lambda x, weight: products(rule, x, [weight], blocks), rows_RI, weight_EIO)
        return out_RO, *pullback([grad_RO])

    out_RO, rows_grad_RI, weight_grad = both(in_their_places(rows_NI), weight_EIO, in_their_places(grad_NO))
    expected = np.zeros_like(weight_EIO)
    for n in np.flatnonzero(inside_N):
        weight_IO = weight_EIO[GROUP_N[n]]
        np.testing.assert_allclose(out_RO[place_N[n]], rows_NI[n] @ weight_IO, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rows_grad_RI[place_N[n]], weight_IO @ grad_NO[n], rtol=1e-5, atol=1e-6)
        expected[GROUP_N[n]] += np.outer(rows_NI[n], grad_NO[n])
    np.testing.assert_allclose(weight_grad, expected, rtol=1e-5, atol=1e-6)
