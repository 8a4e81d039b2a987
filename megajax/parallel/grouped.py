"""Products of rows with the weight of the group that each belongs to, without multiplying a row with another group's.

Rows are sorted by group, and each group's are filled up to whole blocks. A loop multiplies one block after the other,
as many as are used. `lax.ragged_dot` multiplies every row with the weights of all groups, on CPUs and on GPUs.

Letters: E groups, I what goes into a product, O what comes out, M blocks, R rows of all blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.parallel.collectives import vary, varying_axes
from megajax.precision import at_least_fp32


class Blocks(NamedTuple):
    """Whose rows the blocks have; floats, which hold such numbers exactly, so that they may be a product's factors."""

    group_M: Array
    used: Array  # how many blocks have rows, a scalar; what the others have is not used


def in_blocks(group_N: Array, groups: int, size: int) -> tuple[Blocks, Array]:
    """Blocks of `size` rows for N rows of these groups, and the place of each row in them, int32; R for a row whose
    group is none of 0 to `groups` - 1."""
    number = -(-group_N.shape[0] // size) + groups
    counts_E = jnp.sum(jax.nn.one_hot(group_N, groups, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    blocks_E = -(-counts_E // size)
    ends_E = jnp.cumsum(blocks_E, dtype=jnp.int32)
    group_M = jnp.searchsorted(ends_E, jnp.arange(number, dtype=jnp.int32), side="right").astype(jnp.int32)
    rank_N = jnp.argsort(jnp.argsort(group_N, stable=True)).astype(jnp.int32)
    before_E = jnp.cumsum(counts_E, dtype=jnp.int32) - counts_E
    shift_E = (ends_E - blocks_E) * size - before_E
    inside_N = (group_N >= 0) & (group_N < groups)
    place_N = jnp.where(inside_N, rank_N + jnp.take(shift_E, group_N, mode="clip"), number * size)
    float_M = jnp.minimum(group_M, groups - 1).astype(jnp.float32)
    return Blocks(float_M, ends_E[-1].astype(jnp.float32)), place_N


@jax.custom_vjp
def grouped_product(rows_RI: Array, weight_EIO: Array, blocks: Blocks) -> Array:
    """Rows in blocks times their groups' weights, [R, O]; all of them vary over the same axes."""
    size = rows_RI.shape[0] // blocks.group_M.shape[0]
    out_RO = _zeros((rows_RI.shape[0], weight_EIO.shape[2]), rows_RI.dtype, rows_RI)

    def multiply(number: Array, out_RO: Array) -> Array:
        weight_IO = _weight(weight_EIO, blocks, number)
        return lax.dynamic_update_slice_in_dim(out_RO, _block(rows_RI, number, size) @ weight_IO, number * size, 0)

    return _for_blocks(blocks, multiply, out_RO)


def _forward(rows_RI: Array, weight_EIO: Array, blocks: Blocks) -> tuple[Array, Any]:
    return grouped_product(rows_RI, weight_EIO, blocks), (rows_RI, weight_EIO, blocks)


def _backward(kept: Any, grad_RO: Array) -> tuple[Array, Array, Blocks]:
    rows_RI, weight_EIO, blocks = kept
    weight_grad = grouped_weight_gradient(rows_RI, grad_RO, blocks, weight_EIO.shape[0])
    return input_gradient(grad_RO, weight_EIO, blocks), weight_grad, jax.tree.map(jnp.zeros_like, blocks)


grouped_product.defvjp(_forward, _backward)


def input_gradient(grad_RO: Array, weight_EIO: Array, blocks: Blocks) -> Array:
    """The gradient of the rows."""
    return grouped_product(grad_RO, weight_EIO.swapaxes(1, 2), blocks)


def grouped_weight_gradient(rows_RI: Array, grad_RO: Array, blocks: Blocks, groups: int) -> Array:
    """The gradient of the weights, [E, I, O], summed in at least fp32."""
    size = rows_RI.shape[0] // blocks.group_M.shape[0]
    shape, dtype = (groups, rows_RI.shape[1], grad_RO.shape[1]), at_least_fp32(rows_RI.dtype)

    def add(number: Array, total_EIO: Array) -> Array:
        rows, grads = (_block(x, number, size) for x in (rows_RI, grad_RO))
        product_IO = jnp.matmul(rows.T, grads, preferred_element_type=dtype)
        return total_EIO.at[blocks.group_M[number].astype(jnp.int32)].add(product_IO)

    return _for_blocks(blocks, add, _zeros(shape, dtype, rows_RI)).astype(rows_RI.dtype)


def _for_blocks(blocks: Blocks, body: Any, start: Array) -> Array:
    return lax.fori_loop(jnp.zeros((), jnp.int32), blocks.used.astype(jnp.int32), body, start)


def _block(rows: Array, number: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(rows, number * size, size, 0)


def _weight(weight_EIO: Array, blocks: Blocks, number: Array) -> Array:
    return lax.dynamic_index_in_dim(weight_EIO, blocks.group_M[number].astype(jnp.int32), 0, keepdims=False)


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    return vary(jnp.zeros(shape, dtype), sorted(varying_axes(like)))
