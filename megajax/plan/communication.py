"""What a training step communicates: what a layer and the ends send when they are traced (`plan/traced.py`), times how
often they run, and what is sent of weights and between stages.

`communication` has every collective of `program/train_step.py`, as `program/communication.py` counts them on the step's
jaxpr; beside that how many of them are really sent, since a stage that has nothing to run in a tick, or not this end of
the model, sends nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from megajax.backend import GPU
from megajax.config import Config
from megajax.models.family import family_of
from megajax.parallel.collectives import PIPE
from megajax.pipeline.deferral import Deferring
from megajax.pipeline.schedule import make_schedule
from megajax.plan.costs import Sent, StepCost
from megajax.plan.sizes import Sizes, Times, steady_state_microbatches
from megajax.plan.traced import step_cost
from megajax.plan.weight_traffic import PERMUTE, Communication, WeightTraffic, one
from megajax.program.communication import Collective


def communication(config: Config, cost: StepCost | None = None) -> list[Communication]:
    """All that a training step of a valid configuration communicates, per device, in the order of the program. It is
    the same on every kind of device."""
    step = _Step(config, cost or step_cost(config, GPU))
    before, after = _once(replace(config, train=replace(config.train, microbatch=1, remat="none")))
    return [*before, *step.p2p_transfers(), *step.loop(), *after]


@lru_cache(maxsize=1024)
def _once(config: Config) -> tuple[list[Communication], list[Communication]]:
    """Before and after the loop, which microbatches and recomputation do not change."""
    step = WeightTraffic(config)
    return [*step.targets()], [*step.reduction(), *step.norm(), *step.new_weights()]


def totals(found: Iterable[Collective]) -> Counter:
    """How often an operand of every kind, axes, shape and bytes is communicated: what two lists are compared by."""
    counts: Counter = Counter()
    for each in found:
        for shape in each.shapes:
            counts[each.kind, each.axes, shape, each.num_bytes // len(each.shapes)] += each.count
    return counts


def bytes_by_axis(found: Iterable[Communication], *, sent: bool = False) -> dict[tuple[str, str], tuple[int, int]]:
    """By axes, as `data,pipe`, and kind: how many collectives a step has, and their operands' bytes; all that stand in
    the program, or those that the busiest device really sends."""
    summed: dict[tuple[str, str], tuple[int, int]] = {}
    for each in found:
        key, times = (",".join(each.axes), each.kind), each.sent if sent else each.count
        count, size = summed.get(key, (0, 0))
        summed[key] = count + times, size + times * each.num_bytes
    return summed


def loops_of_weight_gradients(step: Sizes) -> int:
    """In how many places of a tick deferred weight gradients run, before the forward or after the backward."""
    pipeline, pipe = step.config.pipeline, step.config.mesh.pipe
    settled = steady_state_microbatches(pipeline.schedule, pipe, step.microbatches)
    return _loops(pipeline.schedule, pipe, settled, pipeline.chunks, pipeline.deferring())


@lru_cache(maxsize=256)
def _loops(schedule: str, pipe: int, microbatches: int, chunks: int, deferring: Deferring | None) -> int:
    deferral = make_schedule(schedule, pipe, microbatches, chunks, deferring).deferral
    assert deferral is not None
    return int(deferral.early.any()) + int(deferral.late.any())


class _Step(WeightTraffic):
    """The sizes of a step, and what it communicates in its loop over ticks."""

    def __init__(self, config: Config, cost: StepCost):
        super().__init__(config)
        self._layer, self._ends = cost.layer, cost.ends

    def p2p_transfers(self) -> Iterator[Communication]:
        """Activations to the next stage, gradients to the one before, in every tick."""
        if self.config.mesh.pipe > 1:
            for what in ("up", "down"):
                yield one(f"hand-over: {what}", PERMUTE, (PIPE,), self.own, self.item, Times(self.ticks, self.ticks))

    def loop(self) -> Iterator[Communication]:
        """The passes of embedding, layers and head. ZeRO-3 gathers their weights for each, and scatters the gradients;
        an embedding that is not linear in its weights runs forward again in its backward pass, and so may a stage."""
        layer, ends = self._layer, self._ends
        yield from self._pass("embedding", "shared", ends.embedding, self.of_end)
        yield from self._pass("layers forward", "blocks", layer.forward, self.of_layer)
        yield from self._pass("head", "shared", ends.head, self.of_end)
        yield from self.scattered("head", "shared", self.of_end)
        if self.recomputes_stage:
            yield from self._pass("layers backward", "blocks", layer.forward, self.of_layer)
        together = () if self.defers else layer.weight_gradients
        yield from self._pass("layers backward", "blocks", (*layer.backward, *together), self.of_layer)
        yield from self.scattered("layers backward", "blocks", self.of_layer, later=False)
        linear = family_of(self.config.model).linear_embedding(self.config.model)
        again = "none" if linear else "shared"
        yield from self._pass("embedding backward", again, ends.embedding_backward, self.of_end)
        yield from self.scattered("embedding backward", "shared", self.of_end)
        if self.defers and (layer.weight_gradients or self.zero == 3):
            times = Times(loops_of_weight_gradients(self) * self.of_layer.count, self.of_layer.sent)
            yield from self._sent("weight gradients", layer.weight_gradients, times)
            yield from self.scattered("weight gradients", "blocks", times, later=True)

    def _pass(self, part: str, room: str, sent: Iterable[Sent], times: Times) -> Iterator[Communication]:
        yield from self.gathered(part, room, times)
        yield from self._sent(part, sent, times)

    def _sent(self, part: str, sent: Iterable[Sent], times: Times) -> Iterator[Communication]:
        for each in sent:
            found = each.collective(self.microbatch)
            counts = each.count * times.count, part, each.count * times.sent
            yield Communication(found.kind, found.axes, found.shapes, found.num_bytes, *counts)
