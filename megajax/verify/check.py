"""Compare a small configuration on its mesh with a single device, and find the axes and the layer that differ."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megajax.config import Config
from megajax.precision import COMPUTE_DTYPE, E4M3
from megajax.verify.comparison import HALF, LIMITS, Limits, limits_of_edges
from megajax.verify.forms import exact, in_blocks, one_device, plain, steady, with_axes
from megajax.verify.recording import Difference, first_difference
from megajax.verify.run import FP8_IN_FP64, MeshRun, TracingError, recorded, run
from megajax.verify.shrink import shown
from megajax.verify.theory import check_collectives
from megajax.verify.verdict import UNMOVED, Finding, Verdict, compare_runs, loss_scales, same_on_devices, same_on_mesh

STEPS = 3
_TRACED = "tracing of the step"


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


def verify(
    config: Config,
    *,
    steps: int = STEPS,
    quick_compile: bool = True,
    on_start: Callable[[str], None] = lambda text: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Result:
    """Check `config`, which must be small already, and locate differences; for the arguments see `check`."""
    config, devices = steady(config), jax.devices()
    verdict = check(config, steps=steps, quick_compile=quick_compile, on_start=on_start, on_finding=on_finding)
    if verdict.passed:
        return Result(verdict)
    axes = _axes_that_differ(config, verdict, steps, quick_compile, on_start)
    untraced = [finding for finding in verdict.failed if finding.name.endswith(_TRACED)]
    if untraced:
        return Result(verdict, axes, f"no step, {untraced[0].where}")
    on_start("the first activation that differs")
    failed = _failed(config, verdict)
    assert failed.reference is not None
    expected = recorded(failed.reference.config, devices, quick_compile, failed.reference.operand_dtype)
    actual = recorded(axes.config, devices, quick_compile, failed.operand_dtype, in_blocks(axes.config))
    tolerance = 10 * (LIMITS.get(axes.config.precision) or failed.limits or LIMITS["bf16"]).gradient
    difference = first_difference(expected, actual, tolerance)
    wrong = [name for name, error in actual.collectives.items() if not error <= tolerance]
    return Result(verdict, axes, first_in_words(difference, verdict.failed, wrong))


def check(
    config: Config,
    *,
    steps: int = STEPS,
    quick_compile: bool = True,
    on_start: Callable[[str], None] = lambda text: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Verdict:
    """Compare `config`, which must be small already, with one device in fp64: first in fp64, then in its own precision.

    For fp8 there are three comparisons: the step in fp64 with its products scaled but not rounded; the step in fp64
    with operands rounded to e4m3, against one device that rounds them too; and the step in fp8, against one device in
    fp8. In fp64 no operand lies within rounding of the edge between two float8 numbers, so a wrong scale shows.

    Args:
        steps: number of steps; before the last one more overflows.
        quick_compile: do not optimize the CPU's machine code.
        on_start: called with the name of each run before it starts.
        on_finding: called with each finding as soon as it is known.
    """
    config, devices = steady(config), jax.devices()
    options: dict[str, Any] = {"steps": steps, "quick_compile": quick_compile}
    found: list[Finding] = []
    limits: Limits | None = None

    def tell(checked: Iterable[Finding]) -> None:
        for finding in checked:
            found.append(finding)
            on_finding(finding)

    def traced(what: str, config: Config, **more: Any) -> MeshRun | None:
        on_start(f"{what}, {FP8_IN_FP64 if more.get('operand_dtype') == E4M3 else config.precision}")
        try:
            return run(config, devices, **options, **more)
        except TracingError as error:
            tell([Finding(f"{config.precision} {_TRACED}", 1, 0, f"{what}: {error}")])
            return None

    reference = traced("one device", one_device(config), with_fresh=True, with_states=True)
    if reference is None:
        return Verdict(tuple(found))
    mesh, in_float8, blocks = shown(config.mesh), config.precision == "fp8", in_blocks(config)
    other = traced(mesh, exact(config), with_fresh=True, operand_dtype=_scaled_only(config), backend=blocks)
    tell(all_checks(reference, other) if other else [])
    own, rounded, compared = None, None, reference
    if config.precision != "fp64":
        options["states"] = reference.states
    if in_float8:
        rounded = traced("one device", one_device(config), operand_dtype=E4M3)
        other = traced(mesh, exact(config), operand_dtype=E4M3, backend=blocks)
        tell(all_checks(rounded, other) if rounded and other else [])
        compared = traced("one device", plain(config)) or reference
        limits = limits_of_edges(config.model.num_layers)
    if config.precision != "fp64":
        own = traced(mesh, config, backend=blocks)
    if own:
        checked = Verdict(tuple(all_checks(compared, own, limits)))
        if config.precision in HALF and Verdict(tuple(found)).passed and not checked.passed:
            alone = compared  # in fp8 the number of microbatches rounds nothing otherwise
            if not rounded:
                on_start(f"one device, {config.precision}")
                alone = run(with_axes(config, ()), devices, **options, backend=blocks)
            limits = widened(rounded or reference, alone, limits)
        tell(all_checks(compared, own, limits))
    return Verdict(tuple(found), limits, reference, rounded, compared)


def _scaled_only(config: Config) -> DTypeLike | None:
    """The dtype of operands that gives a step in fp64 this precision's products without rounding."""
    return COMPUTE_DTYPE["fp64"] if config.precision == "fp8" else None


def widened(reference: MeshRun, alone: MeshRun, usual: Limits | None = None) -> Limits:
    """Limits for half precision if rounding alone, on one device, comes close to the usual ones: twice that rounding
    error, and at most ten times the usual limits."""
    usual = usual or LIMITS[alone.config.precision]
    no_limits = Limits(math.inf, math.inf, math.inf)  # else the first step beyond one counts, not the worst
    rounding = [finding.figure for finding in compare_runs(reference, alone, no_limits)][:3]
    pairs = zip(dataclasses.astuple(usual), rounding, strict=True)
    return Limits(*(max(limit, min(2 * figure, 10 * limit)) for limit, figure in pairs))


def all_checks(reference: MeshRun, other: MeshRun, limits: Limits | None = None) -> Iterator[Finding]:
    """All checks of one run."""
    if other.fresh:
        yield from same_on_mesh(reference, other)
    yield from compare_runs(reference, other, limits)
    if other.config.precision == "fp16":
        yield loss_scales(other)
    yield from same_on_devices(other)
    item = 0 if other.operands is None else jnp.dtype(other.operands).itemsize
    yield check_collectives(other.config, other.collectives, other.kind, item, other.backend)


@dataclass(frozen=True)
class _Failed:
    """What differs: in which form a configuration runs, with what it was compared, and how far it may be apart."""

    config: Config
    operand_dtype: DTypeLike | None
    reference: MeshRun | None
    limits: Limits | None


def _failed(config: Config, verdict: Verdict) -> _Failed:
    """The most exact of the forms in which checks failed."""
    kinds = {
        "own" if finding.name.startswith(f"{config.precision} ") and config.precision != "fp64"
        else "rounded" if finding.name.startswith(f"{FP8_IN_FP64} ") else "exact"
        for finding in verdict.failed
    }  # fmt: skip
    if "exact" in kinds:
        return _Failed(exact(config), _scaled_only(config), verdict.reference, None)
    if "rounded" in kinds:
        return _Failed(exact(config), E4M3, verdict.rounded, None)
    return _Failed(config, None, verdict.own, verdict.limits)


def _axes_that_differ(
    config: Config, verdict: Verdict, steps: int, quick_compile: bool, on_start: Callable[[str], None]
) -> AxesThatDiffer:
    """Run `config`, which failed, on meshes with axes left out: one device, then each axis alone, then pairs.

    Runs are in fp64 if it failed in fp64, otherwise in its own precision. If numbers differ, communication is ignored.
    """
    failed = _failed(config, verdict)
    wrong, reference, limits = failed.config, failed.reference, failed.limits
    exactly = wrong.precision == "fp64" and failed.operand_dtype != E4M3
    there = [axis for axis, size in config.mesh.sizes.items() if size > 1]
    numbers = any(finding.of_numbers for finding in verdict.failed)
    if reference is None:
        return AxesThatDiffer(((),), one_device(config))
    assert verdict.reference is not None
    states = () if exactly else verdict.reference.states
    options: dict[str, Any] = {"states": states, "quick_compile": quick_compile}
    for number in range(len(there)):
        found = []
        for axes in itertools.combinations(there, number):
            part = with_axes(wrong, axes)
            on_start(f"{shown(part.mesh)}, {part.precision}")
            try:
                forms: dict[str, Any] = {"operand_dtype": failed.operand_dtype, "backend": in_blocks(part)}
                other = run(part, jax.devices(), steps, with_fresh=exactly, **forms, **options)
            except TracingError:
                found.append((axes, part))
                continue
            checked = all_checks(reference, other, limits)
            if any(not each.passed and (each.of_numbers or not numbers) for each in checked):
                found.append((axes, part))
        if found:
            return AxesThatDiffer(tuple(axes for axes, _ in found), found[0][1])
    return AxesThatDiffer((tuple(there),), wrong)


def first_in_words(difference: Difference | None, failed: Sequence[Finding], collectives: Sequence[str] = ()) -> str:
    """The first difference in the order of computation, and a wrong collective: one of `collectives`, or one that
    theory does not have."""
    first = _first(difference, failed)
    theory = [finding.where.split(";")[0] for finding in failed if not finding.of_numbers]
    of_the_first = sorted(collectives, key=lambda name: name.split()[-1] not in first)
    wrong = [*of_the_first, *theory][:1]
    return first if not wrong or wrong[0] in first else f"{first}; the collective that is wrong: {wrong[0]}"


def _first(difference: Difference | None, failed: Sequence[Finding]) -> str:
    """An activation in the forward pass, the sum of the losses, an activation's gradient, a weight's gradient, the
    gradient norm, or the update."""
    of = {finding.name.partition(" ")[2]: finding for finding in failed}

    def in_step_1(name: str, text: str = "step 1") -> bool:
        return name in of and text in of[name].where

    if difference and (not difference.place.backward or not in_step_1("losses")):
        return str(difference)
    if in_step_1("losses"):
        return f"no activation of step 1, forward: the sum of the losses: {of['losses'].where}"
    if in_step_1("gradients"):
        return f"no activation of step 1: a gradient of weights, or its reduction: {of['gradients'].where}"
    if in_step_1("other metrics of the steps", "grad_norm, step 1"):
        return "no activation or gradient of step 1: the norm of the gradients: grad_norm, step 1"
    if UNMOVED in of:
        return f"no activation or gradient of step 1: what the skipped step changes: {of[UNMOVED].where}"
    for name in ("weights after the last step", "gradients", "losses"):
        if name in of:
            return f"no activation or gradient of step 1: the update of the weights: {of[name].where}"
    return f"no activation or gradient of step 1: {failed[0].name}: {failed[0].where}"
