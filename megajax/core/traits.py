"""What a configuration field declares in its annotation besides its valid values: what changing it affects, which size
of the weights it is, how `megajax verify` shrinks it, and its name in the Hugging Face format.

`Option.trait` returns a field's trait of one of these types, so that no room needs its own list of options.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Changes(Enum):
    """What changing an option affects. This decides whether a run can resume with another value, and whether it can
    start from the weights of a run with another value (`--init`)."""

    WEIGHTS = auto()  # the weights, or what they were trained for: both refuse
    ENDS = auto()  # weights of embedding and head: `--init` truncates or reinitializes them
    COMPUTATION = auto()  # only what is computed with the weights: `--init` takes the new value and logs it
    ADAPTERS = auto()  # LoRA's adapters, which start fresh in every run
    OPTIMIZER = auto()  # the optimizer state, which starts fresh in every run
    SAMPLES = auto()  # the order of samples: a run that has trained refuses to resume
    NOTHING = auto()  # none of these


WEIGHTS, ENDS, COMPUTATION = Changes.WEIGHTS, Changes.ENDS, Changes.COMPUTATION
ADAPTERS, OPTIMIZER, SAMPLES, NOTHING = Changes.ADAPTERS, Changes.OPTIMIZER, Changes.SAMPLES, Changes.NOTHING


@dataclass(frozen=True)
class Through:
    """The option matters only through a property of its section."""

    name: str  # the property, which is compared instead of the option
    words: str  # what messages call the property


@dataclass(frozen=True)
class OnlyWith:
    """The option is read only if another one in its section has one of some values. Otherwise it must have its default,
    or may have any value if it is `ignored`, so that overriding the other option of a preset requires nothing more."""

    name: str  # of the other option
    values: tuple[str, ...] = ()  # of the other option; empty: all but 0
    ignored: bool = False

    def is_read(self, section: object) -> bool:
        """Whether the option is read in this section."""
        value = getattr(section, self.name)
        return value in self.values if self.values else value != 0

    @property
    def words(self) -> str:
        """The values, as in messages."""
        return " or ".join(self.values) or "of 1 or more"


@dataclass(frozen=True)
class IsPath:
    """The option is one or more paths. A leading `~` means the user's home folder, even after a `=`, where shells do
    not expand it."""


IS_PATH = IsPath()


@dataclass(frozen=True)
class PerStart:
    """The option belongs to one start: flags and presets set it, but a run's `config.toml`, which may be anybody's,
    does not."""

    kept: bool = False  # a run's `config.toml` has it nevertheless, so that resuming can say that it is not taken over


PER_START = PerStart()


@dataclass(frozen=True)
class Named:
    """A number of the option that users write as a word."""

    word: str
    number: int = 0


@dataclass(frozen=True)
class Size:
    """The option is the size of a dim of the weights."""

    dim: str  # its logical name, as in `mesh.RULES`
    split: bool = False  # sharded over `tensor`, whose size must divide it
    repeated: bool = False  # `tensor` may also be a multiple of it; several devices then hold the same part


@dataclass(frozen=True)
class ShrinkRule:
    """How `megajax verify` shrinks a number; a `Size` does not need this trait."""

    most: float | None = None  # reduce it to this if it is larger
    fixed: float | str | None = None  # set it to this
    tokens: bool = False  # it counts tokens: scale it with the sequence
    jointly: bool = False  # `verify/shrink.py` chooses it together with the sizes


class HuggingFaceName:
    """An option's name in the config.json of Hugging Face's classes, if it has the same values there.

    Args:
        name: in all classes except the following.
        others: in a class with another name for it, by `Exchange.dialect`; empty: it has no such field.
    """

    def __init__(self, name: str = "", **others: str) -> None:
        self._name, self._others = name, others

    def name_in(self, dialect: str) -> str:
        """Its name, or an empty string."""
        return self._others.get(dialect, self._name)
