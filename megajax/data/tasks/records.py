"""Records of the tasks, independent of file formats."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megajax.core.errors import UserError


@dataclass(frozen=True)
class Pair:
    """Two texts and their class."""

    name: str  # the record's name in its file, for predictions
    texts: tuple[str, str]
    label: int | None  # the class's number; None: unknown
    group: str = ""  # also scored with this group: "matched" or "mismatched" in MNLI; empty: none

    @property
    def context(self) -> str:
        """The text that training and dev must not share."""
        return self.texts[0]


NOT_THERE = -1
"""The start of an answer that is not where its file says."""


@dataclass(frozen=True)
class Answer:
    """An answer, and the character of the context where it starts; if that is `NOT_THERE`, it counts as right, but is
    not trained on."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a context that contains the answer."""

    name: str  # its id
    text: str
    context: str  # the paragraph
    answers: tuple[Answer, ...]  # all right ones; the first is trained on, those `NOT_THERE` are last; may be empty

    @property
    def is_placed(self) -> bool:
        """Whether the first answer's start is known, or there is no answer."""
        return not self.answers or self.answers[0].start != NOT_THERE


@dataclass(frozen=True)
class Exam:
    """A question about an article, with options."""

    name: str  # its id and number
    article: str
    text: str  # the question, in which `_` marks the place of the option, if any
    options: tuple[str, ...]  # 2 to 4
    label: int | None  # the number of the right option; None: unknown
    group: str = ""  # "middle", "high", or empty if unknown

    @property
    def context(self) -> str:
        """The text that training and dev must not share."""
        return self.article


@dataclass(frozen=True)
class Instruction:
    """A request, and what the model should say."""

    name: str = field(repr=False, compare=False)  # flag, file and line, for error messages
    prompt: str = ""
    completion: str = ""  # what the model should say
    messages: tuple[Mapping[str, Any], ...] = ()  # a conversation instead of both; each has `role` and `content`
    # Not in `repr`, and so in digests only if they are given: runs of versions without them go on.
    answers: tuple[int, ...] = field(default=(), repr=False)  # the numbers of the messages that are trained on
    template_args: Mapping[str, Any] = field(default_factory=dict, repr=False)  # variables of the chat template

    @property
    def texts(self) -> list[str]:
        """All of its texts."""
        return [message["content"] for message in self.messages] or [self.prompt, self.completion]

    @property
    def context(self) -> str:
        """The text that training and dev must not share: the prompt, or the messages before the first answer."""
        before = itertools.takewhile(lambda message: message["role"] != "assistant", self.messages)
        return "\n".join(message["content"] for message in before) if self.messages else self.prompt


@dataclass(frozen=True)
class Preference:
    """A request with two answers, the first of which is preferred."""

    name: str = field(repr=False, compare=False)  # flag, file and line, for error messages
    chosen: Instruction
    rejected: Instruction

    @property
    def template_args(self) -> Mapping[str, Any]:
        """Variables of the chat template."""
        return self.chosen.template_args

    @property
    def texts(self) -> list[str]:
        """All of its texts."""
        return [*self.chosen.texts, *self.rejected.texts]

    @property
    def context(self) -> str:
        """The text that training and dev must not share."""
        return self.chosen.context


Record = Pair | Question | Exam | Instruction | Preference


@dataclass
class Records:
    """Records from some files, in order, and what was unusual in them."""

    entries: list[Any] = field(default_factory=list)
    strict: bool = False  # whether an unusual record is an error
    odd: dict[str, tuple[int, str]] = field(default_factory=dict)  # description -> count, place of the first one
    names: dict[str, str] = field(default_factory=dict)  # names that must be unique -> the place of each

    def note(self, what: str, where: str, valid: str) -> None:
        """Count an unusual record, or raise `UserError` if `strict`; `valid` says what the record should be, and is
        empty if it is unusual on purpose."""
        if self.strict and valid:
            raise UserError(f"{where}: {what}; valid: {valid}, or --no-task.strict")
        count, first = self.odd.get(what, (0, where))
        self.odd[what] = (count + 1, first)

    def lines(self) -> list[str]:
        """What was unusual, one line each."""
        return [f"{count} {what}, first {place}" for what, (count, place) in self.odd.items()]
