"""Find the smallest sets of mesh axes on which a difference shows."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from megajax.config import Config
from megajax.verify.check import STEPS, all_checks, exact, with_axes
from megajax.verify.fold import shown
from megajax.verify.run import run
from megajax.verify.verdict import Finding, Verdict


@dataclass(frozen=True)
class AxesThatDiffer:
    """The smallest sets of axes on which a difference shows.

    Attributes:
        sets: all sets of that size. The empty set means that a single device differs already, because of microbatches
            or recomputation.
        config: the configuration on the first set.
        findings: the checks that failed there.
    """

    sets: tuple[tuple[str, ...], ...]
    config: Config
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        if self.sets[0] == ():
            return "none: it differs on one device, by its microbatches or what it recomputes"
        return ", or ".join(" with ".join(axes) + (" alone" if len(axes) == 1 else "") for axes in self.sets)


def axes_that_differ(
    config: Config,
    verdict: Verdict,
    devices: Sequence[jax.Device] | None = None,
    *,
    steps: int = STEPS,
    quick_compile: bool = True,
    on_start: Callable[[str], None] = lambda text: None,
) -> AxesThatDiffer:
    """Run `config`, which failed, on its mesh with axes left out: one device, then each axis alone, then two together.

    In fp64 where it failed in that, else in its own precision. Where numbers differ, communication does not count.
    """
    devices = list(jax.devices() if devices is None else devices)
    failed_exactly = any(not finding.name.startswith(f"{config.precision} ") for finding in verdict.failed)
    wrong = exact(config) if failed_exactly else config
    there = [axis for axis, size in config.mesh.sizes.items() if size > 1]
    limits = None if failed_exactly else verdict.limits
    exactly = wrong.precision == "fp64"
    reference = verdict.reference
    numbers = any(finding.of_numbers for finding in verdict.failed)
    assert reference is not None
    for number in range(len(there)):
        found = []
        for axes in itertools.combinations(there, number):
            part = with_axes(wrong, axes)
            on_start(f"{shown(part.mesh)}, {part.precision}")
            states = () if exactly else reference.states
            other = run(part, devices, steps, with_fresh=exactly, states=states, quick_compile=quick_compile)
            checked = all_checks(reference, other, limits)
            failed = tuple(each for each in checked if not each.passed and (each.of_numbers or not numbers))
            if failed:
                found.append((axes, part, failed))
        if found:
            return AxesThatDiffer(tuple(axes for axes, _, _ in found), *found[0][1:])
    return AxesThatDiffer((tuple(there),), wrong, verdict.failed)
