"""Decoders as a family of models."""

from megajax.batch import text_form
from megajax.models.config import ModelConfig
from megajax.models.decoder.model import TransformerDecoder
from megajax.models.family import Family
from megajax.models.matmul_flops import MatrixProduct, layer_products, weight_products


def _products(model: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    head = {"head": (model.hidden_size, model.padded_vocab_size)}
    return [
        *layer_products(model, sequences, query_block, causal=True),
        *weight_products(sequences * model.sequence_length, head),
    ]


FAMILY = Family(
    model=TransformerDecoder,
    form=lambda _: text_form(),
    products=_products,
    reset_form=text_form(with_positions=True),
    linear_embedding=lambda _: True,
)
