"""The theory of what a training step communicates: arithmetic on a configuration. Nothing is traced.

`communication` has every collective of `program/train_step.py`, as `program/communication.py` counts them on the step's
jaxpr (tests hold the two against each other); beside that how many of them are really sent, since a stage that has
nothing to run in a tick, or not this end of the model, sends nothing.

Letters: T ticks, m microbatches, n layers of a chunk.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from megajax.config import Config
from megajax.models.family import family_of
from megajax.parallel.collectives import PIPE, TENSOR
from megajax.pipeline.deferral import Deferring
from megajax.pipeline.schedule import make_schedule
from megajax.plan.boundary_traffic import PERMUTE, REDUCE, BoundaryTraffic, Communication, one
from megajax.plan.once import Once
from megajax.plan.sizes import Times, steady_state_microbatches
from megajax.program.communication import Collective


def communication(config: Config) -> list[Communication]:
    """All that a training step of a valid configuration communicates, per device, in the order of the program."""
    loop, once = _Loop(config), Once(config)
    return [
        *once.targets(),
        *loop.p2p_transfers(),
        *loop.embedding(),
        *loop.layers(),
        *loop.head(),
        *loop.layers_backward(),
        *loop.embedding_backward(),
        *loop.weight_gradients(),
        *once.reduction(),
        *once.norm(),
        *once.new_weights(),
    ]


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


@lru_cache(maxsize=256)
def _loops_of_weight_gradients(schedule: str, pipe: int, microbatches: int, chunks: int, deferring: Deferring) -> int:
    """In how many places of a tick deferred weight gradients run, before the forward or after the backward."""
    deferral = make_schedule(schedule, pipe, microbatches, chunks, deferring).deferral
    assert deferral is not None
    return int(deferral.early.any()) + int(deferral.late.any())


class _Loop(BoundaryTraffic):
    """The sizes of a step, and the parts that stand in its loop over ticks."""

    def p2p_transfers(self) -> Iterator[Communication]:
        """Activations to the next stage, gradients to the one before, in every tick."""
        if self.config.mesh.pipe > 1:
            for what in ("up", "down"):
                yield one(f"hand-over: {what}", PERMUTE, (PIPE,), self.own, self.item, Times(self.ticks, self.ticks))

    def embedding(self) -> Iterator[Communication]:
        """Of every microbatch forward."""
        yield from self.gathered("embedding: weights", "shared", self.of_end)
        yield from self.leave("embedding: activations", self.of_end, self.vocabulary)

    def embedding_backward(self) -> Iterator[Communication]:
        """Of every microbatch backward; an embedding that is not linear in its weights runs forward again."""
        what = "embedding backward: activations"
        yield from self.broadcast(what)
        if not family_of(self.config.model).linear_embedding(self.config.model):
            yield from self.gathered("embedding backward: weights", "shared", self.of_end)
            yield from self.leave("embedding backward: forward again", self.of_end, self.vocabulary)
        yield from self.leave_backward(what, self.of_end)
        yield from self.scattered("embedding backward: weights' gradients", "shared", self.of_end)

    def head(self) -> Iterator[Communication]:
        """Of every microbatch, forward and backward."""
        yield from self.broadcast("head: activations")
        yield from self.gathered("head: weights", "shared", self.of_end)
        yield from self._predictions()
        yield from self.scattered("head: weights' gradients", "shared", self.of_end)

    def _predictions(self) -> Iterator[Communication]:
        model, times = self.config.model, self.of_end
        chooses = self.bidirectional
        if not chooses or model.head == "pretraining":
            places = self.rows, self.predicted
            chosen = (*places, model.hidden_size)
            if chooses and self.splits_sequence:
                yield one("head: masked tokens", REDUCE, (TENSOR,), chosen, self.item, times)
            elif not chooses:
                yield from self.enter("head: activations", times)
            yield one("head: numbers of tokens", REDUCE, self.vocabulary, places, self.item, times)
            for _ in range(2):
                yield one("head: numbers of tokens", REDUCE, self.vocabulary, places, self.wide, times)
            if not chooses:
                yield from self.enter_backward("head: activations' gradients", times, self.vocabulary)
            else:
                axes = [(PIPE,)] * self.splits_vocabulary + [(TENSOR,)] if self.splits_sequence else [self.vocabulary]
                for each in axes:
                    yield one("head: activations' gradients", REDUCE, each, chosen, self.item, times)
        if self.splits_sequence and model.head == "span":
            yield one("head: numbers of tokens", REDUCE, (TENSOR,), (*self.whole[:2], 2), self.wide, times)
        elif self.splits_sequence and chooses:  # of the first token: the loss, and how many are right
            yield one("head: losses", REDUCE, (TENSOR,), (), self.wide, times)
            yield one("head: losses", REDUCE, (TENSOR,), (), self.counted, times)

    def layers(self) -> Iterator[Communication]:
        """Of every microbatch forward."""
        yield from self.gathered("layers forward: weights", "blocks", self.of_layer)
        yield from self._layer_forward("layers forward: activations")

    def layers_backward(self) -> Iterator[Communication]:
        """Of every microbatch backward, with what is computed again."""
        config, times, again = self.config, self.of_layer, "layers backward: forward again"
        if self.recomputes_stage:
            yield from self.gathered("layers backward: weights", "blocks", times)
            yield from self._layer_forward(again)
        yield from self.gathered("layers backward: weights", "blocks", times)
        needed = 1 if config.model.layer_order == "post" else 0  # the norm after the MLP needs its result
        if config.train.remat == "layer":
            for _ in range(2):
                yield from self.enter(again, times)
            needed += 1  # that of attention
        elif config.train.remat != "selective":
            needed = 0
        for _ in range(needed):
            yield from self.leave(again, times)
        for _ in range(2):
            yield from self.leave_backward("layers backward: activations", times)
            if self.regathers and not self.defers:
                yield from self.enter("layers backward: inputs of weight gradients", times)
            yield from self.enter_backward("layers backward: activations", times)
        yield from self.scattered("layers backward: weights' gradients", "blocks", times, later=False)

    def weight_gradients(self) -> Iterator[Communication]:
        """Of every microbatch those that are deferred."""
        if not self.defers or not (self.regathers or self.zero == 3):
            return
        pipeline, deferring = self.config.pipeline, self.config.pipeline.deferring()
        assert deferring is not None
        pipe, name = self.config.mesh.pipe, pipeline.schedule
        settled = steady_state_microbatches(name, pipe, self.microbatches)
        table = name, pipe, settled, pipeline.chunks, deferring
        times = Times(_loops_of_weight_gradients(*table) * self.of_layer.count, self.of_layer.sent)
        for _ in range(2 if self.regathers else 0):
            yield from self.enter("weight gradients: inputs", times)
        yield from self.scattered("weight gradients: weights' gradients", "blocks", times, later=True)

    def _layer_forward(self, purpose: str) -> Iterator[Communication]:
        for _ in range(2):
            yield from self.enter(purpose, self.of_layer)
            yield from self.leave(purpose, self.of_layer)
