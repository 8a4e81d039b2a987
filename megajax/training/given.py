"""What Python code gives a run in place of what the command makes and reads."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megajax.core.optim.config import UNKNOWN, Horizon
from megajax.core.program.program import Program
from megajax.core.program.state import TrainState
from megajax.data.samples.base import EndlessSamples, Samples
from megajax.data.text.tokenizer import Tokenizer
from megajax.settings.config import Config

OnStep = Callable[[int, dict[str, float]], object]
OnValidation = Callable[[int, float], object]


@dataclass(frozen=True)
class OwnData:
    """The data of a run that reads none, as `RunData` has that of corpora."""

    batches: Callable[[int], Iterator[Mapping[str, Any]]] | None  # from the one after so many steps; None: of `train`
    train: EndlessSamples  # with batches, samples of their form, to measure with
    validation: Samples | None
    tokenizer: Tokenizer | None
    words: str  # about the data
    validation_sets: dict[str, Samples] = field(default_factory=dict)

    def lines(self, config: Config) -> Iterator[str]:
        """The lines that a run prints about its data before it starts."""
        yield f"data: {self.words}"


@dataclass(frozen=True)
class Supplied:
    """All of it; by default nothing.

    Attributes:
        program: the program on a mesh of some devices.
        state, step: what training begins with in a run directory without checkpoints.
        horizon, epochs: the model's schedule in steps, or the epochs that it lasts; training may end earlier.
        tokenizer: the one that belongs to these weights.
        data: in place of the data that the configuration names.
        on_begin: called with the `Trainer` before its first step.
        on_step, on_validation: called with a finished step's number and figures, or loss.
        ending: what the last step is followed by; "saved": a checkpoint alone; "none": nothing.
    """

    program: Program | None = None
    state: TrainState | None = None
    tokenizer: Tokenizer | None = None
    step: int = 0
    horizon: Horizon = UNKNOWN
    epochs: float = 0.0
    data: OwnData | None = None
    on_begin: Callable[[Any], object] = lambda run: None
    on_step: OnStep = lambda step, figures: None
    on_validation: OnValidation = lambda step, loss: None
    ending: Literal["whole", "saved", "none"] = "whole"


NOTHING = Supplied()
