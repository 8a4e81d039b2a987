"""BERT's heads in transformers: the classes that have them, what config.json says of them, and where their weights
are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megajax.convert.settings import Fields
from megajax.convert.weights import Place, linear, norm
from megajax.models.config import ModelConfig
from megajax.tasks.registry import TASKS

_CHOICES = 4  # theirs takes any number of texts to choose from; ours as many as RACE has
_TABLE = "bert.embeddings.word_embeddings.weight"
_PREDICTIONS = "cls.predictions."
_POOLER = linear("head/pooler/dense", "bert.pooler.dense", "DD")
_ONE_LABEL = "single_label_classification"


@dataclass(frozen=True)
class BertHead:
    """One of our heads.

    Attributes:
        classes: that have it, by their names from `Bert` on; the first is written.
        kind: a model with all of its weights, in messages.
        shared: where they are.
        read: config.json -> values by key of a run's preset; raises `UserError` where the head is not ours.
        settings: (model, names of its classes) -> the head's fields of config.json.
        copies: as in `Places`.
        unused: as in `Places`.
        fresh: as in `Places`.
    """

    classes: tuple[str, ...]
    kind: str
    shared: Mapping[str, Place]
    read: Callable[[Fields], dict[str, Any]]
    settings: Callable[[ModelConfig, Sequence[str]], dict[str, Any]]
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    fresh: Mapping[str, str] = field(default_factory=dict)


def _read_classes(fields: Fields) -> dict[str, Any]:
    """Labels of a task must have its order: by their numbers alone, answers would be other ones than there."""
    fields.check("problem_type", None, _ONE_LABEL)
    names = fields.labels()
    lower = [name.lower() for name in names]
    for task, labels in ((name, task.labels) for name, task in TASKS.items() if task.head == "classes"):
        if sorted(lower) == sorted(labels) and lower != [*labels]:
            raise fields.refusal("id2label", fields.get("id2label"), f"in the order of {task}, {', '.join(labels)}")
    return {"model.head": "classes", "model.num_classes": len(names)}


def _read_span(fields: Fields) -> dict[str, Any]:
    if len(fields.labels()) != 2:
        name = "num_labels" if fields.get("id2label") is None else "id2label"
        raise fields.refusal(name, fields.get(name), "two labels, a span's start and its end")
    return {"model.head": "span", "model.num_classes": 2}


def _labels(model: ModelConfig, names: Sequence[str]) -> dict[str, Any]:
    names = names or [f"LABEL_{number}" for number in range(model.num_classes)]  # as transformers names them
    numbers = {name: number for number, name in enumerate(names)}
    return {"id2label": {str(number): name for name, number in numbers.items()}, "label2id": numbers}


HEADS = {
    "pretraining": BertHead(
        classes=("BertForPreTraining", "BertForMaskedLM"),
        kind="a BERT with a head of masked tokens",
        shared={
            **linear("head/masked/dense", f"{_PREDICTIONS}transform.dense", "DD"),
            **norm("head/masked/norm", f"{_PREDICTIONS}transform.LayerNorm"),
            "head/masked/bias": Place(f"{_PREDICTIONS}bias", "V"),
            **_POOLER,
            **linear("head/order", "cls.seq_relationship", "2D"),
        },
        read=lambda _: {},
        settings=lambda *_: {},
        copies={f"{_PREDICTIONS}decoder.weight": _TABLE, f"{_PREDICTIONS}decoder.bias": f"{_PREDICTIONS}bias"},
        fresh={"head/pooler": "the pooler", "head/order": "the order head"},
    ),
    "classes": BertHead(
        classes=("BertForSequenceClassification",),
        kind="a BERT with a head of classes",
        shared=_POOLER | linear("head/output", "classifier", "CD"),
        read=_read_classes,
        settings=lambda model, names: _labels(model, names) | {"problem_type": _ONE_LABEL},
    ),
    "span": BertHead(
        classes=("BertForQuestionAnswering",),
        kind="a BERT with a head of spans",
        shared=linear("head/output", "qa_outputs", "2D"),
        read=_read_span,
        settings=_labels,
        unused=tuple(place.name for place in _POOLER.values()),  # which older versions wrote
    ),
    "choice": BertHead(
        classes=("BertForMultipleChoice",),
        kind="a BERT with a head of choices",
        shared=_POOLER | linear("head/output", "classifier", "1D"),
        read=lambda _: {"model.head": "choice", "model.num_classes": _CHOICES},
        settings=_labels,
    ),
}
"""By `model.head`."""
