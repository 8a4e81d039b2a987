"""What BERT predicts from: the masked tokens' ids, and whether two segments are in order.

Letters: B batch, T tokens, D model, V vocabulary, C classes.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.backend import Backend
from megajax.batch import IGNORED
from megajax.models.config import ModelConfig
from megajax.models.transformer import LayerNorm, gelu
from megajax.parallel.borders import Borders
from megajax.parallel.layers import Linear, normal, zeros_param
from megajax.parallel.random import NamedKey
from megajax.parallel.vocabulary import output_logits
from megajax.precision import at_least_fp32

IN_ORDER, SWAPPED = 0, 1  # the classes of the order of two segments


class MaskedHead(nnx.Module):
    """Dense layer, GeLU, LayerNorm, and the output product tied to the embedding, with a bias of its own.

    Dense layer and LayerNorm are duplicated on the devices of a tensor group, as the LayerNorms of the layers are.
    """

    def __init__(self, config: ModelConfig, epsilon: float, key: NamedKey, backend: Backend):
        self.vocab_size, self.backend = config.vocab_size, backend
        size = config.hidden_size
        self.dense = Linear(normal(key / "dense", config.init_std), size, size, backend)
        self.norm = LayerNorm(size, epsilon)
        self.bias = zeros_param((config.padded_vocab_size,), ("vocabulary",))

    def __call__(self, x_BTD: Array, table_VD: Array, borders: Borders) -> Array:
        """This device's columns of the logits of tokens between these borders."""
        x_BTD = self.norm(gelu(self.dense(x_BTD)))
        return output_logits(x_BTD, table_VD, self.vocab_size, borders, self.backend, self.bias[...])


class OrderHead(nnx.Module):
    """The sequence's first token, pooled by a dense layer and tanh, to two classes."""

    def __init__(self, config: ModelConfig, key: NamedKey, backend: Backend):
        size, std = config.hidden_size, config.init_std
        self.pooler = Linear(normal(key / "pooler", std), size, size, backend)
        self.output = Linear(normal(key / "output", std), size, 2, backend)

    def __call__(self, x_BTD: Array) -> Array:
        """Logits of the two classes, [B, C], of the first token that this device has."""
        first_B1D = x_BTD[:, :1]
        return self.output(jnp.tanh(self.pooler(first_B1D)))[:, 0]


def classified(logits_BC: Array, class_B: Array) -> tuple[Array, Array]:
    """Cross-entropy of every sample, in at least fp32, and whether its class is the most probable one, int32; where
    the class is `IGNORED` they are 0 and `IGNORED`. Both [B]."""
    wide_BC = logits_BC.astype(at_least_fp32(logits_BC.dtype))
    counted_B = class_B != IGNORED
    picked_B1 = jnp.take_along_axis(
        jax.nn.log_softmax(wide_BC, axis=-1), jnp.maximum(class_B, 0)[:, None], axis=-1, mode="clip"
    )
    hit_B = (jnp.argmax(logits_BC, axis=-1).astype(jnp.int32) == class_B).astype(jnp.int32)
    loss_B = jnp.where(counted_B, -picked_B1[:, 0], jnp.zeros((), wide_BC.dtype))
    return loss_B, jnp.where(counted_B, hit_B, IGNORED)
