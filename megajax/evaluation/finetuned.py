"""A task's figures from models that were fine-tuned on it, on any mesh; several models are an ensemble."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from megajax.config import Config
from megajax.evaluation.scoring import answer_samples
from megajax.program.program import Program
from megajax.runs.task_data import TaskData
from megajax.tasks.accuracy import class_figures, predicted_classes
from megajax.tasks.answers import find_answers, mean_logits
from megajax.tasks.config import TaskConfig
from megajax.tasks.records import Exam, Pair
from megajax.tasks.registry import TASKS
from megajax.tasks.samples import TaskSamples
from megajax.tasks.squad_scores import squad_figures
from megajax.tasks.windows import SpanWindows

Logits = npt.NDArray[np.float32]


def dev_figures(
    program: Program, params: Any, data: TaskData, between: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The figures of a run's dev records.

    Args:
        program: compiled for batches of its global batch.
        params: weights on the program's mesh.
        data: of the run.
        between: called before every batch.
    """
    logits = answer_samples(program, params, data.validation, between=between)
    return task_answers(program.config, data.validation, [logits])[0]


def task_answers(config: Config, samples: TaskSamples, logits: Sequence[Logits]) -> tuple[dict[str, float], list[Any]]:
    """The figures of a task, and for every record its class, or the text of its answer.

    Args:
        config: of the task, and how answers are found.
        samples: of the records.
        logits: of every model, [samples, C], or [samples, T, 2] of spans. Of several models the probabilities are
            averaged: of classes and options, or of where spans begin and end.
    """
    name, how = config.task.name, config.task
    if TASKS[name].head == "span":
        return _spans(name, how, cast(SpanWindows, samples), logits)
    records = cast(Sequence[Pair | Exam], samples.records)
    scores_NC = logits[0] if len(logits) == 1 else np.mean([_probabilities(each) for each in logits], axis=0)
    return class_figures(records, scores_NC), predicted_classes(records, scores_NC).tolist()


def _spans(
    name: str, how: TaskConfig, windows: SpanWindows, logits: Sequence[Logits]
) -> tuple[dict[str, float], list[Any]]:
    unanswerable = name == "squad2"
    start_WT, end_WT = (mean_logits(windows, [each[..., end] for each in logits]) for end in (0, 1))
    found = find_answers(windows, start_WT, end_WT, how, unanswerable=unanswerable)
    figures = squad_figures(windows.records, found, unanswerable=unanswerable)
    return dict(figures), [answer.text for answer in found]


def _probabilities(logits_NC: Logits) -> npt.NDArray[np.float64]:
    exp_NC = np.exp(logits_NC.astype(np.float64) - logits_NC.max(axis=1, keepdims=True))
    return exp_NC / exp_NC.sum(axis=1, keepdims=True)
