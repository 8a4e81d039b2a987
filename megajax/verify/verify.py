"""Verify a small configuration on its mesh: run all checks, and if one fails find the axes and the layer."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from megajax.config import Config
from megajax.verify.check import STEPS, all_checks, check, exact, one_device, steady, with_axes
from megajax.verify.comparison import LIMITS
from megajax.verify.recording import Difference, first_difference
from megajax.verify.run import recorded, run
from megajax.verify.shrink import shown
from megajax.verify.verdict import Finding, Verdict


@dataclass(frozen=True)
class AxesThatDiffer:
    """The smallest sets of axes on which a difference shows.

    Attributes:
        sets: all sets of that size. The empty set means that a single device differs already, because of microbatches
            or recomputation.
        config: the configuration on the first set.
    """

    sets: tuple[tuple[str, ...], ...]
    config: Config

    def __str__(self) -> str:
        if self.sets[0] == ():
            return "none: it differs on one device, by its microbatches or what it recomputes"
        return ", or ".join(" with ".join(axes) + (" alone" if len(axes) == 1 else "") for axes in self.sets)


@dataclass(frozen=True)
class Result:
    """A verdict and, if something differs, where."""

    verdict: Verdict
    axes: AxesThatDiffer | None = None  # the mesh axes that show it
    first: str = ""  # what differs first, in words; empty if nothing does

    @property
    def passed(self) -> bool:
        return self.verdict.passed


def verify(
    config: Config,
    *,
    steps: int = STEPS,
    quick_compile: bool = True,
    on_start: Callable[[str], None] = lambda text: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Result:
    """Check `config`, which is small already, and find out where it differs if it does; for arguments see `check`."""
    config, devices = steady(config), jax.devices()
    verdict = check(config, steps=steps, quick_compile=quick_compile, on_start=on_start, on_finding=on_finding)
    if verdict.passed:
        return Result(verdict)
    axes = _axes_that_differ(config, verdict, steps, quick_compile, on_start)
    on_start("the first activation that differs")
    expected, actual = (recorded(each, devices, quick_compile) for each in (one_device(axes.config), axes.config))
    difference = first_difference(expected, actual, 10 * LIMITS[axes.config.precision].gradient)
    return Result(verdict, axes, first_in_words(difference, verdict.failed))


def _axes_that_differ(
    config: Config, verdict: Verdict, steps: int, quick_compile: bool, on_start: Callable[[str], None]
) -> AxesThatDiffer:
    """Run `config`, which failed, on its mesh with axes left out: one device, then each axis alone, then two together.

    In fp64 where it failed in that, else in its own precision. Where numbers differ, communication does not count.
    """
    failed_exactly = any(not finding.name.startswith(f"{config.precision} ") for finding in verdict.failed)
    wrong = exact(config) if failed_exactly else config
    exactly = wrong.precision == "fp64"
    there = [axis for axis, size in config.mesh.sizes.items() if size > 1]
    reference, limits = verdict.reference, None if failed_exactly else verdict.limits
    numbers = any(finding.of_numbers for finding in verdict.failed)
    assert reference is not None
    states = () if exactly else reference.states
    for number in range(len(there)):
        found = []
        for axes in itertools.combinations(there, number):
            part = with_axes(wrong, axes)
            on_start(f"{shown(part.mesh)}, {part.precision}")
            other = run(part, jax.devices(), steps, with_fresh=exactly, states=states, quick_compile=quick_compile)
            checked = all_checks(reference, other, limits)
            if any(not each.passed and (each.of_numbers or not numbers) for each in checked):
                found.append((axes, part))
        if found:
            return AxesThatDiffer(tuple(axes for axes, _ in found), found[0][1])
    return AxesThatDiffer((tuple(there),), wrong)


def first_in_words(difference: Difference | None, failed: Sequence[Finding]) -> str:
    """What differs first in the order of computation: an activation of the forward pass, the sum of the losses, the
    gradient of an activation, the gradient of a weight, the gradients' norm, or the update."""
    of = {finding.name.partition(" ")[2]: finding for finding in failed}

    def in_step_1(name: str, text: str = "step 1") -> bool:
        return name in of and text in of[name].where

    if difference and (not difference.place.backward or not in_step_1("losses")):
        return str(difference)
    if in_step_1("losses"):
        return f"no activation of step 1, forward: the sum of the losses: {of['losses'].where}"
    if in_step_1("gradients"):
        return f"no activation of step 1: a gradient of weights, or its reduction: {of['gradients'].where}"
    if in_step_1("other figures of the steps", "grad_norm, step 1"):
        return "no activation or gradient of step 1: the norm of the gradients: grad_norm, step 1"
    for name in ("weights after the last step", "gradients", "losses"):
        if name in of:
            return f"no activation or gradient of step 1: the update of the weights: {of[name].where}"
    return f"no activation or gradient of step 1: {failed[0].name}: {failed[0].where}"
