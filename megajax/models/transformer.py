"""The transformer layer of GPT-2: LayerNorm first, then attention or MLP, then dropout and the residual addition.

LayerNorm, dropout and the residual path are duplicated on the devices of a tensor group (paper §3), or split along the
sequence. Letters: B batch, T tokens, D model, F feed-forward.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import CPU, Backend
from megajax.models.attention import FUSED_FORWARD, Attend, Attention, attend
from megajax.models.config import ModelConfig
from megajax.parallel.layers import ColumnParallelLinear, RowParallelLinear, constant_param
from megajax.parallel.random import Dropout, NamedKey
from megajax.parallel.split import Split
from megajax.precision import at_least_fp32

# What costs little to compute is computed again in the backward pass instead of being kept: only its inputs are saved.
recomputed = partial(jax.checkpoint, prevent_cse=False)

# Names of what is dear to compute again (a matrix product, attention, an all-reduce): kept by selective recomputation.
# The MLP's second product is not among them, since nothing in the backward pass needs its result.
DEAR = ("attention_qkv", "attention_heads", "attention_statistics", "attention_output", "mlp_up")


def keep_dear(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """The policy of selective recomputation, for `jax.checkpoint`."""
    named = jax.checkpoint_policies.save_only_these_names(*DEAR)
    return primitive.name.startswith(FUSED_FORWARD) or named(primitive, *arguments, **parameters)


LAYER_NORM_EPSILON = 1e-5  # GPT-2's

ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = range(3)  # sites of dropout in a layer


class LayerNorm(nnx.Module):
    """Layer normalisation over D with statistics in at least fp32."""

    def __init__(self, size: int):
        self.scale = constant_param(1.0, (size,), ("embed",))
        self.bias = constant_param(0.0, (size,), ("embed",))

    def __call__(self, x_BTD: Array) -> Array:
        return _layer_norm(x_BTD, self.scale[...], self.bias[...])


@recomputed
def _layer_norm(x_BTD: Array, scale_D: Array, bias_D: Array) -> Array:
    dtype = at_least_fp32(x_BTD.dtype)
    wide_BTD = x_BTD.astype(dtype)
    centered_BTD = wide_BTD - jnp.mean(wide_BTD, axis=-1, keepdims=True)
    variance_BT1 = jnp.mean(jnp.square(centered_BTD), axis=-1, keepdims=True)
    normal_BTD = (centered_BTD * lax.rsqrt(variance_BT1 + jnp.asarray(LAYER_NORM_EPSILON, dtype))).astype(x_BTD.dtype)
    return normal_BTD * scale_D[None, None, :] + bias_D[None, None, :]


class MLP(nnx.Module):
    """`Z = g(GeLU(f(X) A) B)`: A by columns, B by rows, GeLU in between without synchronisation."""

    def __init__(self, config: ModelConfig, key: NamedKey, split: Split, backend: Backend = CPU):
        hidden, width = config.hidden_size, config.mlp_size
        self.up = ColumnParallelLinear(key / "up", split, hidden, (width,), ("mlp",), config.init_std, backend)
        self.down = RowParallelLinear(
            key / "down", split, (width,), ("mlp",), hidden, config.residual_init_std, backend
        )

    def __call__(self, x_BTD: Array) -> Array:
        return self.down(_gelu(checkpoint_name(self.up(x_BTD), "mlp_up")))


@jax.checkpoint
def _gelu(x_BTF: Array) -> Array:
    wide_BTF = x_BTF.astype(at_least_fp32(x_BTF.dtype))  # its cube overflows fp16
    return jax.nn.gelu(wide_BTF, approximate=True).astype(x_BTF.dtype)


class Block(nnx.Module):
    """One pre-LayerNorm transformer layer."""

    def __init__(self, config: ModelConfig, key: NamedKey, split: Split, backend: Backend = CPU):
        self.split, self.backend = split, backend
        self.attention_norm = LayerNorm(config.hidden_size)
        self.attention = Attention(config, key / "attention", split, backend)
        self.mlp_norm = LayerNorm(config.hidden_size)
        self.mlp = MLP(config, key / "mlp", split, backend)

    def __call__(self, x_BTD: Array, dropout: Dropout, positions_BT: Array | None = None) -> Array:
        """`dropout` is this layer's; `x_BTD` holds all tokens of the sequence, or, split, this device's.

        `positions_BT` of all tokens, where given, keep documents apart (see `blocked_attention`).
        """
        of_weights = dropout.fold(ATTENTION_WEIGHTS)

        def attend_to_all(qkv_BTCHK: Array) -> tuple[Array, None]:
            return attend(qkv_BTCHK, of_weights, self.backend, positions_BT), None

        return self.run(x_BTD, dropout, attend_to_all)[0]

    def run(self, x_BTD: Array, dropout: Dropout, attend: Attend) -> tuple[Array, Any]:
        """The layer around any form of attention; also returns what that remembers."""
        token_T = self.split.tokens(x_BTD)
        y_BTD, memory = self.attention(self.attention_norm(x_BTD), attend)
        y_BTD = checkpoint_name(y_BTD, "attention_output")
        x_BTD = x_BTD + dropout.fold(ATTENTION_OUTPUT)(y_BTD, token_T)
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + dropout.fold(MLP_OUTPUT)(y_BTD, token_T), memory
