"""The task, as configuration."""

from dataclasses import dataclass
from typing import Annotated

from megajax.options import AT_LEAST_ZERO, MOST, OneOf, between
from megajax.tasks.registry import NAMES, PRETRAINING
from megajax.traits import SAMPLES, WEIGHTS

_TOKENS = between(1, 1_000_000)
_THRESHOLD = between(-MOST, MOST)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What a model is trained for."""

    name: Annotated[str, "pretraining, or the task to fine-tune on", OneOf(NAMES), WEIGHTS] = PRETRAINING
    doc_stride: Annotated[
        int,
        "squad: tokens that neighbouring windows over a context share, as Hugging Face's examples count",
        _TOKENS,
        SAMPLES,
    ] = 128
    question_tokens: Annotated[
        int, "squad: tokens of a question, the rest is cut off; 0: all of them", AT_LEAST_ZERO, SAMPLES
    ] = 0
    answer_tokens: Annotated[int, "squad: tokens of an answer at most", _TOKENS] = 30
    n_best: Annotated[int, "squad: starts and ends per window that answers are made of", _TOKENS] = 20
    null_threshold: Annotated[
        float, "squad2: there is no answer where that scores more than this above the best one", _THRESHOLD
    ] = 0.0
    option_tokens: Annotated[
        int, "race: tokens of a question with an option in it, the rest is cut off", _TOKENS, SAMPLES
    ] = 128
    strict: Annotated[bool, "stop at a record that would be skipped or is odd"] = False
