"""Where a mesh differs from one device: the axes that show it, and the first difference in the order of computation."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megajax.settings.config import Config
from megajax.verify.forms import with_axes
from megajax.verify.recording import Difference
from megajax.verify.shrink import shown
from megajax.verify.verdict import UNMOVED, WEIGHTS, Finding, Verdict


@dataclass(frozen=True)
class AxesThatDiffer:
    """The smallest sets of axes that show a difference.

    Attributes:
        sets: all sets of that size. The empty set means that a single device already differs, because of microbatches,
            blocks or recomputation.
        config: the configuration on the first set.
    """

    sets: tuple[tuple[str, ...], ...]
    config: Config

    def __str__(self) -> str:
        if self.sets[0] == ():
            return "none: with microbatches, blocks or recomputation, the run already differs on one device"
        return ", or ".join(" with ".join(axes) + (" alone" if len(axes) == 1 else "") for axes in self.sets)


@dataclass(frozen=True)
class Result:
    """A verdict and, if something differs, where."""

    verdict: Verdict
    axes: AxesThatDiffer | None = None  # mesh axes that show the difference
    first: str = ""  # the first difference, in words; empty if there is none

    @property
    def passed(self) -> bool:
        return self.verdict.passed


def axes_that_differ(
    config: Config, differs: Callable[[Config], bool], on_start: Callable[[str], None]
) -> AxesThatDiffer:
    """Try `config`, which differs, on meshes with axes left out: one device, then each axis alone, then pairs."""
    sharded = [axis for axis, size in config.mesh.sizes.items() if size > 1]
    for count in range(len(sharded)):
        failing = []
        for axes in itertools.combinations(sharded, count):
            subset = with_axes(config, axes)
            on_start(f"{shown(subset.mesh)}, {subset.precision}")
            if differs(subset):
                failing.append((axes, subset))
        if failing:
            return AxesThatDiffer(tuple(axes for axes, _ in failing), failing[0][1])
    return AxesThatDiffer((tuple(sharded),), config)


def first_in_words(difference: Difference | None, failed: Sequence[Finding], collectives: Sequence[str] = ()) -> str:
    """The first difference in the order of computation, and a wrong collective: one of `collectives`, or one that is
    not planned."""
    first = _first(difference, failed)
    unplanned = [finding.where.split(";")[0] for finding in failed if not finding.compares_numbers]
    of_the_first = sorted(collectives, key=lambda name: name.split()[-1] not in first)
    wrong = [*of_the_first, *unplanned][:1]
    return first if not wrong or wrong[0] in first else f"{first}; the collective that is wrong: {wrong[0]}"


def _first(difference: Difference | None, failed: Sequence[Finding]) -> str:
    """An activation in the forward pass, the sum of the losses, an activation's gradient, a weight's gradient, the
    gradient norm, or the update."""
    by_name = {finding.name.partition(" ")[2]: finding for finding in failed}

    def in_step_1(name: str, text: str = "step 1") -> bool:
        return name in by_name and text in by_name[name].where

    if difference and (not difference.place.backward or not in_step_1("losses")):
        return str(difference)
    if in_step_1("losses"):
        return f"no activation of step 1, forward: the sum of the losses: {by_name['losses'].where}"
    if in_step_1("gradients"):
        return f"no activation of step 1: a gradient of weights, or its reduction: {by_name['gradients'].where}"
    if in_step_1("other metrics of the steps", "grad_norm, step 1"):
        return "no activation or gradient of step 1: the norm of the gradients: grad_norm, step 1"
    if UNMOVED in by_name:
        return f"no activation or gradient of step 1: what the skipped step changes: {by_name[UNMOVED].where}"
    for name in (WEIGHTS, "gradients", "losses"):
        if name in by_name:
            return f"no activation or gradient of step 1: the update of the weights: {by_name[name].where}"
    return f"no activation or gradient of step 1: {failed[0].name}: {failed[0].where}"
