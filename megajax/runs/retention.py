"""Which checkpoints stay when a new one is complete."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay; one that any of these rules keeps, stays."""

    newest: int  # so many of the latest steps
    best: int = 0  # so many with the lowest validation losses; those without one do not count
    every: int = 0  # those whose step is a multiple of this, for good; 0: none

    def removed(self, steps: Sequence[int], losses: Mapping[int, float]) -> list[int]:
        """The `steps` whose checkpoints go; `losses` are validation losses by step."""
        ascending = sorted(steps)
        measured = sorted((step for step in ascending if step in losses), key=lambda step: (losses[step], -step))
        kept = {*ascending[-self.newest :], *measured[: self.best]}
        return [step for step in ascending if step not in kept and not (self.every and step % self.every == 0)]
