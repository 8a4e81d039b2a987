"""How long a schedule takes and how much it buffers, from its table alone. No JAX here.

Stages run independently: after a tick's forward a stage waits for its upstream neighbour to send, after the backward
for its downstream neighbour. Times are in the caller's unit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.table import Pass, Schedule, most_kept


@dataclass(frozen=True)
class StageTimes:
    """Times of the parts of a step: of one microbatch through one chunk, as arrays [chunks, stages], and of the ends
    that all stages compute together once the slowest stage is ready."""

    forward: np.ndarray
    backward: np.ndarray  # without deferred weight gradients
    weight_gradient: np.ndarray | float = 0.0  # deferred ones
    embed: float = 0.0
    head: float = 0.0
    embed_backward: float = 0.0
    p2p_transfer: float = 0.0  # sending to one neighbour while receiving from the other

    @classmethod
    def equal(cls, schedule: Schedule, times: PassTimes | None = None) -> "StageTimes":
        """Equal stages; `times` are those of all chunks of a stage together, 1 each by default."""
        times = times or PassTimes()
        ones = np.ones((schedule.num_chunks, schedule.num_stages)) / schedule.num_chunks
        if schedule.deferral is None:
            return cls(times.forward * ones, (times.input_gradient + times.weight_gradient) * ones)
        return cls(times.forward * ones, times.input_gradient * ones, times.weight_gradient * ones)

    def busy(self, schedule: Schedule) -> np.ndarray:
        """How long each stage computes in a step, [stages]."""
        work = self.forward.sum(0) + self.embed
        if schedule.backward.active.any():
            work = work + (self.backward + self.weight_gradient).sum(0) + self.head + self.embed_backward
        return schedule.num_microbatches * work


@dataclass(frozen=True)
class Span:
    """One pass in a timeline; `part` is 0 for a forward, 1 for a backward, 2 for a deferred weight gradient."""

    tick: int
    stage: int
    microbatch: int
    chunk: int
    part: int
    start: float
    end: float


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, and how long its busiest stage works."""

    wall: float
    busy: float

    @property
    def idle(self) -> float:
        return self.wall - self.busy

    @property
    def bubble(self) -> float:
        """Idle time divided by ideal time, which is the busiest stage's work without a pause."""
        return self.idle / self.busy


def step_time(schedule: Schedule, times: StageTimes | None = None) -> StepTime:
    """The time that follows from the table; by default the forward and both halves of the backward take 1 each."""
    times = times or StageTimes.equal(schedule)
    return StepTime(wall_time(schedule, times), float(times.busy(schedule).max()))


def wall_time(schedule: Schedule, times: StageTimes) -> float:
    """Time from the first forward to the end of the last work on any stage."""
    return timeline(schedule, times)[0]


def in_flight(schedule: Schedule) -> list[int]:
    """The most chunks per stage between their forward and the end of their backward."""
    return most_kept(schedule.forward.active, 0, schedule.backward.active).tolist()


def pending_weights(schedule: Schedule) -> list[int]:
    """The most chunks per stage whose weight gradients are pending at the end of a tick."""
    deferral = schedule.deferral
    if deferral is None:
        return [0] * schedule.num_stages
    return most_kept(schedule.backward.active, deferral.early + deferral.late, 0).tolist()


def kept_entries(schedule: Schedule) -> list[int]:
    """The most chunks per stage with residuals, or with factors of pending weight gradients; equals `in_flight` if
    weight gradients are not deferred."""
    if schedule.deferral is None:
        return in_flight(schedule)
    return most_kept(schedule.forward.active, schedule.deferral.early, schedule.deferral.late).tolist()


def timeline(schedule: Schedule, times: StageTimes) -> tuple[float, list[Span]]:
    """`wall_time`, and all passes with their start and end times."""
    p, ring = schedule.num_stages, schedule.num_chunks > 1
    now = np.zeros(p)
    spans: list[Span] = []
    costs = times.forward, times.backward, np.broadcast_to(times.weight_gradient, times.backward.shape)

    def work(tick: int, part: int, ran: Iterable[list[tuple[int, int]]]) -> None:
        for s, pairs in enumerate(ran):
            for microbatch, chunk in pairs:
                cost = costs[part][chunk, s]
                spans.append(Span(tick, s, microbatch, chunk, part, float(now[s]), float(now[s] + cost)))
                now[s] += cost

    def together(cost: float) -> None:
        if cost:
            now[:] = now.max() + cost

    def receive(shift: int) -> None:
        sent = np.roll(now, shift)
        if not ring:
            sent[0 if shift > 0 else -1] = 0.0
        np.maximum(now, sent, out=now)
        now[:] += times.p2p_transfer

    def on_any_stage(table: Pass, k: int) -> list[bool]:
        return schedule.at_virtual(table, k).max(axis=1).tolist()

    embeds, embeds_backward = on_any_stage(schedule.forward, 0), on_any_stage(schedule.backward, 0)
    heads = on_any_stage(schedule.backward, schedule.num_virtual - 1)
    for tick, row in enumerate(schedule.cells()):
        early, forward, backward, late = zip(*row, strict=True)
        work(tick, 2, early)
        together(times.embed * embeds[tick])
        work(tick, 0, forward)
        receive(+1)
        together(times.head * heads[tick])
        work(tick, 1, backward)
        together(times.embed_backward * embeds_backward[tick])
        work(tick, 2, late)
        receive(-1)
    return float(now.max()), spans
