"""Compare a small configuration on its mesh with a single device exactly: over finite fields, without compiling."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from jaxequal.interpreter import UnknownPrimitive
from jaxequal.numbers import elements
from megajax.core.backend import CPU, Backend
from megajax.core.errors import RunError, UserError
from megajax.host.garbage import rarely_collected
from megajax.plan.communication import communication, total_sent, totals
from megajax.settings.config import Config
from megajax.verify.beside import beside_training
from megajax.verify.fields import ExactStep, Outcome, Values, recorded_step, run_step, unequal, unlike
from megajax.verify.forms import in_blocks, plain
from megajax.verify.locate import Result, axes_that_differ, first_in_words
from megajax.verify.recording import first_difference
from megajax.verify.run import TracingError, traced
from megajax.verify.shrink import shown
from megajax.verify.verdict import EXACT, UNMOVED, WEIGHTS, Finding, Verdict, some

TRACED = "tracing of the step"
AVERAGE = "moving average, by its definition"


@rarely_collected()
def check_exactly(
    config: Config,
    *,
    repeats: int = 1,
    beside: Future[list[Finding]] | None = None,
    on_start: Callable[[str], None] = lambda text: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Result:
    """Compare `config`, which must be small already, with one device, and locate differences.

    Args:
        repeats: comparisons, each with other random numbers.
        beside: the checks of the programs beside training (`beside_training`), if another process runs them.
        on_start, on_finding: see `check.check`.
    """
    results: list[Finding] = []
    for seed in range(repeats):
        on_start(f"{shown(config.mesh)}, {EXACT}" + (f", repeat {seed + 1}" if seed else ""))
        reference = _step("one device", plain(config), CPU, seed)
        for finding in findings(config, reference, seed):
            if seed == 0 or not finding.passed:
                results.append(finding)
                on_finding(finding)
        if not all(finding.passed for finding in results):
            return _located(config, Verdict(tuple(results)), reference, seed, on_start)
    on_start(f"{shown(config.mesh)}, {EXACT}: scores, generation, checkpoints")
    for finding in _awaited(beside) or beside_training(config):
        results.append(finding)
        on_finding(finding)
    verdict = Verdict(tuple(results))
    first = "" if verdict.passed else f"no difference in the step: {verdict.failed[0].name}: {verdict.failed[0].where}"
    return Result(verdict, first=first)


def _awaited(beside: Future[list[Finding]] | None) -> Iterable[Finding]:
    """The checks of another process, or nothing, if there is none or it has died."""
    with contextlib.suppress(BrokenProcessPool):
        return beside.result() if beside else ()
    return ()


def _step(what: str, config: Config, backend: Backend, seed: int, *, branches: bool = True) -> ExactStep | Finding:
    """A step, or that it cannot be traced, or that only some devices reach a collective. A primitive without a rule
    says nothing of the program."""
    try:
        return run_step(config, backend, seed, branches=branches)
    except UnknownPrimitive:
        raise
    except (TracingError, RunError) as error:
        return Finding(f"{EXACT} {TRACED}", 1, 0, f"{what}: {error}")


def findings(config: Config, reference: ExactStep | Finding, seed: int = 0) -> Iterator[Finding]:
    """All checks with the random numbers of a seed."""
    other = reference
    if isinstance(reference, ExactStep):
        other = _step(shown(config.mesh), config, in_blocks(config), seed)
        if isinstance(other, ExactStep):
            yield from compare_exactly(reference, other)
            if other.in_plan:
                yield compare_with_plan(other)
            if config.train.ramp_start:
                yield _first_batch(config, seed)
    if isinstance(other, Finding):
        yield other


def _first_batch(config: Config, seed: int) -> Finding:
    """Whether the gradients of the first batch are equal, if batches grow."""
    train = dataclasses.replace(config.train, global_batch=config.train.ramp_start, ramp_start=0)
    config = dataclasses.replace(config, train=train)
    expected = _step("one device", plain(config), CPU, seed, branches=False)
    actual = _step(shown(config.mesh), config, in_blocks(config), seed, branches=False)
    if isinstance(expected, Finding):
        return expected
    if isinstance(actual, Finding):
        return actual
    return _equal("gradients of the first batch", expected.gradients, actual.gradients)


def _located(
    config: Config, verdict: Verdict, reference: ExactStep | Finding, seed: int, on_start: Callable[[str], None]
) -> Result:
    """Where the step differs; if numbers differ, communication is ignored."""
    numbers = any(finding.compares_numbers for finding in verdict.failed)

    def differs(part: Config) -> bool:
        checked = findings(part, reference, seed)
        return any(not each.passed and (each.compares_numbers or not numbers) for each in checked)

    axes, failed = None, verdict.failed
    try:
        with traced():
            axes = axes_that_differ(config, differs, on_start)
            untraced = [finding for finding in failed if finding.name.endswith(TRACED)]
            if untraced:
                return Result(verdict, axes, f"no step, {untraced[0].where}")
            on_start("the first activation that differs")
            forms = (plain(config), CPU), (axes.config, in_blocks(axes.config))
            expected, actual = (recorded_step(*form, seed) for form in forms)
            difference = first_difference(expected, actual, unlike)
    except (TracingError, UserError, RunError) as error:
        text = f"{failed[0].name}: {failed[0].where}; what differs first was not found: {error}"
        return Result(verdict, axes, text)
    wrong = [name for name, error in actual.collectives.items() if error]
    return Result(verdict, axes, first_in_words(difference, failed, wrong))


def compare_exactly(reference: ExactStep, other: ExactStep) -> Iterator[Finding]:
    """What must be equal, and what a skipped step must not change."""

    def equal(name: str, of: Callable[[ExactStep], Values], where: str = "{}") -> Finding:
        return _equal(name, of(reference), of(other), where)

    yield equal("losses", lambda step: _losses(step.taken, True), "step 1, {}")
    yield equal("gradients", lambda step: step.gradients, "{}, step 1")
    yield equal(WEIGHTS, lambda step: step.taken.state["params"])
    if "average" in other.taken.state:
        moved = (_equal(AVERAGE, each.average, each.state["average"]) for each in (other.taken, other.otherwise))
        yield max(moved, key=lambda finding: finding.figure)
    yield equal("moments and other state", lambda step: _others(step.taken))
    yield equal("other metrics of the steps", lambda step: _losses(step.taken, False), "{}, step 1")
    yield equal("step with its other branches", lambda step: _everything(step.otherwise))
    changed = [*other.skipped, *(f"{name} on one device" for name in reference.skipped)]
    yield Finding(f"{EXACT} {UNMOVED}", len(changed), 0, some(changed))
    yield Finding(f"{EXACT} replicas of all results", len(other.unequal), 0, some(other.unequal))


def compare_with_plan(step: ExactStep) -> Finding:
    """The kinds, axes, shapes and bytes of collectives of which the traced step does not have as many as planned."""
    expected = communication(step.config, backend=step.backend)
    planned, actual = totals(expected), totals(step.collectives)
    wrong = sorted((key for key in planned | actual if planned[key] != actual[key]), key=str)
    text = "; ".join(
        f"{actual[key]} instead of {planned[key]} {key[0]} over {' x '.join(key[1])} of {list(key[2])}, "
        f"an operand of {key[3]} bytes"
        for key in wrong
    )
    sent = f"{planned.total()} collectives, {total_sent(step.config, expected):,} bytes sent by a device"
    return Finding(f"{EXACT} communication against the plan", len(wrong), 0, text or sent)


def _equal(name: str, expected: Values, actual: Values, where: str = "{}") -> Finding:
    """The number of values that are not equal, and the first of them, with its layers."""
    words = {leaf: unequal(expected[leaf], actual[leaf]) for leaf in expected}
    wrong = [leaf for leaf, text in words.items() if text]
    if not wrong:
        return Finding(f"{EXACT} {name}", 0, 0, f"{len(words)} equal")
    first, layers = wrong[0], tuple[int, ...]()
    if "blocks/" in first and expected[first].shape == actual[first].shape:
        values = elements(expected[first]) != elements(actual[first])
        differ = values.any(axis=(0, 1, *range(3, values.ndim)))
        layers = tuple(np.flatnonzero(differ).tolist())
    named = first + (f", layer {', '.join(map(str, layers))}" if layers else "")
    text = f"{where.format(named)}: {words[first]} ({len(wrong)} of {len(words)} differ)"
    return Finding(f"{EXACT} {name}", len(wrong), 0, text, layers)


def _losses(outcome: Outcome, of_losses: bool) -> Values:
    """The losses among metrics, parts before their sum, or the others."""
    names = sorted(outcome.metrics, key=lambda name: (name == "loss", name))
    return {name: outcome.metrics[name] for name in names if (name.split("/")[0] == "loss") == of_losses}


def _others(outcome: Outcome) -> Values:
    parts = {part: leaves for part, leaves in outcome.state.items() if part not in ("params", "average")}
    return {f"{part}/{name}".strip("/"): x for part, leaves in parts.items() for name, x in leaves.items()}


def _everything(outcome: Outcome) -> Values:
    state = {f"{part}/{name}": x for part, leaves in outcome.state.items() for name, x in leaves.items()}
    return outcome.metrics | state
