"""Records of the tasks, independent of file formats."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megajax.errors import UserError

R = TypeVar("R")


@dataclass(frozen=True)
class Pair:
    """Two texts and the class that they belong to."""

    name: str  # the record's own name in its file, for predictions
    texts: tuple[str, str]  # both
    label: int | None  # the class's number; None: not known
    group: str = ""  # what it is counted with besides: of MNLI "matched" or "mismatched"; empty: nothing

    @property
    def context(self) -> str:
        """The text that training and dev may not share: the first one."""
        return self.texts[0]


NOT_THERE = -1
"""Where an answer begins that is not where its file says."""


@dataclass(frozen=True)
class Answer:
    """An answer, and the character of the context where it begins; with `NOT_THERE` it counts as right, but is not
    trained on.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context that contains the answer.

    Attributes:
        name: its id.
        text: the question.
        context: the paragraph.
        answers: all that are right, the first being what is trained on; empty: the context has none. Those that are
            `NOT_THERE` come last, so that a question whose first one is so is not trained on.
    """

    name: str
    text: str
    context: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Exam:
    """A question about an article, with options."""

    name: str  # its id and number
    article: str  # the text
    text: str  # the question, with `_` where an option belongs, or without
    options: tuple[str, ...]  # 2 to 4
    label: int | None  # the number of the right one; None: not known
    group: str = ""  # "middle", "high", or empty: nothing says which

    @property
    def context(self) -> str:
        """The text that training and dev may not share: the article."""
        return self.article


@dataclass(frozen=True)
class Instruction:
    """What is asked, and what the model should say."""

    place: str = field(repr=False, compare=False)  # flag, file and line, for error messages
    prompt: str = ""  # what is asked
    completion: str = ""  # what the model should say
    messages: tuple[Mapping[str, Any], ...] = ()  # of a conversation, instead of both, each with `role` and `content`

    @property
    def name(self) -> str:
        """Its place."""
        return self.place

    @property
    def texts(self) -> list[str]:
        """All of its texts."""
        return [message["content"] for message in self.messages] or [self.prompt, self.completion]

    @property
    def context(self) -> str:
        """The text that training and dev may not share: the prompt, or the messages before the first answer."""
        before = itertools.takewhile(lambda message: message["role"] != "assistant", self.messages)
        return "\n".join(message["content"] for message in before) if self.messages else self.prompt


Record = Pair | Question | Exam | Instruction


@dataclass
class Records(Generic[R]):
    """Records of some files, and what was odd in them.

    Attributes:
        entries: in the order of the files.
        strict: whether an odd record is an error.
        odd: by what was odd, in words (`questions with fewer than 2 options, skipped`), how many records, and where
            the first one is.
        names: of records or passages that must differ, with the place of each.
    """

    entries: list[R] = field(default_factory=list)
    strict: bool = False
    odd: dict[str, tuple[int, str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def note(self, what: str, place: str, valid: str) -> None:
        """Count an odd record, or raise a `UserError` if that is `strict`; `valid` says what the record should be."""
        if self.strict:
            raise UserError(f"{place}: {what}; valid: {valid}, or --no-task.strict")
        count, first = self.odd.get(what, (0, place))
        self.odd[what] = (count + 1, first)

    def lines(self) -> Sequence[str]:
        """What was odd, a line each."""
        return [f"{count} {what}, first {place}" for what, (count, place) in self.odd.items()]
