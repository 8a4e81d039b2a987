"""What a configuration field declares in its annotation beside its valid values: what another value changes, which size
of the weights it is, how `megajax verify` makes it small, and what Hugging Face's format calls it.

`Option.trait` gives a field's trait of one of these types. Rooms that ask need no list of options.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Changes(Enum):
    """What another value of an option changes. This decides whether a run can be resumed with it, and whether a run
    can begin with the weights of another that has another value (`--init`)."""

    WEIGHTS = auto()  # the weights or what they were trained for: refused by both
    ENDS = auto()  # weights of embedding and head: `--init` cuts them or draws them anew
    COMPUTATION = auto()  # only what is computed with the weights: `--init` takes the new value and logs it
    ADAPTERS = auto()  # LoRA's adapters, with which every run begins anew
    OPTIMIZER = auto()  # the optimizer's state, with which every run begins anew
    SAMPLES = auto()  # the order of samples: refused on resuming a run that has trained
    NOTHING = auto()  # neither


WEIGHTS, ENDS, COMPUTATION = Changes.WEIGHTS, Changes.ENDS, Changes.COMPUTATION
ADAPTERS, OPTIMIZER, SAMPLES, NOTHING = Changes.ADAPTERS, Changes.OPTIMIZER, Changes.SAMPLES, Changes.NOTHING


@dataclass(frozen=True)
class Through:
    """The option matters through a property of its section alone."""

    name: str  # of the property, which is compared in place of the option
    words: str  # what the property is, in messages


@dataclass(frozen=True)
class ReadWith:
    """The option is read only where another one of its section has one of some values. Elsewhere it must have its
    default or, if it is `ignored`, any value, so that who overrides a preset's other option need not undo it."""

    name: str  # of the other option
    values: tuple[str, ...] = ()  # of the other option; empty: all but 0
    ignored: bool = False

    def is_read(self, section: object) -> bool:
        """Whether the option is read in such a section."""
        value = getattr(section, self.name)
        return value in self.values if self.values else value != 0

    @property
    def words(self) -> str:
        """The values, in messages."""
        return " or ".join(self.values) or "of 1 or more"


@dataclass(frozen=True)
class IsPath:
    """The option is a path, or several: `~` at its beginning is the user's home folder, also after a `=`, where shells
    leave it."""


IS_PATH = IsPath()


@dataclass(frozen=True)
class Size:
    """The option is the size of a dim of the weights."""

    dim: str  # its logical name, as in `mesh.RULES`
    split: bool = False  # whether it is divided over `tensor`, which must divide it
    repeated: bool = False  # `tensor` may also be a multiple of it; several devices then hold the same part


@dataclass(frozen=True)
class Small:
    """How `megajax verify` makes a number small; a `Size` needs no such trait."""

    most: float | None = None  # it is reduced to this, if it is larger
    fixed: float | str | None = None  # it becomes this, whatever it is
    tokens: bool = False  # it counts tokens, and is scaled with the sequence
    jointly: bool = False  # `verify/shrink.py` finds it together with the sizes


class Theirs:
    """What an option is called in the config.json of Hugging Face's classes, where it has the same values there.

    Args:
        name: in all of them but those named.
        others: in a class that calls it something else, by `Exchange.dialect`; empty: it has no such field.
    """

    def __init__(self, name: str = "", **others: str) -> None:
        self._name, self._others = name, others

    def name_in(self, dialect: str) -> str:
        """Its name, or an empty text."""
        return self._others.get(dialect, self._name)
