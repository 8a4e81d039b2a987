"""Records of the tasks, independent of file formats."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megajax.errors import UserError


@dataclass(frozen=True)
class Pair:
    """Two texts and the class that they belong to."""

    name: str  # the record's own name in its file, for predictions
    texts: tuple[str, str]  # both
    label: int | None  # the class's number; None: not known
    group: str = ""  # what it is counted with besides: of MNLI "matched" or "mismatched"; empty: nothing

    @property
    def context(self) -> str:
        """The text that training and dev may not share."""
        return self.texts[0]


NOT_THERE = -1
"""Where an answer begins that is not where its file says."""


@dataclass(frozen=True)
class Answer:
    """An answer, and the character of the context where it begins; with `NOT_THERE` it counts as right, but is not
    trained on."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context that contains the answer."""

    name: str  # its id
    text: str
    context: str  # the paragraph
    answers: tuple[Answer, ...]  # all that are right, the first is trained on; empty: none; those `NOT_THERE` come last

    @property
    def is_placed(self) -> bool:
        """Whether the place of the first answer is known, or there is none."""
        return not self.answers or self.answers[0].start != NOT_THERE


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
        """The text that training and dev may not share."""
        return self.article


@dataclass(frozen=True)
class Instruction:
    """What is asked, and what the model should say."""

    name: str = field(repr=False, compare=False)  # flag, file and line, for error messages
    prompt: str = ""  # what is asked
    completion: str = ""  # what the model should say
    messages: tuple[Mapping[str, Any], ...] = ()  # of a conversation, instead of both, each with `role` and `content`

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
class Records:
    """Records of some files, in order, and what was odd in them."""

    entries: list[Any] = field(default_factory=list)
    strict: bool = False  # whether an odd record is an error
    odd: dict[str, tuple[int, str]] = field(default_factory=dict)  # by what was odd: how many, where the first one is
    names: dict[str, str] = field(default_factory=dict)  # of records or passages that must differ, with their places

    def note(self, what: str, place: str, valid: str) -> None:
        """Count an odd record, or raise a `UserError` if that is `strict`; `valid` says what the record should be."""
        if self.strict:
            raise UserError(f"{place}: {what}; valid: {valid}, or --no-task.strict")
        count, first = self.odd.get(what, (0, place))
        self.odd[what] = (count + 1, first)

    def lines(self) -> list[str]:
        """What was odd, a line each."""
        return [f"{count} {what}, first {place}" for what, (count, place) in self.odd.items()]
