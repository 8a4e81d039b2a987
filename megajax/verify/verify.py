"""Verify a small configuration on its mesh: run all checks, and if one fails find the axes and the layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from megajax.config import Config
from megajax.verify.axes import AxesThatDiffer, axes_that_differ
from megajax.verify.check import STEPS, check, one_device, steady
from megajax.verify.comparison import LIMITS
from megajax.verify.first_difference import Difference, first_difference
from megajax.verify.run import recorded
from megajax.verify.verdict import Finding, Verdict


class Listener(Protocol):
    """Receives the progress."""

    def start(self, what: str) -> None:
        """A run starts."""

    def found(self, finding: Finding) -> None:
        """A check is done."""


@dataclass(frozen=True)
class Result:
    """A verdict and, if something differs, where.

    Attributes:
        axes: the mesh axes that show it.
        first: what differs first, in words; empty if nothing does.
    """

    verdict: Verdict
    axes: AxesThatDiffer | None = None
    first: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict.passed


def verify(
    config: Config,
    listener: Listener,
    devices: Sequence[jax.Device] | None = None,
    *,
    steps: int = STEPS,
    quick_compile: bool = True,
) -> Result:
    """Check `config`, which is small already, and find out where it differs if it does."""
    config = steady(config)
    devices = list(jax.devices() if devices is None else devices)
    options: dict[str, Any] = {"steps": steps, "quick_compile": quick_compile}
    verdict = check(config, devices, on_start=listener.start, on_finding=listener.found, **options)
    if verdict.passed:
        return Result(verdict)
    axes = axes_that_differ(config, verdict, devices, on_start=listener.start, **options)
    listener.start("the first activation that differs")
    return Result(verdict, axes, first_place(axes, verdict, devices, quick_compile=quick_compile))


def first_place(
    axes: AxesThatDiffer, verdict: Verdict, devices: Sequence[jax.Device], *, quick_compile: bool = True
) -> str:
    """What differs first in the first step, in words, on the smallest mesh that shows a difference."""
    tolerance = 10 * LIMITS[axes.config.precision].gradient
    expected, actual = (
        recorded(config, devices, quick_compile=quick_compile) for config in (one_device(axes.config), axes.config)
    )
    difference = first_difference(expected, actual, tolerance)
    return first_in_words(difference, verdict.failed)


def first_in_words(difference: Difference | None, failed: Sequence[Finding]) -> str:
    """What differs first in the order of computation: an activation of the forward pass, the sum of the losses, the
    gradient of an activation, the gradient of a weight, the gradients' norm, or the update."""
    of = {finding.name.partition(" ")[2]: finding for finding in failed}

    def in_step_1(name: str, text: str = "step 1") -> bool:
        return name in of and text in of[name].where

    if difference and not difference.place.backward:
        return str(difference)
    if in_step_1("losses"):
        return f"no activation of step 1, forward: the sum of the losses: {of['losses'].where}"
    if difference:
        return str(difference)
    if in_step_1("gradients"):
        return f"no activation of step 1: a gradient of weights, or its reduction: {of['gradients'].where}"
    if in_step_1("other figures of the steps", "grad_norm, step 1"):
        return "no activation or gradient of step 1: the norm of the gradients: grad_norm, step 1"
    for name in ("weights after the last step", "gradients", "losses"):
        if name in of:
            return f"no activation or gradient of step 1: the update of the weights: {of[name].where}"
    return f"no activation or gradient of step 1: {failed[0].name}: {failed[0].where}"
