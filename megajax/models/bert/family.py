"""BERT as a family of models."""

from megajax.batch import most_masked, pairs_form
from megajax.models.bert.model import Bert
from megajax.models.config import ModelConfig
from megajax.models.family import Family
from megajax.models.flops import MatrixProduct
from megajax.models.products import head_products, layer_products


def _products(model: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    """All products of a step; those of the order head, of one token a sequence, are left out."""
    size, masked = model.hidden_size, most_masked(model.sequence_length)
    heads = {"head": (size, model.padded_vocab_size), "head, dense layer": (size, size)}
    return [
        *layer_products(model, sequences, query_block, causal=False),
        *head_products(sequences * masked, heads),
    ]


FAMILY = Family(
    model=Bert,
    form=pairs_form(),
    products=_products,
    linear_embedding=lambda config: config.layer_order == "pre",
)
