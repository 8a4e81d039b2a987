"""BERT as a family of models."""

from megajax.batch import BatchSpec, choice_form, classes_form, most_masked, pairs_form, span_form
from megajax.models.bert.model import Bert
from megajax.models.config import ModelConfig
from megajax.models.family import Family
from megajax.models.matmul_flops import MatrixProduct, layer_products, weight_products


def _form(model: ModelConfig) -> BatchSpec:
    if model.head == "choice":
        return choice_form(model.num_classes)
    return {"pretraining": pairs_form, "classes": classes_form, "span": span_form}[model.head]()


def _products(model: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    """All products of a step; those of heads with few outputs are left out."""
    if model.head != "pretraining":
        texts = sequences * (model.num_classes if model.head == "choice" else 1)
        return list(layer_products(model, texts, query_block, causal=False))
    size, masked = model.hidden_size, most_masked(model.sequence_length)
    heads = {"head": (size, model.padded_vocab_size), "head, dense layer": (size, size)}
    return [
        *layer_products(model, sequences, query_block, causal=False),
        *weight_products(sequences * masked, heads),
    ]


FAMILY = Family(
    model=Bert,
    form=_form,
    products=_products,
    linear_embedding=lambda config: config.layer_order == "pre" and config.head != "span",
    bidirectional=True,
)
