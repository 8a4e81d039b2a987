"""Linear attention with the gated delta rule (`delta_chunks.py`), sharded over `tensor` by heads.

Queries, keys and values pass a causal convolution of each channel, and the heads a norm with a gate. With decays by
channel (Kimi Team, arXiv 2510.26692) these and the gates come from latents, which are made between regions like those
of `latent.py`.

Documents begin with a state of zeros, and convolutions see none of the tokens before. If the devices of a context group
share a sequence, each gathers what every piece of it makes of a state, and the last tokens before its own pieces. The
pieces are rows of the batch.

Letters: B batch, T tokens, D model, H heads (maybe fewer for queries and keys), K key size, V value size, W tokens that
a convolution sees, R rows: the pieces of a sequence, each with the batch, P all pieces of a sequence.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.core.backend import Backend
from megajax.core.models.attention import Attend, Aux, attention_output
from megajax.core.models.cache import State
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.delta_chunks import Tokens, delta_rule, state_map, states_between
from megajax.core.models.norms import RMSNorm, recomputed
from megajax.core.models.remat import LATENTS
from megajax.core.parallel.boundary import NO_BOUNDARY, RegionBoundary
from megajax.core.parallel.collectives import CONTEXT, at_place, axis_index, axis_size, gather_shards
from megajax.core.parallel.layers import (
    ColumnParallelLinear,
    Initializer,
    ReplicatedLinear,
    RowParallelLinear,
    column_parallel,
    normal,
    param,
)
from megajax.core.parallel.products import spread
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named
from megajax.core.precision import at_least_fp32

_RATES = 1.0, 16.0  # the slowest and the fastest of the heads' initial decays, per unit of time
_TIMES = 0.001, 0.1  # the shortest and the longest initial time of a token
_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class DeltaAttention(nnx.Module):
    """Query, key, value, gate, decay and write strength by columns (that is, by heads), the output by rows."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        hidden, size, value = config.hidden_size, config.linear_key_size, config.linear_value_size
        numbers = {"linear_heads": config.linear_heads, "linear_key_heads": config.linear_key_heads}

        def by_heads(name: str, dim: str, each: dict[str, int], latent: int = 0) -> ColumnParallelLinear:
            source, around = ("linear_latent", NO_BOUNDARY) if latent else ("embed", boundary)
            shape, dims = (latent or hidden, numbers[dim], *each.values()), (source, dim, *each)
            initial = normal(key / name, config.init_std)
            return ColumnParallelLinear(initial, around, shape, dims, backend, bias=False)

        def down(name: str) -> ReplicatedLinear:
            initial, dims = normal(key / name, config.init_std), ("embed", "linear_latent")
            return ReplicatedLinear(initial, NO_BOUNDARY, (hidden, value), dims, backend, bias=False)

        def taps(name: str, dim: str, each: dict[str, int]) -> nnx.Param:
            width = config.linear_convolution

            def initial(shape: tuple[int, ...]) -> Array:
                return jax.random.uniform((key / name).key, shape, jnp.float32, -(width**-0.5), width**-0.5)

            return param((width, numbers[dim], *each.values()), ("taps", dim, *each), initial)

        of_key, of_value = {"linear_key_size": size}, {"linear_value_size": value}
        self.query = by_heads("query", "linear_key_heads", of_key)
        self.key = by_heads("key", "linear_key_heads", of_key)
        self.value = by_heads("value", "linear_heads", of_value)
        self.query_taps = taps("query_taps", "linear_key_heads", of_key)
        self.key_taps = taps("key_taps", "linear_key_heads", of_key)
        self.value_taps = taps("value_taps", "linear_heads", of_value)
        self.write = by_heads("write", "linear_heads", {})
        by_channel = config.linear_decay == "channel"
        latent, channels = (value, of_key) if by_channel else (0, {})
        self.decay_down = down("decay_down") if by_channel else None
        self.gate_down = down("gate_down") if by_channel else None
        self.decay = by_heads("decay", "linear_heads", channels, latent)
        self.attention_gate = by_heads("attention_gate", "linear_heads", of_value, latent)
        heads = config.linear_heads
        self.decay_rate = param((heads,), ("linear_heads",), _initial_rate(key / "decay_rate"))
        shape, dims = (heads, *channels.values()), ("linear_heads", *channels)
        self.decay_bias = param(shape, dims, _initial_bias(key / "decay_bias"))
        self.norm = RMSNorm(value, config.linear_norm_epsilon, "linear_value_size")
        residual = normal(key / "output", config.residual_init_std)
        shape, dims = (heads, value, hidden), ("linear_heads", "linear_value_size", "embed")
        self.output = RowParallelLinear(residual, boundary, shape, dims, backend, bias=False)
        self.config, self.boundary, self.backend = config, boundary, backend

    @property
    def products(self) -> dict[str, tuple]:
        """Its products with weights, by the names of their factors (`parallel/products.py`)."""
        of_input, output = (self.query, self.key, self.value, self.write), {"attention_output": (self.output,)}
        if self.decay_down is None:
            return {"attention_input": (*of_input, self.decay, self.attention_gate)} | output
        from_latents = {"attention_decay": (self.decay,), "attention_gate": (self.attention_gate,)}
        down = {"attention_down": (self.decay_down, self.gate_down)}
        return {"attention_input": of_input} | down | from_latents | output

    @jax.named_scope("attention")
    def __call__(self, x_BTD: Array, context: Context, attend: Attend) -> tuple[Array, Aux]:
        """Nothing attends: a state takes the place of keys and values. Where a cache is extended, `attend` is the
        layer's `State`; the result has the new one."""
        kept, real_BT = attend if isinstance(attend, State) else None, context.real_BT
        linears = self.products["attention_input"]
        outputs = column_parallel(x_BTD, *linears, name="attention_input", factors=context.factors)
        parts = self.query.first_part, self.key.first_part, None
        *inputs, write_BTH = outputs[:4]
        pieces, width = _Pieces(self.boundary, *write_BTH.shape[:2]), self.config.linear_convolution
        inputs = [
            pieces.rows(named(x, name, split=2, first=part))
            for x, name, part in zip(inputs, ("query", "key", "value"), parts, strict=True)
        ]
        decay, gate_BTHV = outputs[4:] or self._from_latents(x_BTD, context)
        decay_BTHG = decay if self.config.linear_decay == "channel" else decay[..., None]
        # A cache has zeros in place of tokens that there never were.
        position_RT = pieces.positions(context) + (width if kept else 0)
        before = [x.swapaxes(1, 2) for x in kept.before_BHWK] if kept else pieces.last_before(inputs, width - 1)
        q_RTHK, k_RTHK, v_RTHV = self._convolved(inputs, before, position_RT)
        decay_RTHG = _decays(pieces.rows(decay_BTHG), self.decay_rate[...], self.decay_bias[...], position_RT)
        write_RTH1 = self.config.linear_write * _sigmoid(pieces.rows(write_BTH)[..., None])
        if context.cache == "new" and real_BT is not None:  # a state passes what pads a prompt unchanged
            decay_RTHG, write_RTH1 = (jnp.where(real_BT[..., None, None], x, 0.0) for x in (decay_RTHG, write_RTH1))
        tokens = Tokens(*(x.swapaxes(1, 2) for x in (q_RTHK, k_RTHK, v_RTHV, decay_RTHG, write_RTH1)))
        sizes = self.config.linear_chunk, 4 * self.config.linear_chunk
        state_RHKV = pieces.entering(tokens, *sizes) if pieces.shared else kept.state_BHKV if kept else None
        heads_RHTV, last_RHKV = delta_rule(tokens, *sizes, state_RHKV)
        heads_RTHV = heads_RHTV.swapaxes(1, 2).astype(x_BTD.dtype)
        heads_BTHV = named(pieces.tokens(heads_RTHV), "ungated_heads", split=2)
        gate_BTHV = named(gate_BTHV, "attention_gate", split=2)
        heads_BTHV = _gated(self.norm(heads_BTHV), gate_BTHV, self.config.linear_gate)
        output_BTD = attention_output(heads_BTHV, self.output, context)
        if context.cache == "none":
            return output_BTD, {}
        length_B1 = jnp.sum(position_RT >= 0 if kept or real_BT is None else real_BT, 1, jnp.int32, keepdims=True)
        place_BW11 = (length_B1 + jnp.arange(width - 1, dtype=jnp.int32)[None])[..., None, None]
        joined = [jnp.concatenate(pair, 1) for pair in zip(before, inputs, strict=True)]
        last = tuple(jnp.take_along_axis(x, place_BW11, 1).swapaxes(1, 2) for x in joined)
        return output_BTD, {"cache": State(last, last_RHKV)}

    def _from_latents(self, x_BTD: Array, context: Context) -> list[Array]:
        """Decays and gates of all tokens of this context rank."""
        linears, factors = self.products["attention_down"], context.factors
        latents = column_parallel(x_BTD, *linears, name="attention_down", factors=factors)
        entered_BTL = self.boundary.enter(jnp.concatenate(latents, axis=-1))
        entered_BTL = named(entered_BTL, LATENTS, split=2, first=jnp.zeros((), jnp.int32))
        of_decay, of_gate = jnp.split(entered_BTL, 2, axis=-1)
        return [
            *column_parallel(of_decay, self.decay, name="attention_decay", factors=factors),
            *column_parallel(of_gate, self.attention_gate, name="attention_gate", factors=factors),
        ]

    def _convolved(self, inputs: list[Array], before: list[Array], position_RT: Array) -> list[Array]:
        """Queries, keys and values."""
        own = self.key.own
        taps = [own(self.query_taps[...], 1), own(self.key_taps[...], 1), self.value_taps[...]]
        return [_convolution(*each, position_RT) for each in zip(inputs, before, taps, strict=True)]


class _Pieces:
    """The pieces of the sequence that this device's tokens, [B, T, …], consist of, as rows: [R, T, …], piece by piece.
    Shorter ones than a convolution sees do not know all tokens before them."""

    def __init__(self, boundary: RegionBoundary, batch: int, length: int):
        self._boundary, self._batch = boundary, batch
        self.shared = boundary.context != "none"
        self._length = length * axis_size(CONTEXT) if self.shared else length
        self._number = len(boundary.context_starts(self._length)[0])

    def rows(self, x_BT: Array) -> Array:
        """Of tokens."""
        return jnp.concatenate(jnp.split(x_BT, self._number, 1))

    def tokens(self, x_RT: Array) -> Array:
        """The inverse of `rows`."""
        return jnp.concatenate(jnp.split(x_RT, self._number), 1)

    def positions(self, context: Context) -> Array:
        """Of the tokens in their documents, int32 [R, T]."""
        select, first_BT = self._boundary.context_tokens, context.visible.first_key_BT
        place_1T = select(jnp.arange(self._length, dtype=jnp.int32)[None])
        position_BT = place_1T if first_BT is None else place_1T - select(first_BT)
        return self.rows(jnp.broadcast_to(position_BT, (self._batch, position_BT.shape[1])))

    def last_before(self, arrays: list[Array], number: int) -> list[Array]:
        """Of each array, [R, T, …], the last tokens before this device's pieces, [R, number, …]."""
        if not self.shared:
            return [jnp.zeros_like(x, shape=(x.shape[0], number, *x.shape[2:])) for x in arrays]
        assert arrays[0].shape[1] >= number, "a piece is shorter than what a convolution sees"
        last = [x[:, x.shape[1] - number :] for x in arrays]
        flat = self._in_order(jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in last], -1))
        flat = self._own(jnp.concatenate([jnp.zeros_like(flat[:1]), flat[:-1]]))
        ends = [sum(x[0, 0].size for x in last[: n + 1]) for n in range(len(last) - 1)]
        return [x.reshape(like.shape) for x, like in zip(jnp.split(flat, ends, -1), last, strict=True)]

    def entering(self, tokens: Tokens, chunk: int, segment: int) -> Array:
        """The states that enter this device's pieces."""
        return self._own(states_between(self._in_order(state_map(tokens, chunk, segment))))

    def _in_order(self, x_R: Array) -> Array:
        """What all pieces have, in the order of the sequence, [P, B, …]."""
        every = gather_shards(x_R[None], 0, CONTEXT)
        every = every.reshape(every.shape[0], self._number, -1, *x_R.shape[1:])
        return every[:, 0] if self._number == 1 else jnp.concatenate([every[:, 0], every[::-1, 1]])

    def _own(self, x_PB: Array) -> Array:
        """What this device's pieces have of all, [R, …]."""
        first = axis_index(CONTEXT)
        mine = [at_place(x_PB, place) for place in (first, x_PB.shape[0] - 1 - first)[: self._number]]
        return checkpoint_name(jnp.concatenate(mine), "attention_received")


@recomputed
def _convolution(x_RTHK: Array, before_RWHK: Array, taps_WHK: Array, position_RT: Array) -> Array:
    """A causal convolution of every channel within documents, and SiLU, in at least fp32."""
    dtype, (width, *_), length = at_least_fp32(x_RTHK.dtype), taps_WHK.shape, x_RTHK.shape[1]
    joined = jnp.concatenate([before_RWHK, x_RTHK], 1).astype(dtype)
    total = jnp.zeros_like(joined[:, width - 1 :])
    for back in range(width):
        seen = (position_RT >= back)[..., None, None]
        tap = jnp.where(seen, joined[:, width - 1 - back :][:, :length], jnp.zeros((), dtype))
        total += tap * spread(taps_WHK[width - 1 - back].astype(dtype), tap)
    return jax.nn.silu(total).astype(x_RTHK.dtype)


@recomputed
def _decays(raw_RTHG: Array, rate_H: Array, bias_HG: Array, position_RT: Array) -> Array:
    """`-exp(rate) softplus(raw + bias)`, and -inf at the start of a document, in at least fp32."""
    raw_RTHG = raw_RTHG.astype(at_least_fp32(raw_RTHG.dtype))
    bias_HG = bias_HG if bias_HG.ndim > 1 else bias_HG[:, None]
    time_RTHG = jax.nn.softplus(raw_RTHG + spread(bias_HG.astype(raw_RTHG.dtype), raw_RTHG))
    rate_RTH = spread(jnp.exp(rate_H.astype(raw_RTHG.dtype)), raw_RTHG[..., 0])
    return jnp.where((position_RT == 0)[..., None, None], -jnp.inf, -rate_RTH[..., None] * time_RTHG)


@recomputed
def _sigmoid(raw: Array) -> Array:
    return jax.nn.sigmoid(raw.astype(at_least_fp32(raw.dtype)))


@partial(recomputed, static_argnums=2)
def _gated(heads_BTHV: Array, gate_BTHV: Array, gate: str) -> Array:
    dtype = at_least_fp32(heads_BTHV.dtype)
    return (heads_BTHV.astype(dtype) * _GATES[gate](gate_BTHV.astype(dtype))).astype(heads_BTHV.dtype)


def _initial_rate(key: NamedKey) -> Initializer:
    return lambda shape: jnp.log(jax.random.uniform(key.key, shape, jnp.float32, *_RATES))


def _initial_bias(key: NamedKey) -> Initializer:
    """So that softplus makes a time between `_TIMES` of it, uniform in its logarithm."""

    def initial(shape: tuple[int, ...]) -> Array:
        shortest, longest = map(math.log, _TIMES)
        time = jnp.exp(jax.random.uniform(key.key, shape, jnp.float32, shortest, longest))
        return time + jnp.log(-jnp.expm1(-time))

    return initial
