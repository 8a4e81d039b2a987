"""Multiply rows with the weight of the group that each belongs to, and with no other. Rows are sorted by group and
padded to whole blocks per group. A loop multiplies the used blocks, in each turn one or, where turns are expensive,
several with copies of their weights. (`lax.ragged_dot` multiplies every row with the weights of all groups, on CPUs and
on GPUs.)

Letters: E groups, I what goes into a product, O what comes out, M turns, G blocks of a turn, N rows of a group or of a
block, R rows of all blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.collectives import vary, varying_axes
from megajax.core.parallel.float8 import (
    Float8Weight,
    Scaled,
    backward_copies,
    either,
    forward_copies,
    multiplied,
    scaled,
    scaled_together,
)
from megajax.core.precision import at_least_fp32


class Blocks(NamedTuple):
    """The groups of the blocks; floats, which represent such numbers exactly, so that they may be factors of a
    product."""

    group_MG: Array
    used: Array  # how many turns have rows, a scalar; the others are left out. Rows of no group are zeros


def in_blocks(group_N: Array, groups: int, size: int, at_once: int = 1) -> tuple[Blocks, Array]:
    """Blocks of `size` rows for N rows of these groups, at most `at_once` of them in a turn, and the place of each row
    in them, int32; R for a row whose group is none of 0 to `groups` - 1."""
    enough = -(-group_N.shape[0] // size) + groups
    turns = -(-enough // at_once)
    at_once = -(-enough // turns)
    number = turns * at_once
    counts_E = jnp.sum(jax.nn.one_hot(group_N, groups, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    blocks_E = -(-counts_E // size)
    ends_E = jnp.cumsum(blocks_E, dtype=jnp.int32)
    group_M = jnp.searchsorted(ends_E, jnp.arange(number, dtype=jnp.int32), side="right").astype(jnp.int32)
    rank_N = jnp.argsort(jnp.argsort(group_N, stable=True)).astype(jnp.int32)
    before_E = jnp.cumsum(counts_E, dtype=jnp.int32) - counts_E
    shift_E = (ends_E - blocks_E) * size - before_E
    inside_N = (group_N >= 0) & (group_N < groups)
    place_N = jnp.where(inside_N, rank_N + jnp.take(shift_E, group_N, mode="clip"), number * size)
    float_MG = jnp.minimum(group_M, groups - 1).astype(jnp.float32).reshape(turns, at_once)
    return Blocks(float_MG, (-(-ends_E[-1] // at_once)).astype(jnp.float32)), place_N


@jax.custom_vjp
def grouped_product(rows_RI: Array, weight_EIO: Array, blocks: Blocks) -> Array:
    """Rows in blocks times their groups' weights, [R, O]; all of them vary over the same axes."""
    out_RO = _zeros((rows_RI.shape[0], weight_EIO.shape[2]), rows_RI.dtype, rows_RI)

    def multiply(turn: Array, out_RO: Array) -> Array:
        return _put(out_RO, jnp.matmul(_rows(rows_RI, blocks, turn), _weights(weight_EIO, blocks, turn)), turn)

    return _for_turns(blocks, multiply, out_RO)


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
    shape, dtype = (groups, rows_RI.shape[1], grad_RO.shape[1]), at_least_fp32(rows_RI.dtype)

    def add(turn: Array, total_EIO: Array) -> Array:
        rows_GNI, grads_GNO = (_rows(x, blocks, turn) for x in (rows_RI, grad_RO))
        product_GIO = jnp.matmul(rows_GNI.swapaxes(1, 2), grads_GNO, preferred_element_type=dtype)
        group_G = blocks.group_MG[turn].astype(jnp.int32)
        if len(group_G) == 1:  # in place, where XLA for CPUs would copy
            return total_EIO.at[group_G[0]].add(product_GIO[0])
        return total_EIO.at[group_G].add(product_GIO, indices_are_sorted=True, unique_indices=False)

    return _for_turns(blocks, add, _zeros(shape, dtype, rows_RI)).astype(rows_RI.dtype)


def _for_turns(blocks: Blocks, body: Any, start: Array) -> Array:
    return lax.fori_loop(jnp.zeros((), jnp.int32), blocks.used.astype(jnp.int32), body, start)


def _rows(rows_R: Array, blocks: Blocks, turn: Array) -> Array:
    """A turn's rows [G, N, …]."""
    turns, at_once = blocks.group_MG.shape
    count = rows_R.shape[0] // turns
    return lax.dynamic_slice_in_dim(rows_R, turn * count, count, 0).reshape(at_once, -1, *rows_R.shape[1:])


def _weights(weight_E: Array, blocks: Blocks, turn: Array) -> Array:
    """The weights of a turn's blocks, [G, …]."""
    group_G = blocks.group_MG[turn].astype(jnp.int32)
    if len(group_G) == 1:
        return lax.dynamic_index_in_dim(weight_E, group_G[0], 0)
    return jnp.take(weight_E, group_G, axis=0, mode="clip", indices_are_sorted=True)


def _put(out_RO: Array, product_GNO: Array, turn: Array) -> Array:
    """The products of a turn in their place among all rows."""
    product_RO = product_GNO.reshape(-1, product_GNO.shape[-1])
    return lax.dynamic_update_slice_in_dim(out_RO, product_RO, turn * product_RO.shape[0], 0)


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

    contracted_axes: tuple[str, ...]  # mesh axes that shard I
    output_axes: tuple[str, ...]  # mesh axes that shard O
    trained: bool

    def forward(self, rows: Array, weights: Sequence[Float8Weight], *blocks: Array) -> list[Array]:
        """The outputs."""

        def in_float8() -> list[Array]:
            copies = forward_copies(weights)
            own = scaled(rows, 1, copies[0].values.dtype, self.contracted_axes)
            return [_in_float8(own, copy, rows.dtype, *blocks) for copy in copies]

        return either(weights, in_float8, lambda: [group_product(rows, weight.array, *blocks) for weight in weights])

    def input_gradient(self, grads: Sequence[Array], weights: Sequence[Float8Weight], *blocks: Array) -> Array:
        """The gradient of the rows."""

        def in_float8() -> Array:
            copies = backward_copies(weights)
            owns = scaled_together(grads, [1] * len(copies), copies[0].values.dtype, self.output_axes)
            pairs = zip(owns, copies, strict=True)
            return sum_of(_in_float8(own, copy, grads[0].dtype, *blocks) for own, copy in pairs)

        arrays = [weight.array for weight in weights]
        return either(weights, in_float8, lambda: group_input_gradient(grads, arrays, *blocks))

    def weight_gradients(
        self, rows: Array, grads: Sequence[Array], weights: Sequence[Float8Weight], *blocks: Array
    ) -> list[Array]:
        """The gradients of the weights, in the compute dtype."""
        return [group_weight_gradient(rows, grad, weights[0].array.shape[0], *blocks) for grad in grads]


def _in_float8(rows: Scaled, weight: Scaled, dtype: Any, *blocks: Array) -> Array:
    if not blocks:
        return multiplied(rows, weight, 1, dtype, batch=1)
    of = Blocks(*blocks)

    def multiply(turn: Array, out_RO: Array) -> Array:
        own = Scaled(*(_rows(each, of, turn) for each in rows))
        weights = Scaled(*(_weights(each, of, turn) for each in weight))
        return _put(out_RO, multiplied(own, weights, 1, dtype, batch=1), turn)

    out_RO = _zeros((rows.values.shape[0], weight.values.shape[1]), dtype, rows.values)
    return _for_turns(of, multiply, out_RO)
