"""A second family, a few lines off GPT-2: LayerNorm on the embedding, which makes it no linear function of its weights,
attention that sees a window only, and layers that count."""

import dataclasses

import jax.numpy as jnp

from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.decoder.model import FAMILY as DECODER_FAMILY
from megajax.core.models.decoder.model import TransformerDecoder
from megajax.core.models.layer import Block, stacked
from megajax.core.models.norms import LayerNorm


class CountingBlock(Block):
    """A layer with figures: its tokens, and those of every row as often as row and layer say."""

    def __call__(self, x_BTD, context, layer, *attend):
        x_BTD, aux = super().__call__(x_BTD, context, layer, *attend)
        count = jnp.int32(x_BTD.shape[1])
        figures = {"tokens": count * x_BTD.shape[0]}
        if context.row_B is not None:
            figures["numbered"] = count * (layer + 1) * jnp.sum(context.row_B)
        return x_BTD, aux | figures


class Tiny(TransformerDecoder):
    """GPT-2 with a LayerNorm on the embedding and a window of five tokens."""

    def __init__(self, config, key, boundary, backend):
        super().__init__(config, key, boundary, backend)
        self.embedding_norm = LayerNorm(config.hidden_size, 1e-5)
        blocks = lambda n: CountingBlock(config, key / "blocks" / n, boundary, backend)  # noqa: E731
        self.blocks = stacked(blocks, config.num_layers)

    def context(self, batch, dropout):
        return dataclasses.replace(super().context(batch, dropout), visible=AttentionMask(causal=True, window=5))

    def embedding(self, batch, context):
        return self.embedding_norm(super().embedding(batch, context))


FAMILY = dataclasses.replace(DECODER_FAMILY, model=Tiny, linear_embedding=lambda _: False)
