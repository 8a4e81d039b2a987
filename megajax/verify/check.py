"""Compare a small configuration on its mesh with a single device: exactly, then compiled."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import jax

from jaxequal.interpreter import UnknownPrimitive
from megajax.core.precision import COMPUTE_DTYPE, E4M3
from megajax.settings.config import Config
from megajax.verify.bits import same_bits
from megajax.verify.comparison import HALF, LIMITS, Limits, limits_of_edges
from megajax.verify.exact import TRACED, check_exactly
from megajax.verify.forms import in_blocks, in_fp64, one_device, plain, steady, with_axes, with_our_optimizer
from megajax.verify.locate import Result
from megajax.verify.run import FP8_IN_FP64, MeshRun, TracingError, run
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
    """Check `config`, which must be small already: exactly (`exact.py`), where differences are located, and if nothing
    differs and it is to be `compiled`, as floats, too. For the other arguments see `check` and `check_exactly`.

    Raises:
        UnknownPrimitive: the step has a primitive that the exact comparison does not know, and is not to be compiled.
    """
    config = steady(config)
    try:
        without = dataclasses.replace(config, bitwise=0)  # nothing is rounded in fields
        exact = check_exactly(without, repeats=repeats, beside=beside, on_start=on_start, on_finding=on_finding)
    except UnknownPrimitive as error:
        if not compiled:
            raise
        on_finding(unknown := Finding(f"{EXACT} comparison, left out", 0, 0, str(error)))
        exact = Result(Verdict((unknown,)))
    if not (exact.passed and compiled):
        return exact
    verdict = check(config, steps=steps, quick_compile=quick_compile, on_start=on_start, on_finding=on_finding)
    if config.bitwise and verdict.passed:
        on_start(f"one device and {shown(config.mesh)}, bit for bit")
        found = same_bits(with_our_optimizer(config), jax.devices())
        on_finding(found)
        verdict = Verdict((*verdict.findings, found))
    first = "".join(f"{finding.name}: {finding.where}" for finding in verdict.failed[:1])
    return Result(Verdict(exact.verdict.findings + verdict.findings), first=first)


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
        steps: number of steps, of which the first is compared; before the last one more overflows.
        quick_compile: do not optimize the CPU's machine code.
        on_start: called with the name of each run before it starts.
        on_finding: called with each finding as soon as it is known.
    """
    config, devices = with_our_optimizer(steady(config)), jax.devices()
    options: dict[str, Any] = {"steps": steps, "quick_compile": quick_compile}
    results: list[Finding] = []

    def tell(checked: Iterable[Finding]) -> None:
        for finding in checked:
            results.append(finding)
            on_finding(finding)

    def traced(what: str, config: Config, **more: Any) -> MeshRun | None:
        on_start(f"{what}, {FP8_IN_FP64 if more.get('operand_dtype') == E4M3 else config.precision}")
        try:
            return run(config, devices, **options, **more)
        except TracingError as error:
            tell([Finding(f"{config.precision} {TRACED}", 1, 0, f"{what}: {error}")])
            return None

    reference = traced("one device", one_device(config))
    if reference is None:
        return Verdict(tuple(results))
    mesh, in_float8, blocks = shown(config.mesh), config.precision == "fp8", in_blocks(config)
    scaled = COMPUTE_DTYPE["fp64"] if in_float8 else None
    other = traced(mesh, in_fp64(config), operand_dtype=scaled, backend=blocks)
    if other:
        tell(same_on_mesh(reference, other))
        tell(all_checks(reference, other))
    actual, rounded, compared, limits = None, None, reference, None
    if in_float8:
        rounded = traced("one device", one_device(config), operand_dtype=E4M3)
        other = traced(mesh, in_fp64(config), operand_dtype=E4M3, backend=blocks)
        tell(all_checks(rounded, other) if rounded and other else [])
        compared = traced("one device", plain(config)) or reference
        limits = limits_of_edges(config.model.num_layers)
    if config.precision != "fp64":
        actual = traced(mesh, config, backend=blocks)
    if actual:
        checked = Verdict(tuple(all_checks(compared, actual, limits)))
        if config.precision in HALF and Verdict(tuple(results)).passed and not checked.passed:
            alone = compared  # in fp8 the number of microbatches rounds nothing otherwise
            if not rounded:
                on_start(f"one device, {config.precision}")
                alone = run(with_axes(config, ()), devices, **options, backend=blocks)
            limits = widened(rounded or reference, alone, limits)
        tell(all_checks(compared, actual, limits))
    return Verdict(tuple(results))


def widened(reference: MeshRun, alone: MeshRun, usual: Limits | None = None) -> Limits:
    """Limits for half precision if rounding alone, on one device, comes close to the usual ones: twice that rounding
    error, and at most ten times the usual limits."""
    usual = usual or LIMITS[alone.config.precision]
    rounding = [finding.figure for finding in compare_runs(reference, alone, usual)][:3]
    pairs = zip(dataclasses.astuple(usual), rounding, strict=True)
    return Limits(*(max(limit, min(2 * figure, 10 * limit)) for limit, figure in pairs))


def all_checks(reference: MeshRun, other: MeshRun, limits: Limits | None = None) -> Iterator[Finding]:
    """All checks of one run."""
    yield from compare_runs(reference, other, limits)
    if other.config.precision == "fp16":
        yield loss_scales(other)
    yield from same_on_devices(other)
