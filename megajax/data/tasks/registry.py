"""The tasks by name (`task.name`), and their configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.core.config import MODELS_OWN
from megajax.core.options import AT_LEAST_ZERO, MOST, OneOf, between
from megajax.core.traits import SAMPLES, WEIGHTS

PRETRAINING = "pretraining"  # not a task: uses the losses of the model family

_SQUAD = 'SQuAD\'s JSON, {"data": [{"paragraphs": …}]}'
_RACE = "JSON with article, questions, options and answers, of one passage or on each line"


@dataclass(frozen=True)
class Task:
    """What is known about a task before its files are read."""

    # What the model predicts: the class of a pair of texts, an answer's span, the right option, or the next token.
    head: Literal["classes", "span", "choice", "pretraining"]
    classes: int  # number of classes, or most options; for a span 2 (start and end); not used for the next token
    figure: str  # the figure, in percent, by which runs are compared on dev
    files: str  # description of its files
    labels: tuple[str, ...] = ()  # class names in the files, in the order of their numbers
    suffixes: tuple[str, ...] = ()  # of its files in a folder; empty: files must be named one by one
    unanswerable: bool = False  # for spans, whether questions may have no answer
    loss: str = MODELS_OWN  # `train.loss`

    @property
    def continues_text(self) -> bool:
        """Whether it is for language models, which continue texts."""
        return self.head == "pretraining"


TASKS = {
    "mnli": Task(
        "classes",
        3,
        "accuracy",
        "TSV with the columns sentence1, sentence2 and gold_label",
        labels=("entailment", "neutral", "contradiction"),
    ),
    "qqp": Task(
        "classes", 2, "accuracy", "TSV with the columns question1, question2 and is_duplicate", labels=("0", "1")
    ),
    "squad1": Task("span", 2, "f1", _SQUAD),
    "squad2": Task("span", 2, "f1", _SQUAD, unanswerable=True),
    "race": Task("choice", 4, "accuracy", _RACE, labels=("A", "B", "C", "D"), suffixes=(".txt", ".json", ".jsonl")),
    "instructions": Task(
        "pretraining",
        2,
        "accuracy",
        'JSON lines, or an array of JSON, with "prompt" and "completion", or with "messages"',
        suffixes=(".jsonl", ".json", ".ndjson"),
    ),
    "preferences": Task(
        "pretraining",
        2,
        "accuracy",
        'JSON lines, or an array of JSON, with "prompt", "chosen" and "rejected", or with two conversations',
        suffixes=(".jsonl", ".json", ".ndjson"),
        loss="preferences",
    ),
}
"""Natural-language inference and paraphrases (GLUE), questions about a paragraph, exams (arXiv 1909.08053); and, for
language models, responses to prompts, and which of two is preferred."""

NAMES = (PRETRAINING, *TASKS)

_TOKENS = between(1, 1_000_000)
_THRESHOLD = between(-MOST, MOST)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The training task."""

    name: Annotated[str, "pretraining, or the fine-tuning task", OneOf(NAMES), WEIGHTS] = PRETRAINING
    doc_stride: Annotated[
        int,
        "squad: tokens shared by neighbouring windows over a context, as counted in Hugging Face's examples",
        _TOKENS,
        SAMPLES,
    ] = 128
    question_tokens: Annotated[
        int, "squad: truncate questions to this many tokens; 0: never", AT_LEAST_ZERO, SAMPLES
    ] = 0
    answer_tokens: Annotated[int, "squad: most tokens in an answer", _TOKENS] = 30
    n_best: Annotated[int, "squad: candidate starts and ends per window", _TOKENS] = 20
    null_threshold: Annotated[
        float,
        "squad2: predict that there is no answer when that outscores the best answer by more than this",
        _THRESHOLD,
    ] = 0.0
    option_tokens: Annotated[int, "race: truncate question plus option to this many tokens", _TOKENS, SAMPLES] = 128
    strict: Annotated[bool, "stop at records that would otherwise be skipped or repaired"] = False
