"""Compare a run on a mesh with one on a single device: what was checked, and what differs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megajax.core.models.router import balances_router
from megajax.verify.comparison import (
    HALF,
    LIMITS,
    LOSS_TOLERANCE,
    Leaves,
    Limits,
    distance,
    finite,
    leaf_errors,
    relative,
    scales,
)
from megajax.verify.run import MeshRun

EXACT = "exact"  # the precision of numbers that are never rounded, in a check's name
WEIGHTS = "weights after the last step"  # a check's name
AVERAGE = "moving average, by its definition"  # a check's name
UNMOVED = "state after the skipped step, bit for bit"  # a check's name


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str  # precision and what was compared, such as "fp64 gradients"
    figure: float  # the largest error, or the number of wrong things
    limit: float  # the largest figure that passes
    where: str = ""  # what has the largest error, with details if the check failed
    layers: tuple[int, ...] = ()  # if a leaf of the stacked layers failed, the layers beyond the limit

    @property
    def passed(self) -> bool:
        return self.figure <= self.limit

    @property
    def exact(self) -> bool:
        """Whether values must be equal, which were never rounded."""
        return self.name.startswith(f"{EXACT} ")

    @property
    def of_numbers(self) -> bool:
        """Whether it compares numbers instead of communication."""
        return "communication" not in self.name


@dataclass(frozen=True)
class Verdict:
    """Every check of a configuration on its mesh."""

    findings: tuple[Finding, ...]
    limits: Limits | None = None  # for the configuration's precision, if they are not the usual ones
    reference: MeshRun | None = None  # what it was compared with
    # In fp8 what was compared with one device's results: the values of products in fp64, and the step itself.
    rounded: MeshRun | None = None
    own: MeshRun | None = None

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.passed)


def same_on_mesh(reference: MeshRun, other: MeshRun) -> Iterator[Finding]:
    """Check what must be bitwise equal in any precision: rows of the batch, and fresh weights."""
    size = other.config.train.global_batch
    held = [row for rows in other.rows for row in rows]
    wrong = sum(held.count(row) != 1 for row in range(size)) + sum(not rows for rows in other.rows)
    yield Finding("batch rows per data rank", wrong, 0, f"{len(held)} of {size} rows")
    alike = held == [row for rows in reference.rows for row in rows]
    yield Finding("batch rows in the order of one device", 0 if alike else 1, 0)
    if reference.fresh and other.fresh:
        unequal = [name for name in reference.fresh if not _same(reference.fresh[name], other.fresh.get(name))]
        yield Finding("initial weights, bit for bit", len(unequal), 0, some(unequal))


def same_on_devices(run: MeshRun) -> Iterator[Finding]:
    """Checks of one mesh alone: of replicas, of the moving average by its definition, of how gradients are summed."""
    precision = run.kind
    yield Finding(f"{precision} replicas of the state, bit for bit", len(run.unequal), 0, some(run.unequal))
    if run.average:
        limit = LIMITS["fp64"].weight if run.config.precision == "fp64" else LOSS_TOLERANCE
        name = f"{precision} {AVERAGE}"
        yield _of_leaves(name, run.average, run.state["average"], limit)
    yield Finding(f"{precision} dtype of sums of gradients", len(run.sums), 0, some(run.sums))
    if precision in HALF:
        yield Finding(f"{precision} weights equal the main weights, cast", len(run.uncast), 0, some(run.uncast))


def compare_runs(reference: MeshRun, other: MeshRun, limits: Limits | None = None) -> Iterator[Finding]:
    """Compare losses, gradients, weights and skipped steps of `other`, with the limits for its precision.

    The reference is on one device, in fp64 or in the same precision.
    """
    precision = other.kind
    limits = limits or LIMITS[other.config.precision]
    yield _losses(f"{precision} losses", reference, other, limits.loss)
    yield _gradients(f"{precision} gradients", reference, other, limits.gradient)
    expected, actual = dict(reference.weights), dict(other.weights)
    if other.config.precision in HALF and any(map(_changed_experts, reference.counts, other.counts)):
        for leaves in (expected, actual):
            for name in [name for name in leaves if balances_router(name.split("/"))]:
                leaves.pop(name)  # it steps by the sign of what a load is above the mean
    yield _of_leaves(f"{precision} {WEIGHTS}", expected, actual, limits.weight)
    if other.config.precision == "fp64":
        yield _others(f"{precision} moments and other state", reference, other, limits.weight)
        yield _metrics(f"{precision} other metrics of the steps", reference, other, limits.loss)
        if any(reference.counts):
            yield _counts(f"{precision} expert loads, as integers", reference, other)
    yield _skipped(f"{precision} skipped steps", other)
    moved = [*other.moved, *(f"{name} on one device" for name in reference.moved)]
    yield Finding(f"{precision} {UNMOVED}", len(moved), 0, some(moved))


def loss_scales(run: MeshRun) -> Finding:
    """Compare the loss scale of every step with what the configuration implies. After the overflowing step, which comes
    before the last, it is what it was before."""
    config, scale, good, wrong = run.config.loss_scale, run.config.loss_scale.initial, 0, []
    for step, metrics in enumerate(run.metrics, 1):
        if metrics["loss_scale"] != scale:
            wrong.append(f"step {step}: {metrics['loss_scale']:g} instead of {scale:g}")
        good = 0 if metrics["skipped"] else good + 1 if step < len(run.metrics) else 1
        if metrics["skipped"]:
            scale = max(scale / 2, 1.0)
        elif good >= config.growth_every:
            scale, good = min(scale * 2, 2.0**64), 0
    return Finding(f"{run.config.precision} loss scale", len(wrong), 0, some(wrong))


def _losses(name: str, reference: MeshRun, other: MeshRun, limit: float) -> Finding:
    """The first step beyond the limit, or else the step with the largest error."""
    errors = [relative(b, a) for a, b in zip(reference.losses, other.losses, strict=True)]
    beyond = [step for step, error in enumerate(errors) if not error <= limit]
    step = beyond[0] if beyond else int(np.argmax(errors))
    expected, actual = reference.metrics[step], other.metrics[step]
    losses = (key for key in sorted(expected) if key.startswith("loss/"))
    wrong = [f", {key}" for key in losses if beyond and not relative(actual[key], expected[key]) <= limit]
    return Finding(name, errors[step], limit, f"step {step + 1}{''.join(wrong)}")


def _gradients(name: str, reference: MeshRun, other: MeshRun, limit: float) -> Finding:
    """The leaf with the largest error, in the first step in which any leaf is beyond the limit.

    Where rounding changed the experts of some tokens, the limit of that step grows. Each change takes a token's part
    from one expert's gradient and adds one to another's. If a share s of parts of about the same norm changes, the
    relative error is (2s)^0.5; twice that is allowed, since parts differ, and since some changes do not show in the
    loads.
    """
    steps = []
    for step, grads in enumerate(zip(reference.gradients, other.gradients, strict=True)):
        own = limit
        if other.config.precision in HALF and any(reference.counts):
            changed = _changed_experts(reference.counts[step], other.counts[step])
            own = min(math.hypot(limit, 2 * math.sqrt(2 * changed)), 10 * limit)
        steps.append(_of_leaves(name, *grads, own, f", step {step + 1}"))
    return _first_beyond(steps)


def _changed_experts(expected: Leaves, actual: Leaves) -> float:
    """The share of tokens' experts that differ, as far as the loads show it."""
    changed = sum(np.abs(actual[name].astype(int) - expected[name]).sum() / 2 for name in expected)
    return changed / max(1, sum(load.sum() for load in expected.values()))


def _first_beyond(steps: list[Finding]) -> Finding:
    """The first step beyond the limit, or else the step with the largest error."""
    return next((step for step in steps if not step.passed), max(steps, key=lambda step: step.figure))


def _of_leaves(name: str, expected: Leaves, actual: Leaves, limit: float, suffix: str = "") -> Finding:
    errors = leaf_errors(expected, actual)
    worst = max(errors, key=lambda leaf: errors[leaf])
    if errors[worst] <= limit:
        return Finding(name, errors[worst], limit, worst + suffix)
    layers: tuple[int, ...] = ()
    if worst.startswith("blocks/"):
        scale, pairs = scales(expected)[worst], zip(actual[worst], expected[worst], strict=True)
        layers = tuple(i for i, pair in enumerate(pairs) if finite(distance(*pair) / scale) > limit)
    of = f", layer {', '.join(map(str, layers))}" if layers else ""
    beyond = sum(error > limit for error in errors.values())
    others = f" ({beyond} of {len(expected)} leaves exceed the limit)"
    return Finding(name, errors[worst], limit, f"{worst}{of}{suffix}{others}", layers)


def _metrics(name: str, reference: MeshRun, other: MeshRun, limit: float) -> Finding:
    """The figure with the largest error, in the first step in which any is beyond the limit."""
    steps = []
    for number, (a, b) in enumerate(zip(reference.metrics, other.metrics, strict=True), 1):
        errors = {figure: relative(b[figure], a[figure]) for figure in sorted(a.keys() - {"loss", "loss_scale"})}
        worst = max(errors, key=lambda figure: errors[figure])
        steps.append(Finding(name, errors[worst], limit, f"{worst}, step {number}"))
    return _first_beyond(steps)


def _counts(name: str, reference: MeshRun, other: MeshRun) -> Finding:
    """The number of unequal loads, over all steps."""
    wrong = [
        f"step {number}, layer {layer}, expert {expert}"
        for number, (a, b) in enumerate(zip(reference.counts, other.counts, strict=True), 1)
        for key in a
        for layer, expert in np.argwhere(a[key] != b[key])
    ]
    return Finding(name, len(wrong), 0, some(wrong))


def _others(name: str, reference: MeshRun, other: MeshRun, limit: float) -> Finding:
    """The largest error of the state beside the weights, each part measured by itself, since moments are small."""
    parts = [
        _of_leaves(name, leaves, other.state[part], limit, f" in {part}" if part else "")
        for part, leaves in reference.state.items()
        if part != "params"
    ]
    return max(parts, key=lambda part: part.figure)


def _skipped(name: str, run: MeshRun) -> Finding:
    """Check that the overflowing step is skipped, and no other."""
    wrong = [f"step {number}" for number, metrics in enumerate(run.metrics, 1) if metrics["skipped"]]
    wrong += [] if run.overflow["skipped"] else ["the overflowing step is not"]
    return Finding(name, len(wrong), 0, some(wrong))


def _same(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and a.shape == b.shape and a.tobytes() == b.tobytes()


def some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
