"""Which device holds which tokens of a sequence.

With context parallelism (`models/context_attention.py`) the devices of a context group share the tokens of a sequence
everywhere. Sequence parallelism further divides each one's tokens over `tensor` between the tensor-parallel regions
(`boundary.py`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.collectives import CONTEXT, TENSOR, axis_index, axis_size, g, own_shard

TOKENS = 1  # the token dim of x_BTD
ContextWay = Literal["none", "heads", "gather", "window"]  # how attention reaches tokens on other devices


@dataclass(frozen=True)
class TokenShares:
    """How the devices of a context and a tensor group share the tokens of a sequence."""

    sequence_parallel: bool = False  # activations between the regions are sharded along the sequence, over `tensor`
    context: ContextWay = "none"  # "none": every device of a context group has all tokens

    def context_starts(self, length: int) -> tuple[list[Array | int], int]:
        """Where this context rank's pieces of a sequence of `length` tokens start, and the length of each piece. With
        gathered keys a rank has two, the n-th from the front and the n-th from the back, so that causal attention is
        the same amount of work on every rank."""
        if self.context == "none":
            return [0], length
        count, own = axis_size(CONTEXT), axis_index(CONTEXT)
        if self.context != "gather":
            return [own * (length // count)], length // count
        size = length // (2 * count)
        return [own * size, (2 * count - 1 - own) * size], size

    def context_tokens(self, x: Array, dim: int = TOKENS) -> Array:
        """Select this context rank's tokens from an array with an entry for every token along `dim`."""
        if self.context == "none":
            return x
        starts, size = self.context_starts(x.shape[dim])
        return jnp.concatenate([lax.dynamic_slice_in_dim(x, start, size, dim) for start in starts], dim)

    def own_tokens(self, x: Array, dim: int = TOKENS) -> Array:
        """Select this device's tokens from an array with an entry for every token along `dim`."""
        x = self.context_tokens(x, dim)
        return own_shard(x, dim, TENSOR) if self.sequence_parallel else x

    def token_index(self, x_BTD: Array) -> Array:
        """Positions in the sequence of the tokens of an activation between the regions, int32 [T]."""
        size = x_BTD.shape[TOKENS]
        if self.context == "none":
            first = axis_index(TENSOR) * size if self.sequence_parallel else 0
            return first + jnp.arange(size, dtype=jnp.int32)
        return self.own_tokens(jnp.arange(self._length(size), dtype=jnp.int32), 0)

    def length_of(self, x_BTD: Array) -> int:
        """Full length of the sequences that an activation between the regions is a shard of."""
        return self._length(x_BTD.shape[TOKENS])

    def sum_over_tokens(self, x: Array) -> Array:
        """Sum `x`, computed from this device's tokens, over the devices that share the sequence."""
        return g(x, self._shared_over) if self._shared_over else x

    def sum_over_context(self, x: Array) -> Array:
        """Sum `x`, computed from this context rank's tokens, over the devices that share the sequence."""
        return x if self.context == "none" else g(x, CONTEXT)

    def _length(self, size: int) -> int:
        """Full length of a sequence of which each device has `size` tokens between the regions."""
        return size * math.prod(axis_size(axis) for axis in self._shared_over)

    @property
    def _shared_over(self) -> tuple[str, ...]:
        """The axes whose devices share the tokens between the regions."""
        return (CONTEXT,) * (self.context != "none") + (TENSOR,) * self.sequence_parallel

    def at_places(self, x_BTD: Array, places_BM: Array) -> Array:
        """Pick an activation between the regions at these positions, [B, M, D], on every device of a tensor and context
        group. If the tokens are shared, each device looks up those it has, and `g` adds the results."""
        if not self._shared_over:
            return _rows_at(x_BTD, places_BM)
        index_BM, here_BM = self._own_places(places_BM, x_BTD.shape[TOKENS])
        found_BMD = _rows_at(x_BTD, index_BM)
        return g(jnp.where(here_BM[..., None], found_BMD, jnp.zeros((), x_BTD.dtype)), self._shared_over)

    def _own_places(self, places_BM: Array, size: int) -> tuple[Array, Array]:
        """Local indices, among this device's `size` tokens, of positions in the sequence, and whether it has them."""
        group = size * (axis_size(TENSOR) if self.sequence_parallel else 1)
        starts, piece = self.context_starts(self._length(size))
        index_BM = jnp.full_like(places_BM, -1)
        for number, start in enumerate(starts):
            inside_BM = (places_BM >= start) & (places_BM < start + piece)
            index_BM = jnp.where(inside_BM, places_BM - start + number * piece, index_BM)
        first = axis_index(TENSOR) * size if group > size else 0
        here_BM = (index_BM >= first) & (index_BM < first + size)
        return jnp.clip(index_BM - first, 0, size - 1), here_BM

    def counted_here(self, values_BM: Array, places_BM: Array, length: int) -> Array:
        """Values at positions of a sequence of `length` tokens, identical across a context group, zeroed except on the
        device that has the token, so that a sum over devices counts each once."""
        if self.context == "none":
            return values_BM
        starts, size = self.context_starts(length)
        here = [(places_BM >= start) & (places_BM < start + size) for start in starts]
        return jnp.where(jnp.any(jnp.stack(here), axis=0), values_BM, jnp.zeros((), values_BM.dtype))

    def once(self, values: Any) -> Any:
        """Values that are identical across a context group, zeroed except on its first device."""
        return values if self.context == "none" else once(values)

    def in_places(self, x_BTK: Array) -> Array:
        """Place this device's per-token values at their positions in the whole sequence, zero elsewhere; K is small."""
        if not self._shared_over:
            return x_BTK
        index_T = self.token_index(x_BTK)
        nothing = jnp.zeros((x_BTK.shape[0], self._length(len(index_T)), *x_BTK.shape[2:]), x_BTK.dtype)
        return nothing.at[:, index_T].set(x_BTK, unique_indices=True)

    def of_all_tokens(self, x_BTK: Array) -> Array:
        """Per-token values of the whole sequence on every device that shares it: each fills in its own, and `g` adds
        them. K is small."""
        return g(self.in_places(x_BTK), self._shared_over) if self._shared_over else x_BTK

    def of_first_token(self, values: Any) -> Any:
        """Values that each device computed from its own first token, replaced by those from the sequence's first token,
        and zeroed on the devices of a context group that do not have it."""
        if self.sequence_parallel:
            here = axis_index(TENSOR) == 0
            values = g(jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros((), x.dtype)), values), TENSOR)
        return self.once(values)


def once(values: Any) -> Any:
    """Values that are identical across a context group, zeroed except on the first device: a sum counts them once."""
    here = axis_index(CONTEXT) == 0
    return jax.tree.map(lambda x: jnp.where(here, x, jnp.zeros((), x.dtype)), values)


def _rows_at(x_BTD: Array, places_BM: Array) -> Array:
    return jnp.take_along_axis(x_BTD, places_BM[..., None], axis=1, mode="clip")
