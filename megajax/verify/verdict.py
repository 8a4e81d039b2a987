"""Compare a run on a mesh with one on a single device: what was checked, and what differs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megajax.core.models.router import balances_router
from megajax.verify.comparison import HALF, LIMITS, Leaves, Limits, distance, finite, leaf_errors, relative, scales
from megajax.verify.run import MeshRun

EXACT = "exact"  # the precision of numbers that are never rounded, in a check's name
WEIGHTS = "weights after one step"  # a check's name
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
    def compares_numbers(self) -> bool:
        """Whether it compares numbers instead of communication."""
        return "communication" not in self.name


@dataclass(frozen=True)
class Verdict:
    """Every check of a configuration on its mesh."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.passed)


def same_on_mesh(reference: MeshRun, other: MeshRun) -> Iterator[Finding]:
    """Check where rows of the batch are."""
    size = other.config.train.global_batch
    held = [row for rows in other.rows for row in rows]
    wrong = sum(held.count(row) != 1 for row in range(size)) + sum(not rows for rows in other.rows)
    yield Finding("batch rows per data rank", wrong, 0, f"{len(held)} of {size} rows")
    alike = held == [row for rows in reference.rows for row in rows]
    yield Finding("batch rows in the order of one device", 0 if alike else 1, 0)


def same_on_devices(run: MeshRun) -> Iterator[Finding]:
    """Checks of one mesh alone: of replicas, of how gradients are summed, of the weights that it computes with."""
    precision = run.kind
    yield Finding(f"{precision} replicas of the state, bit for bit", len(run.unequal), 0, some(run.unequal))
    yield Finding(f"{precision} dtype of sums of gradients", len(run.sums), 0, some(run.sums))
    if precision in HALF:
        yield Finding(f"{precision} weights equal the main weights, cast", len(run.uncast), 0, some(run.uncast))


def compare_runs(reference: MeshRun, other: MeshRun, limits: Limits | None = None) -> Iterator[Finding]:
    """Compare losses, gradients and new weights of the first step of `other`, with the limits for its precision, and
    which steps it skipped.

    The reference is on one device, in fp64 or in the same precision. Where rounding changed the experts of some tokens,
    the limit of gradients grows: each change takes a token's part from one expert's gradient and adds one to another's.
    If a share s of parts of about the same norm changes, the relative error is (2s)^0.5; twice that is allowed, since
    parts differ, and since some changes do not show in the loads.
    """
    precision = other.kind
    limits = limits or LIMITS[other.config.precision]
    changed = _changed_experts(reference.loads, other.loads) if other.config.precision in HALF else 0.0
    gradient = min(math.hypot(limits.gradient, 2 * math.sqrt(2 * changed)), 10 * limits.gradient)
    # A router's bias steps by the sign of what a load is above the mean.
    compared = [name for name in reference.weights if not (changed and balances_router(name.split("/")))]
    expected, actual = ({name: run.weights[name] for name in compared} for run in (reference, other))
    yield _losses(f"{precision} losses", reference, other, limits.loss)
    yield _compare_leaves(f"{precision} gradients", reference.gradients, other.gradients, gradient)
    yield _compare_leaves(f"{precision} {WEIGHTS}", expected, actual, limits.weight)
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
    """The error of the first step's loss, and which parts of it are beyond the limit."""
    expected, actual = reference.metrics[0], other.metrics[0]
    errors = {key: relative(actual[key], expected[key]) for key in sorted(expected) if key.split("/")[0] == "loss"}
    wrong = [key for key, error in errors.items() if not error <= limit]
    return Finding(name, errors["loss"], limit, ", ".join(wrong))


def _changed_experts(expected: Leaves, actual: Leaves) -> float:
    """The share of tokens' experts that differ, as far as the loads show it."""
    changed = sum(np.abs(actual[name].astype(int) - expected[name]).sum() / 2 for name in expected)
    return changed / max(1, sum(load.sum() for load in expected.values()))


def _compare_leaves(name: str, expected: Leaves, actual: Leaves, limit: float) -> Finding:
    errors = leaf_errors(expected, actual)
    worst = max(errors, key=lambda leaf: errors[leaf])
    if errors[worst] <= limit:
        return Finding(name, errors[worst], limit, worst)
    layers: tuple[int, ...] = ()
    if worst.startswith("blocks/"):
        scale, pairs = scales(expected)[worst], zip(actual[worst], expected[worst], strict=True)
        layers = tuple(i for i, pair in enumerate(pairs) if finite(distance(*pair) / scale) > limit)
    which = f", layer {', '.join(map(str, layers))}" if layers else ""
    beyond = sum(error > limit for error in errors.values())
    others = f" ({beyond} of {len(expected)} leaves exceed the limit)"
    return Finding(name, errors[worst], limit, f"{worst}{which}{others}", layers)


def _skipped(name: str, run: MeshRun) -> Finding:
    """Check that the overflowing step is skipped, and no other."""
    wrong = [f"step {number}" for number, metrics in enumerate(run.metrics, 1) if metrics["skipped"]]
    wrong += [] if run.overflow["skipped"] else ["the overflowing step is not"]
    return Finding(name, len(wrong), 0, some(wrong))


def some(names: Sequence[str]) -> str:
    """The first few names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
