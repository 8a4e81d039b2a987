"""A second family, three lines off GPT-2: LayerNorm on the embedding, which makes it no linear function of its weights,
and attention that sees a window only."""

import dataclasses

from megajax.models.attention_mask import AttentionMask
from megajax.models.decoder.family import FAMILY as DECODER_FAMILY
from megajax.models.decoder.model import TransformerDecoder
from megajax.models.norms import LayerNorm


class Tiny(TransformerDecoder):
    """GPT-2 with a LayerNorm on the embedding and a window of five tokens."""

    def __init__(self, config, key, boundary, backend):
        super().__init__(config, key, boundary, backend)
        self.embedding_norm = LayerNorm(config.hidden_size, 1e-5)

    def context(self, batch, dropout):
        return dataclasses.replace(super().context(batch, dropout), visible=AttentionMask(causal=True, window=5))

    def embed(self, batch, context):
        return self.embedding_norm(super().embed(batch, context))


FAMILY = dataclasses.replace(DECODER_FAMILY, model=Tiny, linear_embedding=lambda _: False)
