"""The gated delta rule of linear attention, in chunks of tokens: by matrix products alone (Yang et al., arXiv
2412.06464; with decays by channel: Kimi Team, arXiv 2510.26692).

A head keeps a state S [K, V]. Every token first decays it, `S <- exp(g) S`, then writes `b k (v - k S)` to it, and
reads `q S`, where k and q are divided by their norms, and q by the square root of K. A document begins with a g of
-inf.

Decays are only ever sums of g over a range of tokens, never differences of cumulative sums. So no exponent is positive,
nothing cancels, and -inf needs no mask, forward or backward.

Letters: B batch, H heads (maybe fewer for queries and keys), T tokens, K key size, V value size, G 1 or K: one decay
for all channels of a key or one for each, N chunks, C tokens of a chunk, M segments, P pieces of a sequence.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.core.parallel.collectives import vary_as
from megajax.core.precision import at_least_fp32

_EPSILON = 1e-6  # added to squared norms by all published models


class Tokens(NamedTuple):
    """What the rule needs of tokens."""

    query_BHTK: Array
    key_BHTK: Array
    value_BHTV: Array
    decay_BHTG: Array  # g, at most 0, in at least fp32
    write_BHT1: Array  # b

    def in_parts(self, size: int) -> "Tokens":
        """Equal parts of `size` tokens, in a dim before the others. The tokens that fill up the last part decay and
        write nothing."""

        def divided(x_BHTK: Array) -> Array:
            filled = jnp.pad(x_BHTK, [(0, 0), (0, 0), (0, -x_BHTK.shape[2] % size), (0, 0)])
            return jnp.moveaxis(filled.reshape(*filled.shape[:2], -1, size, filled.shape[-1]), 2, 0)

        return Tokens(*map(divided, self))

    @property
    def prepared(self) -> "Tokens":
        """In at least fp32, with queries and keys normalized, for all heads."""
        query, key, value, decay, write = (x.astype(at_least_fp32(x.dtype)) for x in self)
        query, key = (
            jnp.repeat(x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + _EPSILON), value.shape[1] // x.shape[1], 1)
            for x in (query, key)
        )
        return Tokens(query * key.shape[-1] ** -0.5, key, value, decay, write)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[B, H, K, V]"""
        return (*self.value_BHTV.shape[:2], self.key_BHTK.shape[-1], self.value_BHTV.shape[-1])


def _joined(x_NBHCV: Array, length: int) -> Array:
    """The inverse of `in_parts` for an array of so many tokens."""
    x_BHNCV = jnp.moveaxis(x_NBHCV, 0, 2)
    return x_BHNCV.reshape(*x_BHNCV.shape[:2], -1, x_BHNCV.shape[-1])[:, :, :length]


class Chunks(NamedTuple):
    """What chunks do to the state S that enters them: they write the values `new = written - erased S`, read
    `read S + within new`, and leave `kept S + keys new`."""

    read_NBHCK: Array
    within_NBHCC: Array
    written_NBHCV: Array
    erased_NBHCK: Array
    kept_NBHK1: Array
    keys_NBHKC: Array

    @classmethod
    def of(cls, tokens: Tokens, chunk: int) -> "Chunks":
        """Those of tokens, a power of two in each chunk."""
        query, key, value, decay, write = tokens.prepared.in_parts(chunk)
        up_to, behind = jnp.exp(jnp.cumsum(decay, -2)), jnp.exp(_behind(decay))
        inverse = unit_inverse(jnp.tril(write * decayed_products(key, key, decay), -1))
        read, within = query * up_to, decayed_products(query, key, decay)
        written, erased = inverse @ (write * value), inverse @ (write * key * up_to)
        return cls(read, within, written, erased, up_to[..., -1, :, None], (key * behind).mT)

    def states(self, state_BHKV: Array) -> tuple[Array, Array]:
        """The states that enter each chunk, [N, …], and the last one, given the first one."""

        def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            written, erased, kept, keys = chunk
            return kept * state + keys @ (written - erased @ state), state

        last, entering = lax.scan(step, state_BHKV, self[2:])
        return entering, last

    def outputs(self, entering_NBHKV: Array) -> Array:
        """What the tokens read, [N, B, H, C, V], given the states that enter each chunk."""
        new_NBHCV = self.written_NBHCV - self.erased_NBHCK @ entering_NBHKV
        return self.read_NBHCK @ entering_NBHKV + self.within_NBHCC @ new_NBHCV


def delta_rule(tokens: Tokens, chunk: int, segment: int, state_BHKV: Array | None = None) -> tuple[Array, Array]:
    """What the tokens read, [B, H, T, V], and the state after them, given the state before them, by default zeros; both
    in at least fp32. The backward pass keeps the state of every segment and computes the rest again."""
    chunk, segment = _sizes(tokens, chunk, segment)

    @partial(jax.checkpoint, prevent_cse=False)
    def computed(state_BHKV: Array, tokens: Tokens) -> tuple[Array, Array]:
        chunks = Chunks.of(tokens, chunk)
        entering_NBHKV, last_BHKV = chunks.states(state_BHKV)
        return last_BHKV, _joined(chunks.outputs(entering_NBHKV), segment)

    def step(state_BHKV: Array, tokens: Tokens) -> tuple[Array, Array]:
        return computed(checkpoint_name(state_BHKV, "attention_statistics"), tokens)

    nothing = jnp.zeros(tokens.state_shape, tokens.decay_BHTG.dtype)
    first_BHKV = vary_as(nothing if state_BHKV is None else state_BHKV, tokens)  # as when they have changed it
    last_BHKV, read_MBHTV = lax.scan(step, first_BHKV, tokens.in_parts(segment))
    return _joined(read_MBHTV, tokens.key_BHTK.shape[2]), last_BHKV


def state_map(tokens: Tokens, chunk: int, segment: int) -> Array:
    """What tokens make of any state S that enters them, `F + R S`, as [F | R], [B, H, K, V + K]. The scan over chunks
    that makes F, of a state of zeros, makes R too, of a unit matrix that nothing is written to."""
    chunk, segment = _sizes(tokens, chunk, segment)
    *of_heads, size, _ = tokens.state_shape
    nothing = jnp.zeros(tokens.state_shape, tokens.decay_BHTG.dtype)
    unit_BHKK = jnp.broadcast_to(jnp.eye(size, dtype=nothing.dtype)[None, None], (*of_heads, size, size))
    first_BHKW = vary_as(jnp.concatenate([nothing, unit_BHKK], -1), tokens)

    @partial(jax.checkpoint, prevent_cse=False)
    def step(map_BHKW: Array, tokens: Tokens) -> tuple[Array, None]:
        chunks = Chunks.of(tokens, chunk)
        wider = [(0, 0)] * (chunks.written_NBHCV.ndim - 1) + [(0, size)]
        return chunks._replace(written_NBHCV=jnp.pad(chunks.written_NBHCV, wider)).states(map_BHKW)[1], None

    return lax.scan(step, first_BHKW, tokens.in_parts(segment))[0]


def states_between(map_PBHKW: Array) -> Array:
    """The states that enter a sequence's pieces, [P, B, H, K, V], from what each makes of a state (`state_map`)."""
    value_size = map_PBHKW.shape[-1] - map_PBHKW.shape[-2]

    def step(state_BHKV: Array, map_BHKW: Array) -> tuple[Array, Array]:
        return map_BHKW[..., :value_size] + map_BHKW[..., value_size:] @ state_BHKV, state_BHKV

    return lax.scan(step, jnp.zeros_like(map_PBHKW[0, ..., :value_size]), map_PBHKW)[1]


def decayed_products(x_C: Array, y_C: Array, decay_C: Array) -> Array:
    """`x[i] · y[j]` of the tokens j up to i of a chunk, each channel times the exponential of its decays over
    j < l <= i, [..., C, C]; 0 for later j. All are [..., C, K] but for the decays, [..., C, G]."""
    *before, size, _ = x_C.shape
    if decay_C.shape[-1] == 1:
        row, column = (lax.broadcasted_iota(jnp.int32, (*before, size, size), len(before) + dim) for dim in (0, 1))
        sums = jnp.cumsum(jnp.where(row > column, decay_C, 0.0), -2)  # down the rows, from the column's token on
        return (x_C @ y_C.mT) * jnp.exp(jnp.where(row >= column, sums, -jnp.inf))
    if size == 1:
        return jnp.sum(x_C * y_C, -1, keepdims=True)
    (x1, x2), (y1, y2), (g1, g2) = _halves(x_C), _halves(y_C), _halves(decay_C)
    # The later half sees the earlier one across the middle: both exponents are at most 0.
    across = (x2 * jnp.exp(jnp.cumsum(g2, -2))) @ (y1 * jnp.exp(_behind(g1))).mT
    within = decayed_products(*(jnp.stack(pair, -3) for pair in ((x1, x2), (y1, y2), (g1, g2))))
    return _blocks(within, across)


def unit_inverse(lower_CC: Array) -> Array:
    """The inverse of 1 plus strictly lower triangular matrices, [..., C, C], by halves: as stable as substitution. A
    product of 1 + (-A)^(2^n) is not, where keys resemble each other: the powers are huge and cancel."""
    size = lower_CC.shape[-1]
    if size == 1:
        return jnp.ones_like(lower_CC)
    half, exactly = size // 2, partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    inverse = unit_inverse(jnp.stack([lower_CC[..., :half, :half], lower_CC[..., half:, half:]], -3))
    first, second = inverse[..., 0, :, :], inverse[..., 1, :, :]
    return _blocks(inverse, -exactly(exactly(second, lower_CC[..., half:, :half]), first))


def _behind(decay_C: Array) -> Array:
    """Sums of decays over a chunk's tokens behind each."""
    later = jnp.concatenate([decay_C[..., 1:, :], jnp.zeros_like(decay_C[..., :1, :])], -2)
    return lax.cumsum(later, later.ndim - 2, reverse=True)


def _halves(x_C: Array) -> tuple[Array, Array]:
    half = x_C.shape[-2] // 2
    return x_C[..., :half, :], x_C[..., half:, :]


def _blocks(diagonal: Array, lower: Array) -> Array:
    """Block triangular matrices, [..., C, C], from two blocks [..., 2, C / 2, C / 2] and the one below."""
    above = jnp.concatenate([diagonal[..., 0, :, :], jnp.zeros_like(lower)], -1)
    return jnp.concatenate([above, jnp.concatenate([lower, diagonal[..., 1, :, :]], -1)], -2)


def _sizes(tokens: Tokens, chunk: int, segment: int) -> tuple[int, int]:
    """Sizes of chunks and segments that are no larger than needed."""
    length = tokens.key_BHTK.shape[2]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    return chunk, min(segment // chunk, -(-length // chunk)) * chunk
