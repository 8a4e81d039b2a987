"""Compare a small configuration on its mesh with a single device, and find the axes and the layer that differ."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxequal.interpreter import UnknownPrimitive
from megajax.core.precision import COMPUTE_DTYPE, E4M3
from megajax.settings.config import Config
from megajax.verify.comparison import HALF, LIMITS, Limits, limits_of_edges
from megajax.verify.exact import TRACED, check_exactly
from megajax.verify.forms import in_blocks, in_fp64, one_device, plain, steady, with_axes, with_our_optimizer
from megajax.verify.locate import Result, axes_that_differ, first_in_words
from megajax.verify.recording import first_difference
from megajax.verify.run import FP8_IN_FP64, MeshRun, TracingError, recorded, run
from megajax.verify.shrink import shown
from megajax.verify.verdict import EXACT, Finding, Verdict, compare_runs, loss_scales, same_on_devices, same_on_mesh

STEPS = 3


def verify(
    config: Config,
    *,
    steps: int = STEPS,
    quick_compile: bool = True,
    repeats: int = 1,
    compiled: bool = True,
    beside: Future[list[Finding]] | None = None,
    on_start: Callable[[str], None] = lambda text: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Result:
    """Check `config`, which must be small already, and locate differences: exactly (`exact.py`), and if nothing differs
    and it is to be `compiled`, as floats, too. For the other arguments see `check` and `check_exactly`.

    Raises:
        UnknownPrimitive: the step has a primitive that the exact comparison does not know, and is not to be compiled.
    """
    config = steady(config)
    try:
        exact = check_exactly(config, repeats=repeats, beside=beside, on_start=on_start, on_finding=on_finding)
    except UnknownPrimitive as error:
        if not compiled:
            raise
        on_finding(unknown := Finding(f"{EXACT} comparison, left out", 0, 0, str(error)))
        exact = Result(Verdict((unknown,)))
    if not (exact.passed and compiled):
        return exact
    verdict = check(config, steps=steps, quick_compile=quick_compile, on_start=on_start, on_finding=on_finding)
    verdict = dataclasses.replace(verdict, findings=exact.verdict.findings + verdict.findings)
    return Result(verdict) if verdict.passed else _located(config, verdict, steps, quick_compile, on_start)


def check(
    config: Config,
    *,
    steps: int = STEPS,
    quick_compile: bool = True,
    on_start: Callable[[str], None] = lambda text: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Verdict:
    """Compare `config`, which must be small already, with one device in fp64: first in fp64, then in its own precision.
    AdamW takes the place of an optimizer of the user's.

    For fp8 there are three comparisons: the step in fp64 with its products scaled but not rounded; the step in fp64
    with operands rounded to e4m3, against one device that rounds them too; and the step in fp8, against one device in
    fp8. In fp64 no operand lies within rounding of the edge between two float8 numbers, so a wrong scale shows.

    Args:
        steps: number of steps; before the last one more overflows.
        quick_compile: do not optimize the CPU's machine code.
        on_start: called with the name of each run before it starts.
        on_finding: called with each finding as soon as it is known.
    """
    config, devices = with_our_optimizer(steady(config)), jax.devices()
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
            tell([Finding(f"{config.precision} {TRACED}", 1, 0, f"{what}: {error}")])
            return None

    reference = traced("one device", one_device(config), with_fresh=True, with_states=True)
    if reference is None:
        return Verdict(tuple(found))
    mesh, in_float8, blocks = shown(config.mesh), config.precision == "fp8", in_blocks(config)
    other = traced(mesh, in_fp64(config), with_fresh=True, operand_dtype=_scaled_only(config), backend=blocks)
    tell(all_checks(reference, other) if other else [])
    own, rounded, compared = None, None, reference
    if config.precision != "fp64":
        options["states"] = reference.states
    if in_float8:
        rounded = traced("one device", one_device(config), operand_dtype=E4M3)
        other = traced(mesh, in_fp64(config), operand_dtype=E4M3, backend=blocks)
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
        return _Failed(in_fp64(config), _scaled_only(config), verdict.reference, None)
    if "rounded" in kinds:
        return _Failed(in_fp64(config), E4M3, verdict.rounded, None)
    return _Failed(config, None, verdict.own, verdict.limits)


def _located(
    config: Config, verdict: Verdict, steps: int, quick_compile: bool, on_start: Callable[[str], None]
) -> Result:
    """Where the compiled step of `config` differs, in the most exact of the forms in which checks failed; if numbers
    differ, communication is ignored."""
    devices, failed = jax.devices(), _failed(config, verdict)
    reference, limits, numbers = failed.reference, failed.limits, any(each.of_numbers for each in verdict.failed)
    exactly = failed.config.precision == "fp64" and failed.operand_dtype != E4M3
    assert reference is not None and verdict.reference is not None  # the exact check has traced the step
    states = () if exactly else verdict.reference.states

    def differs(part: Config) -> bool:
        forms: dict[str, Any] = {"operand_dtype": failed.operand_dtype, "backend": in_blocks(part)}
        forms |= {"states": states, "quick_compile": quick_compile, "with_fresh": exactly}
        checked = all_checks(reference, run(part, devices, steps, **forms), limits)
        return any(not each.passed and (each.of_numbers or not numbers) for each in checked)

    axes = axes_that_differ(failed.config, differs, on_start)
    on_start("the first activation that differs")
    expected = recorded(reference.config, devices, quick_compile, reference.operand_dtype)
    actual = recorded(axes.config, devices, quick_compile, failed.operand_dtype, in_blocks(axes.config))
    tolerance = 10 * (LIMITS.get(axes.config.precision) or limits or LIMITS["bf16"]).gradient
    difference = first_difference(expected, actual, tolerance)
    wrong = [name for name, error in actual.collectives.items() if not error <= tolerance]
    return Result(verdict, axes, first_in_words(difference, verdict.failed, wrong))
