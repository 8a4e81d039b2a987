"""Latent attention (DeepSeek-AI, arXiv 2405.04434): the keys and values of all heads are computed from one latent of
each token, and positions rotate a part of each query, and of one key that all heads share.

The products that make latents are between regions, replicated over `tensor`; then the latents enter the region, in
which heads are sharded as in `attention.py`. With sequence parallelism a device makes those of its own tokens, and
latents, which are small, are gathered in place of the layer's input.

Letters: B batch, T query positions, S key positions, D model, H heads, K head size, N its part without positions, P
its rotary part, C latent, L latents and the shared key together, V size of a head's values.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.core.backend import Backend
from megajax.core.models.attention import Attend, Aux, attention_output, scaled_queries
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.context_attention import gathered
from megajax.core.models.norms import RMSNorm
from megajax.core.models.remat import LATENTS
from megajax.core.models.rotary import rotated
from megajax.core.parallel.boundary import NO_BOUNDARY, RegionBoundary
from megajax.core.parallel.collectives import CONTEXT
from megajax.core.parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    column_parallel,
    normal,
)
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named

_EPSILON = 1e-6  # of the latents' norms in all published models, whatever that of the others


class LatentAttention(nnx.Module):
    """Self-attention whose keys and values come from a latent, and maybe its queries from another."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        hidden, heads, latent = config.hidden_size, config.num_heads, config.latent_size
        size, value, of_query = config.head_size, config.value_head_size, config.query_latent_size

        def down(name: str, width: int, dim: str) -> ReplicatedLinear:
            initial = normal(key / name, config.init_std)
            return ReplicatedLinear(initial, NO_BOUNDARY, (hidden, width), ("embed", dim), backend, bias=False)

        def up(name: str, boundary: RegionBoundary, width: int, dim: str, each: int) -> ColumnParallelLinear:
            shape, dims = (width, heads, each), (dim, "heads", "head_size")
            return ColumnParallelLinear(normal(key / name, config.init_std), boundary, shape, dims, backend, bias=False)

        self.query_down = down("query_down", of_query, "query_latent") if of_query else None
        self.query_norm = RMSNorm(of_query, _EPSILON, "query_latent") if of_query else None
        source = (NO_BOUNDARY, of_query, "query_latent") if of_query else (boundary, hidden, "embed")
        self.query = up("query", *source, size)
        self.key_value_down = down("key_value_down", latent + config.rotary_size, "latent_and_key")
        self.key_value_norm = RMSNorm(latent, _EPSILON, "latent")
        self.key_value = up("key_value", NO_BOUNDARY, latent, "latent", size - config.rotary_size + value)
        residual, shape = normal(key / "output", config.residual_init_std), (heads, value, hidden)
        self.output = RowParallelLinear(residual, boundary, shape, ("heads", "head_size", "embed"), backend, bias=False)
        self.config, self.boundary, self.backend = config, boundary, backend

    @property
    def products(self) -> dict[str, tuple]:
        """Its products with weights, by the names of their factors (`parallel/products.py`)."""
        down = (self.key_value_down,) if self.query_down is None else (self.query_down, self.key_value_down)
        up = {"attention_query": (self.query,), "attention_key_value": (self.key_value,)}
        return {"attention_down": down} | up | {"attention_output": (self.output,)}

    @jax.named_scope("attention")
    def __call__(self, x_BTD: Array, context: Context, attend: Attend) -> tuple[Array, Aux]:
        """Run `attend` between the projections; its auxiliary outputs are returned too."""
        *of_query, latent_BTL = self._latents(x_BTD, context)
        source = of_query[0] if of_query else x_BTD
        (q_BTHK,) = column_parallel(source, self.query, name="attention_query", factors=context.factors)
        # What is computed from a latent is computed again rather than saved.
        q_BTHK = self._rotated(named(q_BTHK, "expanded_query" if of_query else "query", split=2), context)
        q_BTHK = scaled_queries(named(q_BTHK, "rotated_query", split=2), self.config)
        latent_BTL = self._rotated(latent_BTL[:, :, None], context)[:, :, 0]
        if context.cache == "extended":
            heads_BTHV, aux = self._from_latents(q_BTHK, latent_BTL, context, attend)
        else:
            k_BSHK, v_BSHV = self._keys_and_values(latent_BTL, context)
            kept = {"latent_BS1L": latent_BTL[:, :, None]} if context.cache == "new" else {}
            heads_BTHV, aux = attend(q_BTHK, k_BSHK, v_BSHV, context, self.backend, **kept)
        return attention_output(heads_BTHV, self.output, context), aux

    def _latents(self, x_BTD: Array, context: Context) -> list[Array]:
        """The latents of all tokens of this context rank, normalized, in the region: that of queries, if there is one,
        and that of keys and values, with the shared key behind it, which is not rotated yet."""
        linears, size = self.products["attention_down"], self.config.latent_size
        *of_query, latent_BTL = column_parallel(x_BTD, *linears, name="attention_down", factors=context.factors)
        latent_BTL = named(latent_BTL, "key_value_latent", self.boundary.split)
        parts = [self.key_value_norm(latent_BTL[..., :size]), latent_BTL[..., size:]]
        if self.query_norm is not None:
            parts.insert(0, self.query_norm(named(of_query[0], "query_latent", self.boundary.split)))
        entered_BTL = self.boundary.enter(jnp.concatenate(parts, axis=-1))
        entered_BTL = named(entered_BTL, LATENTS, split=2, first=jnp.zeros((), jnp.int32))
        if self.query_norm is None:
            return [entered_BTL]
        return jnp.split(entered_BTL, [self.config.query_latent_size], axis=-1)

    def _rotated(self, x_BTHK: Array, context: Context) -> Array:
        """With the rotary features, which are the last ones, rotated, if there are positions."""
        if not self.config.rotary:
            return x_BTHK
        assert context.position_BT is not None
        plain_BTHN, rotary_BTHP = jnp.split(x_BTHK, [x_BTHK.shape[-1] - self.config.rotary_size], axis=-1)
        turned_BTHP = rotated(rotary_BTHP, context.position_BT, self.config, context.windowed)
        return jnp.concatenate([plain_BTHN, turned_BTHP], axis=-1)

    def _keys_and_values(self, latent_BTL: Array, context: Context) -> tuple[Array, Array]:
        """Keys and values of this device's heads, of this context rank's tokens; or of all tokens, if keys would be
        gathered: latents are, which are smaller. In 8 bits they are not: only whole gradients may be rounded."""
        partial: tuple[str, ...] = ()
        if self.boundary.context == "gather" and self.key_value.copies is None:
            latent_BTL, partial = checkpoint_name(gathered(latent_BTL), LATENTS), (CONTEXT,)
        latent_BSC, key_BSP = jnp.split(latent_BTL, [self.config.latent_size], axis=-1)
        (both,) = column_parallel(latent_BSC, self.key_value, name="attention_key_value", factors=context.factors)
        k_BSHN, v_BSHV = jnp.split(both, [self.config.head_size - self.config.rotary_size], axis=-1)
        key_BSHP = jnp.broadcast_to(key_BSP[:, :, None], (*k_BSHN.shape[:3], key_BSP.shape[-1]))
        k_BSHK = named(jnp.concatenate([k_BSHN, key_BSHP], axis=-1), "expanded_key", split=2, partial=partial)
        return k_BSHK, named(v_BSHV, "expanded_value", split=2, partial=partial)

    def _from_latents(self, q_BTHK: Array, latent_BTL: Array, context: Context, attend: Attend) -> tuple[Array, Aux]:
        """Attention to cached latents: with the products of keys and values applied to queries and results instead, so
        that no key is ever computed again."""
        config, (latent, *_) = self.config, self.key_value.weight.shape
        key_CHN, value_CHV = jnp.split(self.key_value.weight[...], [config.head_size - config.rotary_size], axis=-1)
        q_BTHN, q_BTHP = jnp.split(q_BTHK, [key_CHN.shape[-1]], axis=-1)
        q_BTHL = jnp.concatenate([jnp.einsum("bthn,chn->bthc", q_BTHN, key_CHN), q_BTHP], axis=-1)
        scale = config.head_size**-0.5
        heads_BTHL, aux = attend(q_BTHL, latent_BTL[:, :, None], None, context, self.backend, scale=scale)
        return jnp.einsum("bthc,chv->bthv", heads_BTHL[..., :latent], value_CHV), aux
