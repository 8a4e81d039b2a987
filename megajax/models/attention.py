"""Self-attention, sharded over `tensor` by heads.

Letters: B batch, T query positions, S key positions, D model, H heads, K head size.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.backend import Backend
from megajax.models.blocked_attention import blocked_attention
from megajax.models.config import ModelConfig
from megajax.models.visibility import Visibility
from megajax.parallel.borders import Borders
from megajax.parallel.collectives import TENSOR, axis_index
from megajax.parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel, normal
from megajax.parallel.random import Dropout, NamedKey

# q_BTHK, k_BSHK, v_BSHK of this device's heads -> heads_BTHK, and what it remembers
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
FUSED_FORWARD = "dot_product_attention_fwd"  # starts the names of cuDNN's operations in a jaxpr


class Attention(nnx.Module):
    """Multi-head self-attention: query, key and value by columns (that is by heads), the output projection by rows."""

    def __init__(self, config: ModelConfig, key: NamedKey, borders: Borders, backend: Backend):
        hidden, shape = config.hidden_size, (config.num_heads, config.head_size)

        def projection(part: int, heads: str) -> ColumnParallelLinear:
            def initial(shape: tuple[int, ...]) -> Array:  # the three are parts of one draw
                joint = normal(key / "qkv", config.init_std)((shape[0], 3, *shape[1:]))
                return joint[:, part]

            return ColumnParallelLinear(initial, borders, hidden, shape, (heads, "head_size"), backend)

        self.query, self.key, self.value = (projection(c, d) for c, d in enumerate(("heads", "kv_heads", "kv_heads")))
        residual = normal(key / "output", config.residual_init_std)
        self.output = RowParallelLinear(residual, borders, shape, ("heads", "head_size"), hidden, backend)

    def __call__(self, x_BTD: Array, attend: Attend) -> tuple[Array, Any]:
        """`attend` between the projections; also returns what it remembers (`models/cache.py`)."""
        projected = column_parallel(x_BTD, self.query, self.key, self.value)
        heads_BTHK, memory = attend(*(checkpoint_name(x_BTHK, "attention_qkv") for x_BTHK in projected))
        return self.output(heads_BTHK), memory


def attend(
    q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, visible: Visibility, dropout: Dropout, backend: Backend
) -> Array:
    """Attention of this device's heads, [B, T, H, K], dropout on the probabilities.

    On GPUs by cuDNN where it can: its dropout would depend on the mesh, it knows half precision only, and of what a
    query sees causality and padding here.
    """
    if dropout.rate == 0 and visible.only_causal_or_padded and backend.fused_attention and fits_fused(q_BTHK):
        heads_BTHK = jax.nn.dot_product_attention(
            q_BTHK,
            k_BSHK,
            v_BSHK,
            is_causal=visible.causal,
            key_value_seq_lengths=visible.num_keys_B,
            implementation="cudnn",
        )
        return checkpoint_name(heads_BTHK, "attention_heads")
    bits_BH = None
    if dropout.rate > 0:
        num_heads = q_BTHK.shape[2]
        head_H = axis_index(TENSOR) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
        bits_BH = dropout.bits_B[:, None].fold(head_H[None, :])
    return blocked_attention(q_BTHK, k_BSHK, v_BSHK, visible, bits_BH, dropout.rate, backend)


def fits_fused(q_BTHK: Array) -> bool:
    """Whether cuDNN's attention takes these heads: half precision, a size of at most 256 that 8 divides."""
    head_size = q_BTHK.shape[-1]
    return q_BTHK.dtype.itemsize == 2 and head_size % 8 == 0 and head_size <= 256
