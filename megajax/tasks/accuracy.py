"""Accuracy of classes and options.

N records, C classes or options.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.tasks.records import Exam, Pair


def predicted_classes(records: Sequence[Pair | Exam], probabilities_NC: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """The most probable class of every record, [N]; the first of equally probable ones; only among the options of a
    question.
    """
    assert probabilities_NC.shape[0] == len(records), probabilities_NC.shape
    num_classes = probabilities_NC.shape[1]
    counts = [len(record.options) if isinstance(record, Exam) else num_classes for record in records]
    there_NC = np.arange(num_classes)[None, :] < np.array(counts, np.intp).reshape(-1, 1)
    return np.where(there_NC, probabilities_NC, -np.inf).argmax(axis=1)


def class_figures(records: Sequence[Pair | Exam], probabilities_NC: npt.NDArray[Any]) -> dict[str, float]:
    """Accuracy over all records that have a label, and over those of every group, in percent.

    Returns:
        `accuracy`, NaN where no record has a label; `accuracy_GROUP` for every group in the records, in alphabetical
        order; `records`, how many have a label.
    """
    found = predicted_classes(records, probabilities_NC)
    right: dict[str, list[bool]] = {"": []}
    for record, label in zip(records, found.tolist(), strict=True):
        if record.label is not None:
            for group in {"", record.group}:
                right.setdefault(group, []).append(record.label == label)
    figures: dict[str, float] = {"accuracy": _percent(right[""])}
    figures |= {f"accuracy_{group}": _percent(right[group]) for group in sorted(right) if group}
    return figures | {"records": len(right[""])}


def _percent(right: list[bool]) -> float:
    return 100 * sum(right) / len(right) if right else math.nan
