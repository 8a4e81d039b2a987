"""The tasks by name, `task.name`."""

from dataclasses import dataclass
from typing import Literal

PRETRAINING = "pretraining"  # is no task: the losses of the family


@dataclass(frozen=True)
class Task:
    """What must be known of a task before its files are read.

    Attributes:
        head: what the model predicts: the class of a pair of texts, the span of an answer in a context, the right one
            of several options, or, as in pretraining, the next token.
        classes: how many classes, or options at most; of a span 2, its start and its end; of the next token any.
        labels: names of the classes in the order of their numbers, as the files have them; empty where there are none.
        figure: by which runs are compared on dev, one of the task's figures in percent.
        unanswerable: of a span, whether questions may have no answer.
    """

    head: Literal["classes", "span", "choice", "pretraining"]
    classes: int
    figure: str
    labels: tuple[str, ...] = ()
    unanswerable: bool = False

    @property
    def continues_text(self) -> bool:
        """Whether it is for models that continue texts."""
        return self.head == "pretraining"


TASKS = {
    "mnli": Task("classes", 3, "accuracy", ("entailment", "neutral", "contradiction")),
    "qqp": Task("classes", 2, "accuracy", ("0", "1")),
    "squad1": Task("span", 2, "f1"),
    "squad2": Task("span", 2, "f1", unanswerable=True),
    "race": Task("choice", 4, "accuracy", ("A", "B", "C", "D")),
    "instructions": Task("pretraining", 2, "accuracy"),
}
"""Natural-language inference and paraphrases (GLUE), questions about a paragraph, exams (arXiv 1909.08053); and, of
models that continue texts, what they should say to prompts."""

NAMES = (PRETRAINING, *TASKS)
