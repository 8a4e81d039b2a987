"""Causal self-attention, split over `tensor` by heads, blocked over queries and recomputed in the backward pass.

Letters: B batch, T query positions, S key positions, D model, C the three of query, key, value, H heads, K head size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.models.config import ModelConfig
from megajax.parallel.collectives import TENSOR, axis_index
from megajax.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megajax.parallel.random import Dropout, NamedKey, RandomBits
from megajax.parallel.split import Split
from megajax.precision import at_least_fp32

QUERY_BLOCK = 128


class Attention(nnx.Module):
    """Multi-head self-attention: query, key and value by columns (that is by heads), the output projection by rows."""

    def __init__(self, config: ModelConfig, key: NamedKey, split: Split):
        hidden, heads, head_size = config.hidden_size, config.num_heads, config.head_size
        self.qkv = ColumnParallelLinear(
            key / "qkv", split, hidden, (3, heads, head_size), ("qkv", "heads", "head_size"), config.init_std
        )
        self.output = RowParallelLinear(
            key / "output", split, (heads, head_size), ("heads", "head_size"), hidden, config.residual_init_std
        )

    def __call__(self, x_BTD: Array, dropout: Dropout) -> Array:
        qkv_BTCHK = checkpoint_name(self.qkv(x_BTD), "attention_qkv")
        q_BTHK, k_BSHK, v_BSHK = (qkv_BTCHK[:, :, c] for c in range(3))
        heads_BTHK = checkpoint_name(attend(q_BTHK, k_BSHK, v_BSHK, dropout), "attention_heads")
        return self.output(heads_BTHK)


def attend(q_BTHK: Array, k_BSHK: Array, v_BSHK: Array, dropout: Dropout) -> Array:
    """Causal attention of this device's heads, shape [B, T, H, K], dropout on the probabilities.

    On CPU one head at a time, so that its scores stay in the cache; elsewhere all heads at once.
    """
    num_heads = q_BTHK.shape[2]
    head_H = axis_index(TENSOR) * num_heads + jnp.arange(num_heads, dtype=jnp.int32)
    bits_BH = dropout.bits_B[:, None].fold(head_H[None, :])
    one_head = jax.checkpoint(partial(_attend_one_head, rate=dropout.rate), prevent_cse=True)

    def heads_first(x_BTHK: Array) -> Array:
        x_BHTK = x_BTHK.swapaxes(1, 2)
        return x_BHTK.reshape(-1, *x_BHTK.shape[2:])

    inputs = (heads_first(q_BTHK), heads_first(k_BSHK), heads_first(v_BSHK), jax.tree.map(jnp.ravel, bits_BH))
    if jax.default_backend() == "cpu":
        out = lax.map(lambda args: one_head(*args), inputs)
    else:
        out = jax.vmap(one_head)(*inputs)
    batch, length, heads, head_size = q_BTHK.shape
    return out.reshape(batch, heads, length, head_size).swapaxes(1, 2)


def _attend_one_head(q_TK: Array, k_SK: Array, v_SK: Array, bits: RandomBits, *, rate: float) -> Array:
    """One head of one sample: every block of queries against the keys up to its end."""
    length = q_TK.shape[0]
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        query_T, key_S = jnp.arange(start, end, dtype=jnp.int32), jnp.arange(end, dtype=jnp.int32)
        scores_TS = _scores(q_TK[start:end], k_SK[:end])
        causal_TS = key_S[None, :] <= query_T[:, None]
        scores_TS = jnp.where(causal_TS, scores_TS, jnp.asarray(-jnp.inf, scores_TS.dtype))
        weights_TS = jax.nn.softmax(scores_TS, axis=-1).astype(v_SK.dtype)
        if rate > 0:
            mask = Dropout(rate, bits)
            weights_TS = mask.apply(weights_TS, bits[None].fold(query_T)[:, None].last(key_S[None, :]))
        blocks.append(weights_TS @ v_SK[:end])
    return jnp.concatenate(blocks)


def _scores(q_TK: Array, k_SK: Array) -> Array:
    """Scaled products of queries and keys, in at least fp32."""
    dtype = at_least_fp32(q_TK.dtype)
    scale = jnp.asarray(q_TK.shape[-1] ** -0.5, q_TK.dtype)
    return jnp.einsum("TK,SK->TS", q_TK * scale, k_SK, preferred_element_type=dtype)
