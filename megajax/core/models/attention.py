"""Self-attention, sharded over `tensor` by heads.

Letters: B batch, T query positions, S key positions, D model, H heads (maybe fewer for keys and values), K head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from megajax.core.backend import Backend
from megajax.core.models.attend import attend
from megajax.core.models.attention_setting import Setting
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.context_attention import attend_to_others
from megajax.core.models.norms import HeadsNorm, RMSNorm, mean_squares
from megajax.core.models.registry import ATTENTION_GATES
from megajax.core.models.rotary import rotated, score_scale
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel, normal, param
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named, recorded

Aux = dict[str, Any]  # a layer's auxiliary outputs by name: figures, or the KV cache in generation
# (q_BTHK, k_BSHK, v_BSHK of this device's heads, context, backend, …) -> heads_BTHK, auxiliary outputs
Attend = Callable[..., tuple[Array, Aux]]
ATTENTION_WEIGHTS = 0  # a dropout site of a layer, besides those in `layer.py`


class Attention(nnx.Module):
    """Self-attention: query, key and value by columns (that is, by heads), the output projection by rows.

    There may be fewer key and value heads than query heads, each shared by several of these (Ainslie et al., arXiv
    2305.13245). If there are fewer than devices in a tensor group, every device holds all of them and computes the one
    that its queries need.
    """

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        hidden, size = config.hidden_size, config.head_size
        heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}

        def projection(part: int, name: str, dim: str) -> ColumnParallelLinear:
            def initial(shape: tuple[int, ...]) -> Array:
                if config.num_kv_heads != config.num_heads or name == "gate":
                    return normal(key / name, config.init_std)(shape)
                joint = normal(key / "qkv", config.init_std)((shape[0], 3, *shape[1:]))  # drawn together, then split
                return joint[:, part]

            shape, dims = (hidden, heads[dim], size), ("embed", dim, "head_size")
            return ColumnParallelLinear(initial, boundary, shape, dims, backend, bias=config.bias != "none")

        self.attention_gate = projection(0, "gate", "heads") if config.attention_gate != "none" else None
        self.query, self.key = projection(0, "query", "heads"), projection(1, "key", "kv_heads")
        self.value = projection(2, "value", "kv_heads")
        residual, shape = normal(key / "output", config.residual_init_std), (config.num_heads, size, hidden)
        dims = ("heads", "head_size", "embed")
        self.output = RowParallelLinear(residual, boundary, shape, dims, backend, bias=config.bias == "all")
        self.query_norm, self.key_norm = (
            self._norm(config, heads[dim], dim) if config.query_key_norm else None for dim in heads
        )
        sinks = normal(key / "sinks", config.init_std)
        self.sinks = param((config.num_heads,), ("heads",), sinks) if config.attention_sinks else None
        self.config, self.boundary, self.backend = config, boundary, backend

    @staticmethod
    def _norm(config: ModelConfig, heads: int, dim: str) -> RMSNorm | HeadsNorm:
        if config.query_key_norm_over == "width":
            return HeadsNorm(heads, config.head_size, config.norm_epsilon, dim)
        return RMSNorm(config.head_size, config.norm_epsilon, "head_size", one_plus=config.norm == "rmsnorm-1p")

    @property
    def products(self) -> dict[str, tuple]:
        """Its products with weights, by the names of their factors (`parallel/products.py`)."""
        gate = () if self.attention_gate is None else (self.attention_gate,)
        return {"attention_input": (self.query, self.key, self.value, *gate), "attention_output": (self.output,)}

    @jax.named_scope("attention")
    def __call__(self, x_BTD: Array, context: Context, attend: Attend) -> tuple[Array, Aux]:
        """Run `attend` between the projections; its auxiliary outputs are returned too."""
        linears = self.products["attention_input"]
        products = column_parallel(x_BTD, *linears, name="attention_input", factors=context.factors)
        q_BTHK, k_BSHK, v_BSHK, *gates = products
        q_BTHK = named(q_BTHK, "query", split=2)
        k_BSHK = named(k_BSHK, "key", split=2, first=self.key.first_part)
        v_BSHK = named(v_BSHK, "value", split=2, first=self.value.first_part)
        if self.query_norm is not None:
            q_BTHK, k_BSHK = self._normalized(q_BTHK, k_BSHK)
            q_BTHK = named(q_BTHK, "query_norm", split=2)
            k_BSHK = named(k_BSHK, "key_norm", split=2, first=self.key.first_part)
        if self.config.rotary:
            assert context.position_BT is not None
            given = context.position_BT, self.config, context.windowed
            q_BTHK = named(rotated(q_BTHK, *given), "rotated_query", split=2)
            k_BSHK = named(rotated(k_BSHK, *given), "rotated_key", split=2, first=self.key.first_part)
        q_BTHK, sinks = scaled_queries(q_BTHK, self.config), {} if self.sinks is None else {"sink_H": self.sinks[...]}
        heads_BTHK, aux = attend(q_BTHK, k_BSHK, v_BSHK, context, self.backend, **sinks)
        if gates:
            heads_BTHK = recorded(heads_BTHK, "ungated_heads", split=2)
            gate_BTHK = named(gates[0], "attention_gate", split=2)
            heads_BTHK = ATTENTION_GATES[self.config.attention_gate](heads_BTHK, gate_BTHK)
        return attention_output(heads_BTHK, self.output, context), aux

    def _normalized(self, q_BTHK: Array, k_BSHK: Array) -> tuple[Array, Array]:
        """Apply the norms of queries and keys."""
        query, key = self.query_norm, self.key_norm
        if isinstance(query, HeadsNorm) and isinstance(key, HeadsNorm):
            square_BT, square_BS = mean_squares(q_BTHK, k_BSHK)
            key_scale_HK = self.key.own(key.scale[...], 0)
            return query(q_BTHK, query.scale[...], square_BT), key(k_BSHK, key_scale_HK, square_BS)
        assert isinstance(query, RMSNorm) and isinstance(key, RMSNorm)
        return query(q_BTHK), key(k_BSHK)


ATTENTION_GATES["sigmoid"] = lambda heads_BTHK, gate_BTHK: heads_BTHK * jax.nn.sigmoid(gate_BTHK)


def scaled_queries(q_BTHK: Array, config: ModelConfig) -> Array:
    """Queries with the model's own factor of scores: `attend` divides these by the square root of the head size. XLA
    would make one factor of both where none is saved between them, and so other bits with recomputation."""
    if (scale := score_scale(config)) == 1:
        return q_BTHK
    scaled_BTHK = lax.optimization_barrier(q_BTHK * jnp.asarray(scale, q_BTHK.dtype))
    return named(scaled_BTHK, "scaled_query", split=2)


def attention_output(heads_BTHK: Array, output: RowParallelLinear, context: Context) -> Array:
    """The output projection of heads."""
    heads_BTHK = recorded(heads_BTHK, "attention_heads", split=2)  # `attend` has named them for recomputation
    y_BTD = output(heads_BTHK, "attention_output", context.factors)
    return named(y_BTD, "attention_output", output.boundary.split)


def attend_in_context(
    q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, context: Context, backend: Backend, sink_H: Array | None = None
) -> tuple[Array, Aux]:
    """Attention of a microbatch's tokens to the tokens visible to them, with dropout."""
    setting = Setting(context.visible, context.dropout.fold(ATTENTION_WEIGHTS), backend, sink_H=sink_H)
    if context.boundary.context == "none":
        return attend(q_BTHK, k_BSHK, v_BSHK, setting), {}
    return attend_to_others(q_BTHK, k_BSHK, v_BSHK, setting, context.boundary), {}
