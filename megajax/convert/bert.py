"""BERT: transformers' `MegatronBertFor…` if a layer's LayerNorms come first, `BertFor…` if they follow the additions.
The output product of pretraining is tied."""

from dataclasses import replace
from typing import Any

from megajax.convert.exchange import Exchange, Head
from megajax.convert.parts import OptionGroup, dropout, plain_heads
from megajax.convert.settings import Fields
from megajax.convert.weights import TensorPlace, linear, norm, spelling
from megajax.core.models.bert.model import TOKEN_TYPES
from megajax.data.tasks.registry import TASKS

_CHOICES = 4  # theirs takes any number of texts to choose from; ours as many as RACE has
_TABLE = "bert.embeddings.word_embeddings.weight"
_PREDICTIONS = "cls.predictions."
_POOLER = linear("head/pooler/dense", "bert.pooler.dense", "DD")
_ONE_LABEL = "single_label_classification"
_LAYER = "bert.encoder.layer.{layer}."
_NORMS = {  # by layer order: the one outside the layers, the one of attention, the one of the MLP
    "pre": ("bert.encoder.ln", f"{_LAYER}attention.ln", f"{_LAYER}ln"),
    "post": ("bert.embeddings.LayerNorm", f"{_LAYER}attention.output.LayerNorm", f"{_LAYER}output.LayerNorm"),
}


def _read_classes(fields: Fields) -> dict[str, Any]:
    """Labels of a task must be in its order; going by their numbers alone would change the answers."""
    fields.check("problem_type", None, _ONE_LABEL)
    names = fields.labels()
    lower = [name.lower() for name in names]
    for task, labels in ((name, task.labels) for name, task in TASKS.items() if task.head == "classes"):
        if sorted(lower) == sorted(labels) and lower != [*labels]:
            raise fields.refusal("id2label", fields.get("id2label"), f"in the order of {task}, {', '.join(labels)}")
    return {"head": "classes", "num_classes": len(names)}


def _read_span(fields: Fields) -> dict[str, Any]:
    if len(fields.labels()) != 2:
        name = "num_labels" if fields.get("id2label") is None else "id2label"
        raise fields.refusal(name, fields.get(name), "two labels, a span's start and its end")
    return {"head": "span", "num_classes": 2}


_HEADS = {  # class names without what precedes `Bert`
    "pretraining": Head(
        classes=("BertForPreTraining", "BertForMaskedLM"),
        kind="a BERT with a head of masked tokens",
        shared={
            **linear("head/masked/dense", f"{_PREDICTIONS}transform.dense", "DD"),
            **norm("head/masked/norm", f"{_PREDICTIONS}transform.LayerNorm"),
            "head/masked/bias": TensorPlace(f"{_PREDICTIONS}bias", "V"),
            **_POOLER,
            **linear("head/order", "cls.seq_relationship", "2D"),
        },
        copies={f"{_PREDICTIONS}decoder.weight": _TABLE, f"{_PREDICTIONS}decoder.bias": f"{_PREDICTIONS}bias"},
        fresh={"head/pooler": "the pooler", "head/order": "the order head"},
    ),
    "classes": Head(
        classes=("BertForSequenceClassification",),
        kind="a BERT with a head of classes",
        shared=_POOLER | linear("head/output", "classifier", "CD"),
        read=_read_classes,
        write=lambda _: {"problem_type": _ONE_LABEL},
    ),
    "span": Head(
        classes=("BertForQuestionAnswering",),
        kind="a BERT with a head of spans",
        shared=linear("head/output", "qa_outputs", "2D"),
        read=_read_span,
        unused=tuple(place.name for place in _POOLER.values()),  # older versions wrote it
    ),
    "choice": Head(
        classes=("BertForMultipleChoice",),
        kind="a BERT with a head of choices",
        shared=_POOLER | linear("head/output", "classifier", "1D"),
        read=lambda _: {"head": "choice", "num_classes": _CHOICES},
    ),
}


def _read_mlp(fields: Fields) -> dict[str, Any]:
    fields.check("intermediate_size", 4 * fields["hidden_size"], missing=None)
    return {}


def _exchange(model_type: str, order: str, prefix: str) -> Exchange:
    outside, attention, mlp = _NORMS[order]
    heads = {
        name: replace(head, classes=tuple(prefix + each for each in head.classes)) for name, head in _HEADS.items()
    }
    return Exchange(
        family="bert",
        model_type=model_type,
        dialect="bert",
        heads=heads,
        options={"layer_order": order},
        fixed={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "type_vocab_size": TOKEN_TYPES,
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "is_causal": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        parts=(
            plain_heads("num_attention_heads", "hidden_size"),
            OptionGroup(("mlp_size",), _read_mlp, lambda model: {"intermediate_size": model.mlp_size}),
            dropout(
                "hidden_dropout_prob",
                "attention_probs_dropout_prob",
                of_head="classifier_dropout" if model_type == "bert" else "",
            ),
        ),
        shared={
            "table": TensorPlace(_TABLE, "VD"),
            "positions": TensorPlace("bert.embeddings.position_embeddings.weight", "TD"),
            "token_types": TensorPlace("bert.embeddings.token_type_embeddings.weight", "2D"),
            **norm("norm", outside),
        },
        blocks={
            **norm("attention_norm", attention),
            **linear("attention/query", f"{_LAYER}attention.self.query", "DD"),
            **linear("attention/key", f"{_LAYER}attention.self.key", "DD"),
            **linear("attention/value", f"{_LAYER}attention.self.value", "DD"),
            **linear("attention/output", f"{_LAYER}attention.output.dense", "DD"),
            **norm("mlp_norm", mlp),
            **linear("mlp/up", f"{_LAYER}intermediate.dense", "FD"),
            **linear("mlp/down", f"{_LAYER}output.dense", "DF"),
        },
        unused=("bert.embeddings.position_ids",),
        # The names that TensorFlow gave a LayerNorm's weights, which the first BERTs still have.
        spelling=spelling(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
    )


EXCHANGES = (_exchange("megatron-bert", "pre", "Megatron"), _exchange("bert", "post", ""))
