"""Multiply rows with the weight of the group that each belongs to, and with no other. Rows are sorted by group and
padded to whole blocks per group. Kernels multiply the used blocks (`kernels/grouped.py`), or else a loop: in each turn
one or, where turns are expensive, several with copies of their weights. (`lax.ragged_dot` multiplies every row with the
weights of all groups, on CPUs and on GPUs.)

Letters: E groups, I what goes into a product, O what comes out, M turns, G blocks of a turn, N rows of a group or of a
block, R rows of all blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.collectives import vary_as
from megajax.core.parallel.float8 import Scaled, multiplied
from megajax.core.precision import at_least_fp32
from megajax.core.private import has_gpu_kernels

_OF_KERNELS = 128  # rows of a block for the kernels, and what divides the widths of their weights
_KERNEL_DTYPES = [jnp.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """The groups of the blocks; floats, which represent such numbers exactly, so that they may be factors of a
    product."""

    group_MG: Array
    used: Array  # how many blocks have rows, a scalar; the others are left out. Rows of no group are zeros
    by_kernel: bool = field(metadata={"static": True})  # kernels multiply whatever they can

    @property
    def numbers(self) -> tuple[Array, Array]:
        """The groups of all blocks, one turn after the other, and how many are used, int32."""
        return self.group_MG.astype(jnp.int32).reshape(-1), self.used.astype(jnp.int32)


def in_blocks(
    group_N: Array, groups: int, size: int, at_once: int = 1, *, by_kernel: bool = False
) -> tuple[Blocks, Array]:
    """Blocks of `size` rows for N rows of these groups, at most `at_once` of them in a turn of a loop, and the place of
    each row in them, int32; R for a row whose group is none of 0 to `groups` - 1."""
    enough = -(-group_N.shape[0] // size) + groups
    turns = -(-enough // at_once)
    at_once = -(-enough // turns)
    number = turns * at_once
    counts_E = jnp.sum(jax.nn.one_hot(group_N, groups, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    blocks_E = -(-counts_E // size)
    ends_E = jnp.cumsum(blocks_E, dtype=jnp.int32)
    group_M = _places_in(ends_E, number)
    rank_N = jnp.argsort(jnp.argsort(group_N, stable=True)).astype(jnp.int32)
    before_E = jnp.cumsum(counts_E, dtype=jnp.int32) - counts_E
    shift_E = (ends_E - blocks_E) * size - before_E
    inside_N = (group_N >= 0) & (group_N < groups)
    place_N = jnp.where(inside_N, rank_N + jnp.take(shift_E, group_N, mode="clip"), number * size)
    float_MG = jnp.minimum(group_M, groups - 1).astype(jnp.float32).reshape(turns, at_once)
    return Blocks(float_MG, ends_E[-1].astype(jnp.float32), by_kernel), place_N


def grouped_product(rows_RI: Array, weight_EIO: Array, blocks: Blocks, *, turned: bool = False) -> Array:
    """Rows in blocks times their groups' weights, [R, O], or times the `turned` ones; all of them vary over the same
    axes."""
    if _by_kernel(rows_RI, blocks, *weight_EIO.shape[1:]):
        return _kernel_product(rows_RI, weight_EIO, blocks, turned=turned)
    weight_EIO = weight_EIO.swapaxes(1, 2) if turned else weight_EIO
    out_RO = vary_as(jnp.zeros((rows_RI.shape[0], weight_EIO.shape[2]), rows_RI.dtype), rows_RI)

    def multiply(turn: Array, out_RO: Array) -> Array:
        return _put(out_RO, jnp.matmul(_rows(rows_RI, blocks, turn), _weights(weight_EIO, blocks, turn)), turn)

    return _for_turns(blocks, multiply, out_RO)


def grouped_weight_gradient(rows_RI: Array, grad_RO: Array, blocks: Blocks, groups: int) -> Array:
    """The gradient of the weights, [E, I, O], summed in at least fp32, in the dtype of the rows."""
    shape, dtype = (groups, rows_RI.shape[1], grad_RO.shape[1]), at_least_fp32(rows_RI.dtype)
    if _by_kernel(rows_RI, blocks, *shape[1:]):
        from megajax.core.kernels import grouped

        group_M, used = blocks.numbers
        ends_E = jnp.minimum(_places_in(group_M, groups), used)  # the block after each group's last one
        starts_E = jnp.concatenate([jnp.zeros_like(ends_E[:1]), ends_E[:-1]])
        return vary_as(grouped.weight_gradient(rows_RI, grad_RO, starts_E, ends_E, rows_RI.dtype), rows_RI)

    def add(turn: Array, total_EIO: Array) -> Array:
        rows_GNI, grads_GNO = (_rows(x, blocks, turn) for x in (rows_RI, grad_RO))
        product_GIO = jnp.matmul(rows_GNI.swapaxes(1, 2), grads_GNO, preferred_element_type=dtype)
        group_G = blocks.group_MG[turn].astype(jnp.int32)
        if len(group_G) == 1:  # in place, where XLA for CPUs would copy
            return total_EIO.at[group_G[0]].add(product_GIO[0])
        return total_EIO.at[group_G].add(product_GIO, indices_are_sorted=True, unique_indices=False)

    return _for_turns(blocks, add, vary_as(jnp.zeros(shape, dtype), rows_RI)).astype(rows_RI.dtype)


def kernels_can(dtype: Any, block: int, *widths: int) -> bool:
    """Whether kernels can multiply blocks of so many rows with weights of these widths, and give their gradients."""
    return jnp.dtype(dtype) in _KERNEL_DTYPES and block == _OF_KERNELS and not any(n % _OF_KERNELS for n in widths)


def _by_kernel(rows_R: Array, blocks: Blocks, *widths: int) -> bool:
    """Whether a kernel multiplies these rows."""
    block = rows_R.shape[0] // blocks.group_MG.size
    return blocks.by_kernel and has_gpu_kernels() and kernels_can(rows_R.dtype, block, *widths)


def _kernel_product(rows: Array, weight: Array, blocks: Blocks, dtype: Any = None, *, turned: bool = False) -> Array:
    from megajax.core.kernels import grouped  # JAX 0.10 lacks what it imports

    return vary_as(grouped.grouped_product(rows, weight, *blocks.numbers, dtype or rows.dtype, turned=turned), rows)


def _places_in(sorted_N: Array, count: int) -> Array:
    """How many of these numbers are at most 0, 1, …, int32 [count]; by comparing all, since a search is a loop."""
    numbers = jnp.arange(count, dtype=jnp.int32)
    return jnp.searchsorted(sorted_N, numbers, side="right", method="compare_all").astype(jnp.int32)


def _for_turns(blocks: Blocks, body: Any, start: Array) -> Array:
    used = blocks.used.astype(jnp.int32)
    return lax.fori_loop(jnp.zeros((), jnp.int32), -(-used // blocks.group_MG.shape[1]), body, start)


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


def group_biased(y: Array, bias_EO: Array, blocks: Blocks | None = None) -> Array:
    """Outputs [E, N, O], or [R, O] in blocks, each with its group's bias; blocks without rows have none, so that their
    gradients are in no sum."""
    if blocks is None:
        return y + bias_EO[:, None]
    group_M, used = blocks.numbers
    wide_EO = bias_EO.astype(at_least_fp32(y.dtype))  # so that its gradient is a sum of that dtype
    of_block_MO = jnp.take(wide_EO, group_M, axis=0, mode="clip", indices_are_sorted=True).astype(y.dtype)
    used_M = jnp.arange(group_M.shape[0], dtype=jnp.int32) < used
    of_block_MO = jnp.where(used_M[:, None], of_block_MO, jnp.zeros((), y.dtype))
    return (y.reshape(*of_block_MO.shape[:1], -1, y.shape[1]) + of_block_MO[:, None]).reshape(y.shape)


@dataclass(frozen=True)
class GroupRule:
    """The rule of products of rows, [E, N, I] or in blocks [R, I], with their groups' weights [E, I, O]."""

    groups: int
    together: bool = False

    def forward(self, rows: Array, weights: Sequence[Array], blocks: Blocks | None = None) -> list[Array]:
        if blocks is None:
            return [jnp.einsum("eni,eio->eno", rows, weight) for weight in weights]
        return [grouped_product(rows, weight, blocks) for weight in weights]

    def input_gradient(self, grads: Sequence[Array], weights: Sequence[Array], blocks: Blocks | None = None) -> Array:
        pairs = zip(grads, weights, strict=True)
        if blocks is not None:
            return reduce(jnp.add, (grouped_product(grad, weight, blocks, turned=True) for grad, weight in pairs))
        first_ENI, *others = (jnp.einsum("eno,eio->eni", grad, weight) for grad, weight in pairs)
        if not others:
            return first_ENI
        # They are sent sorted by row. XLA can have a product so, but not a sum, below which it moves the transpositions
        # if none is behind a barrier.
        first_NEI = lax.optimization_barrier(first_ENI.swapaxes(0, 1))
        return sum((other.swapaxes(0, 1) for other in others), start=first_NEI).swapaxes(0, 1)

    def weight_gradients(self, rows: Array, grads: Sequence[Array], blocks: Blocks | None = None) -> list[Array]:
        if blocks is None:
            return [jnp.einsum("eno,eni->eoi", grad, rows).swapaxes(1, 2) for grad in grads]  # as JAX's own gradient
        return [grouped_weight_gradient(rows, grad, blocks, self.groups) for grad in grads]


def multiplied_by_group(rows: Scaled, weight: Scaled, dtype: Any, blocks: Blocks | None = None) -> Array:
    """`float8.multiplied` of rows with their groups' weights."""
    if blocks is None:
        return multiplied(rows, weight, dtype, batch=1)
    if _by_kernel(rows.values, blocks, *weight.values.shape[1:]):
        out_RO = _kernel_product(rows.values, weight.values, blocks, dtype, turned=True)
        group_M, _ = blocks.numbers
        of_block_MO = jnp.take(weight.scale, group_M, axis=0, mode="clip", indices_are_sorted=True)
        out_MNO = out_RO.reshape(len(group_M), -1, out_RO.shape[1]) * of_block_MO[:, None].astype(dtype)
        return out_MNO.reshape(out_RO.shape) * rows.scale[:, None].astype(dtype)

    def multiply(turn: Array, out_RO: Array) -> Array:
        own = Scaled(*(_rows(each, blocks, turn) for each in rows))
        weights = Scaled(*(_weights(each, blocks, turn) for each in weight))
        return _put(out_RO, multiplied(own, weights, dtype, batch=1), turn)

    out_RO = vary_as(jnp.zeros((rows.values.shape[0], weight.values.shape[1]), dtype), rows.values)
    return _for_turns(blocks, multiply, out_RO)
