"""Multiply rows with the weight of the group that each belongs to, and with no other. Rows are sorted by group and
padded to whole blocks per group. A loop multiplies the used blocks one after the other. (`lax.ragged_dot` multiplies
every row with the weights of all groups, on CPUs and on GPUs.)

Letters: E groups, I what goes into a product, O what comes out, M blocks, N rows of a group, R rows of all blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.parallel.collectives import vary, varying_axes
from megajax.parallel.float8 import (
    Scaled,
    Weight,
    backward_copies,
    either,
    forward_copies,
    multiplied,
    scaled,
    scaled_together,
)
from megajax.precision import at_least_fp32


class Blocks(NamedTuple):
    """The groups of the blocks; floats, which represent such numbers exactly, so that they may be factors of a
    product."""

    group_M: Array
    used: Array  # how many blocks have rows, a scalar; the others are not used


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


def group_product(rows: Array, weight_EIO: Array, *blocks: Array) -> Array:
    """Rows [E, N, I], or [R, I] in blocks, times their groups' weights."""
    if blocks:
        return grouped_product(rows, weight_EIO, Blocks(*blocks))
    return jnp.einsum("eni,eio->eno", rows, weight_EIO)


def group_input_gradient(grads: Sequence[Array], weights_EIO: Sequence[Array], *blocks: Array) -> Array:
    """The gradient of rows that several products have in common."""
    pairs = zip(grads, weights_EIO, strict=True)
    if blocks:
        return sum_of(input_gradient(grad, weight, Blocks(*blocks)) for grad, weight in pairs)
    return sum_of(jnp.einsum("eno,eio->eni", grad, weight) for grad, weight in pairs)


def group_weight_gradient(rows: Array, grad: Array, groups: int, *blocks: Array) -> Array:
    """The gradient of the weights, [E, I, O]."""
    if blocks:
        return grouped_weight_gradient(rows, grad, Blocks(*blocks), groups)
    return jnp.einsum("eni,eno->eio", rows, grad)


def sum_of(arrays: Iterable[Array]) -> Array:
    """The sum of one array or several."""
    first, *others = arrays
    return sum(others, start=first)


@dataclass(frozen=True)
class GroupProducts:
    """Products in 8 bits of the same rows, [E, N, I] or in blocks [R, I], with several weights [E, I, O]; like
    `float8.DenseProducts`."""

    over: tuple[str, ...]  # mesh axes that shard I
    outer_over: tuple[str, ...]  # mesh axes that shard O
    trained: bool

    def forward(self, rows: Array, weights: Sequence[Weight], *blocks: Array) -> list[Array]:
        """The outputs."""

        def in_float8() -> list[Array]:
            copies = forward_copies(weights)
            own = scaled(rows, 1, copies[0].values.dtype, self.over)
            return [_in_float8(own, copy, rows.dtype, *blocks) for copy in copies]

        return either(weights, in_float8, lambda: [group_product(rows, weight.array, *blocks) for weight in weights])

    def input_gradient(self, grads: Sequence[Array], weights: Sequence[Weight], *blocks: Array) -> Array:
        """The gradient of the rows."""

        def in_float8() -> Array:
            copies = backward_copies(weights)
            owns = scaled_together(grads, [1] * len(copies), copies[0].values.dtype, self.outer_over)
            pairs = zip(owns, copies, strict=True)
            return sum_of(_in_float8(own, copy, grads[0].dtype, *blocks) for own, copy in pairs)

        arrays = [weight.array for weight in weights]
        return either(weights, in_float8, lambda: group_input_gradient(grads, arrays, *blocks))

    def weight_gradients(
        self, rows: Array, grads: Sequence[Array], weights: Sequence[Weight], *blocks: Array
    ) -> list[Array]:
        """The gradients of the weights, in the compute dtype."""
        return [group_weight_gradient(rows, grad, weights[0].array.shape[0], *blocks) for grad in grads]


def _in_float8(rows: Scaled, weight: Scaled, dtype: Any, *blocks: Array) -> Array:
    if not blocks:
        return multiplied(rows, weight, 1, dtype, batch=1)
    of = Blocks(*blocks)
    size = rows.values.shape[0] // of.group_M.shape[0]

    def multiply(number: Array, out_RO: Array) -> Array:
        own = Scaled(*(_block(each, number, size) for each in rows))
        product = multiplied(own, Scaled(*(_weight(each, of, number) for each in weight)), 1, dtype)
        return lax.dynamic_update_slice_in_dim(out_RO, product, number * size, 0)

    out_RO = _zeros((rows.values.shape[0], weight.values.shape[1]), dtype, rows.values)
    return _for_blocks(of, multiply, out_RO)
