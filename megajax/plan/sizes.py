"""The sizes of a training step: plain numbers that its communication and its time are computed from."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megajax.batch import most_masked
from megajax.config import Config
from megajax.models.family import family_of
from megajax.pipeline.placement import Placement
from megajax.pipeline.schedule import SCHEDULES
from megajax.plan.shapes import Placed, held

Shape = tuple[int, ...]
ITEM_SIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number


@dataclass(frozen=True)
class Times:
    """How often a part of the step stands in the program's loops, and how often the busiest stage runs it."""

    count: int
    sent: int


ONCE = Times(1, 1)


@lru_cache(maxsize=4096)
def num_ticks(schedule: str, pipe: int, microbatches: int, chunks: int) -> int:
    """Ticks of a schedule's table, without the table."""
    ticks = SCHEDULES[schedule].ticks(pipe, microbatches, chunks)
    assert ticks.backward is not None
    return 1 + int(max(ticks.forward.max(), ticks.backward.max()))


def steady_state_microbatches(schedule: str, pipe: int, microbatches: int) -> int:
    """A number of microbatches, not more, of which the schedule's table has buffers and inboxes of the same sizes: soon
    1F1B does the same again and again, interleaved where the pipe divides the microbatches."""
    settles = schedule == "1f1b" or (schedule == "interleaved" and microbatches % pipe == 0)
    return min(microbatches, 4 * pipe) if settles else microbatches


class Sizes:
    """The sizes of a step.

    Attributes:
        item, wide, summed: bytes of a number that layers compute with, of main weights, statistics and losses, and of
            the sums of gradients.
        counted: bytes of a count.
        microbatches, rows, tokens: of a step, of a microbatch (texts, of a choice), of a sequence.
        bidirectional: of the family, see `Family`.
        predicted: tokens of a sequence that the head of pretraining predicts.
        whole, own: shape of an activation in a tensor-parallel region, and of what a device has of it between two.
        ticks: of the schedule's table.
        layers_of_chunk: slots of a chunk.
        layers_of_stage: layers of every stage.
        defers: weight gradients are computed later.
        regathers: a product's input is gathered again for its weight's gradient.
        recomputes_stage: a stage runs forward again in its backward.
    """

    def __init__(self, config: Config):
        self.config, model, mesh, pipeline = config, config.model, config.mesh, config.pipeline
        self.splits_sequence, self.splits_vocabulary = config.sequence_parallel, config.splits_vocabulary
        self.zero = config.optimizer.zero
        self.item = ITEM_SIZE[config.precision]
        self.wide = max(4, self.item)
        summed_in = config.optimizer.gradient_dtype
        self.summed = self.wide if summed_in == "fp32" else ITEM_SIZE[summed_in]
        self.counted = 8 if config.precision == "fp64" else 4  # JAX counts in 64 bits where it computes in them
        self.microbatches = max(1, config.train.global_batch // (mesh.row_shards * config.train.microbatch))
        rows = config.train.global_batch // (mesh.row_shards * self.microbatches)
        self.rows = rows * (model.num_classes if model.head == "choice" else 1)
        self.tokens = model.sequence_length
        self.bidirectional = family_of(model).bidirectional
        self.predicted = most_masked(self.tokens) if self.bidirectional else self.tokens
        shared_by = mesh.tensor if self.splits_sequence else 1
        self.whole: Shape = (self.rows, self.tokens, model.hidden_size)
        self.own: Shape = (self.rows, self.tokens // shared_by, model.hidden_size)
        self.ticks = num_ticks(pipeline.schedule, mesh.pipe, self.microbatches, pipeline.chunks)
        self.placement = Placement(model.num_layers, mesh.pipe, pipeline.chunks)
        self.layers_of_chunk = self.placement.layers_per_chunk
        self.layers_of_stage: list[int] = _layers_of_stage(self.placement).tolist()
        self.most_layers = max(self.layers_of_stage)
        self.defers = mesh.pipe > 1 and pipeline.weight_gradients == "deferred"
        self.regathers = self.splits_sequence and config.train.remat != "layer"
        self.recomputes_stage = config.train.remat == "stage" and mesh.pipe > 1

    @cached_property
    def weights(self) -> tuple[Placed, ...]:
        return held(self.config).weights


@lru_cache(maxsize=1024)
def _layers_of_stage(placement: Placement) -> np.ndarray:
    return (placement.layer_index >= 0).sum(axis=(0, 2))
