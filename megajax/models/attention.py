"""Causal self-attention, split over `tensor` by heads.

Letters: B batch, T query positions, S key positions, D model, C the three of query, key, value, H heads, K head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import CPU, Backend
from megajax.models.blocked_attention import blocked_attention
from megajax.models.config import ModelConfig
from megajax.parallel.collectives import TENSOR, axis_index
from megajax.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megajax.parallel.random import Dropout, NamedKey
from megajax.parallel.split import Split

Attend = Callable[[Array], tuple[Array, Any]]  # qkv_BTCHK of this device's heads -> heads_BTHK, and what it remembers
FUSED_FORWARD = "dot_product_attention_fwd"  # starts the names of cuDNN's operations in a jaxpr


class Attention(nnx.Module):
    """Multi-head self-attention: query, key and value by columns (that is by heads), the output projection by rows."""

    def __init__(self, config: ModelConfig, key: NamedKey, split: Split, backend: Backend = CPU):
        self.backend = backend
        hidden, heads, head_size = config.hidden_size, config.num_heads, config.head_size
        self.qkv = ColumnParallelLinear(
            key / "qkv", split, hidden, (3, heads, head_size), ("qkv", "heads", "head_size"), config.init_std, backend
        )
        self.output = RowParallelLinear(
            key / "output", split, (heads, head_size), ("heads", "head_size"), hidden, config.residual_init_std, backend
        )

    def __call__(self, x_BTD: Array, attend: Attend) -> tuple[Array, Any]:
        """`attend` between the projections; also returns what it remembers (`models/cache.py`)."""
        heads_BTHK, memory = attend(checkpoint_name(self.qkv(x_BTD), "attention_qkv"))
        return self.output(heads_BTHK), memory


def attend(qkv_BTCHK: Array, dropout: Dropout, backend: Backend, positions_BT: Array | None = None) -> Array:
    """Causal attention of this device's heads, [B, T, H, K], dropout on the probabilities; given the tokens' positions
    in their documents, within these.

    On GPUs by cuDNN where it can: its dropout would depend on the mesh, it knows half precision only, and documents
    only by a mask of every query and key.
    """
    causal_only = dropout.rate == 0 and positions_BT is None
    if causal_only and backend.fused_attention and fits_fused_attention(qkv_BTCHK):
        q_BTHK, k_BSHK, v_BSHK = (qkv_BTCHK[:, :, c] for c in range(3))
        heads_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BSHK, v_BSHK, is_causal=True, implementation="cudnn")
        return checkpoint_name(heads_BTHK, "attention_heads")
    bits_BH = None
    if dropout.rate > 0:
        num_heads = qkv_BTCHK.shape[3]
        head_H = axis_index(TENSOR) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
        bits_BH = dropout.bits_B[:, None].fold(head_H[None, :])
    return blocked_attention(qkv_BTCHK, positions_BT, bits_BH, dropout.rate, backend)


def fits_fused_attention(qkv_BTCHK: Array) -> bool:
    """Whether cuDNN's attention takes these heads: half precision, a size of at most 256 that 8 divides."""
    head_size = qkv_BTCHK.shape[-1]
    return qkv_BTCHK.dtype.itemsize == 2 and head_size % 8 == 0 and head_size <= 256
