"""Permute rows with gathers in both directions. Scatters of rows are slow on CPUs, and on GPUs not always
deterministic.

Letters: B batch, N rows, M rows of the result, D width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def rearranged(x_BND: Array, source_BM: Array, target_BN: Array, copies: int = 1) -> Array:
    """Row m of the result, [B, M, D], is row `source[m] // copies` of `x`, or zero if there is no such row.

    Args:
        x_BND: the rows; each counts as `copies` identical rows with consecutive numbers.
        source_BM: int32, the copy that each row of the result is taken from.
        target_BN: int32, [B, N · copies], the inverse: the row where each copy goes, or M or more if it goes nowhere.
            The backward pass reads each copy's gradient from there.
    """
    return _rows(x_BND, source_BM // copies)


def _rows(x_BND: Array, index_BM: Array) -> Array:
    return jnp.take_along_axis(x_BND, index_BM[..., None], axis=1, mode="fill", fill_value=0)


def _forward(x_BND: Array, source_BM: Array, target_BN: Array, copies: int) -> tuple[Array, Any]:
    return _rows(x_BND, source_BM // copies), target_BN


def _backward(copies: int, target_BN: Array, grad_BMD: Array) -> tuple[Array, None, None]:
    grads_BND = _rows(grad_BMD, target_BN)
    batch, rows, width = grads_BND.shape
    return jnp.sum(grads_BND.reshape(batch, rows // copies, copies, width), axis=2), None, None


rearranged.defvjp(_forward, _backward)
