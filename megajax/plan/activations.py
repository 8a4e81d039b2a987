"""What a device keeps of activations, in bytes, from a configuration alone: what `jax.checkpoint` keeps of a layer
(`program.parts.residual_bytes`, to the byte), and the factors of weight gradients that wait (`factor_bytes`).

Nothing is traced: every line below is an array of `models/layer.py`. Letters: B rows of a microbatch, T tokens of a
row, D hidden size; of a device H heads, N heads of keys, K head size, F columns of the MLP.
"""

from dataclasses import dataclass, replace

import jax
import numpy as np

from megajax.backend import Backend
from megajax.config import Config
from megajax.models.attend import CuDNN, implementation
from megajax.models.attention_mask import AttentionMask
from megajax.models.family import family_of
from megajax.plan.sizes import Sizes
from megajax.precision import COMPUTE_DTYPE

_WORD = 4  # bytes of an int32 or uint32


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a microbatch in a layer on a device.

    Attributes:
        rows: B; of a choice its texts.
        tokens, own_tokens: T, and those that the residual path has here: a part where the sequence is split.
        hidden, heads, kv_heads, head_size, mlp: D, H, N, K, F.
        gates: matrices before the MLP's activation, 2 with a gate.
        width, wide: bytes of a number as layers compute, and of sums and statistics.
    """

    rows: int
    tokens: int
    own_tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    gates: int
    width: int
    wide: int

    @classmethod
    def of(cls, step: Sizes) -> "LayerSizes":
        model, tensor = step.config.model, step.config.mesh.tensor
        return cls(
            rows=step.rows,
            tokens=step.tokens,
            own_tokens=step.own[1],
            hidden=model.hidden_size,
            heads=model.num_heads // tensor,
            kv_heads=max(1, model.num_kv_heads // tensor),
            head_size=model.head_size,
            mlp=model.mlp_size // tensor,
            gates=2 if model.activation == "swiglu" else 1,
            width=step.item,
            wide=step.wide,
        )

    @property
    def between(self) -> int:
        """Bytes of an activation between the blocks of a layer: B T D."""
        return self.rows * self.own_tokens * self.hidden * self.width

    @property
    def whole(self) -> int:
        """Bytes of the same of all tokens."""
        return self.rows * self.tokens * self.hidden * self.width

    @property
    def queries(self) -> int:
        """Bytes of queries, and of attention's result: B T H K."""
        return self.rows * self.tokens * self.heads * self.head_size * self.width

    @property
    def keys(self) -> int:
        """Bytes of keys, and of values: B T N K."""
        return self.rows * self.tokens * self.kv_heads * self.head_size * self.width

    @property
    def inner(self) -> int:
        """Bytes of one array inside the MLP: B T F."""
        return self.rows * self.tokens * self.mlp * self.width

    @property
    def statistics(self) -> int:
        """Bytes of a number for every head and query."""
        return self.rows * self.tokens * self.heads * self.wide


def fused(config: Config, backend: Backend) -> bool:
    """Whether attention is cuDNN's (`models/attend.py`)."""
    model = config.model
    visible = AttentionMask(causal=not family_of(model).bidirectional, window=model.window_in(model.sequence_length))
    if config.data.reset_attention:
        visible = replace(visible, first_key_BT=np.zeros((1, 1), np.int32))  # type: ignore[arg-type]
    query = jax.ShapeDtypeStruct((1, 1, 1, model.head_size), COMPUTE_DTYPE[config.precision])
    return implementation(query, visible, model.dropout, backend) is CuDNN


def layer_bytes(config: Config, sizes: LayerSizes, backend: Backend, remat: str) -> int:
    """What one layer keeps until its backward pass, recomputing what `remat` says; "stage" keeps nothing."""
    if remat == "stage":
        return 0
    small = _small(config, sizes, remat)
    if remat == "layer":
        return sizes.between + small
    model = config.model
    attention = 2 * sizes.queries + 2 * sizes.keys + (1 if fused(config, backend) else 2) * sizes.statistics
    if remat == "selective":
        return 2 * sizes.between + attention + sizes.gates * sizes.inner + small
    if model.query_key_norm:  # before the norm, too
        attention += sizes.queries + sizes.keys
    return 4 * sizes.between + attention + (sizes.gates + 1) * sizes.inner + small


def _small(config: Config, sizes: LayerSizes, remat: str) -> int:
    """State of dropout, positions and lengths."""
    model, count = config.model, 0
    recomputed = remat != "none"
    if model.dropout > 0 and recomputed:
        count += 1 + 2 * sizes.rows  # the layer's number, and the state it is folded into
    elif model.dropout > 0:
        count += 2 * sizes.rows * sizes.heads + 2 * 2 * sizes.rows * sizes.own_tokens
    if model.rotary:
        count += (sizes.rows if config.data.reset_attention else 1) * sizes.tokens
    if config.data.reset_attention:
        count += sizes.rows * sizes.tokens
    if family_of(model).bidirectional:
        count += sizes.rows
    angles = 2 * (sizes.head_size // 2) * sizes.wide if model.rotary and recomputed else 0
    return count * _WORD + angles


def kept_remat(config: Config) -> str:
    """What is kept of a chunk that waits. One stage does not let any wait, and so `stage` keeps all of a layer."""
    remat = config.train.remat
    return "none" if remat == "stage" and config.mesh.pipe == 1 else remat


def chunk_bytes(config: Config, sizes: LayerSizes, backend: Backend) -> int:
    """What a device keeps of a microbatch's way through a chunk until it comes back."""
    remat = kept_remat(config)
    if remat == "stage":
        return sizes.between
    return chunk_layers(config) * layer_bytes(config, sizes, backend, remat)


def chunk_layers(config: Config) -> int:
    """Layers of the fullest chunk, and so of the buffers of all."""
    return -(-config.model.num_layers // (config.mesh.pipe * config.pipeline.chunks))


def factor_bytes(config: Config, sizes: LayerSizes) -> int:
    """What a device keeps of a chunk until its weight gradients are computed: the input and the output's gradient of
    every product. A split sequence is gathered again for the products but where the whole layer is recomputed."""
    entered = sizes.whole if config.train.remat == "layer" else sizes.between
    attention = entered + 2 * sizes.queries + 2 * sizes.keys + sizes.whole
    mlp = entered + (sizes.gates + 1) * sizes.inner + sizes.whole
    return chunk_layers(config) * (attention + mlp)
