"""The sizes of a training step: plain numbers that its memory, its communication and its time are computed from."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from megajax.backend import Backend
from megajax.config import Config
from megajax.models.attention_mask import AttentionMask
from megajax.models.config import ModelConfig
from megajax.models.family import family_of
from megajax.pipeline.placement import Placement
from megajax.pipeline.schedule import SCHEDULES
from megajax.plan.shapes import Shape, held

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


@lru_cache(maxsize=64)
def scores_of_head(model: ModelConfig, backend: Backend) -> int:
    """How many scores a head has of a sequence, where attention is computed in blocks of queries."""
    length = model.sequence_length
    visible = AttentionMask(causal=not family_of(model).bidirectional, window=model.window_in(length))
    block = backend.block_of(length)
    ends = [(start, min(start + block, length)) for start in range(0, length, block)]
    ranges = [(end - start, visible.key_range(start, end, length)) for start, end in ends]
    return sum(queries * (last - first) for queries, (first, last) in ranges)


class Sizes:
    """The sizes of a step.

    Attributes:
        held: what a device has of the weights.
        item, wide, summed: bytes of a number that layers compute with, of main weights, statistics and losses, and of
            the sums of gradients.
        microbatches, microbatch: how many a device has in a step, and the rows of one.
        rows, tokens: texts of a microbatch, of a choice several for a row, and tokens of a text.
        bidirectional: of the family, see `Family`.
        whole, own: shape of an activation in a tensor-parallel region, and of what a device has of it between two.
        activation_bytes: of what stages hand over.
        defers: weight gradients are computed later.
        recomputes_stage: a stage runs forward again in its backward.
    """

    def __init__(self, config: Config):
        self.config, model, mesh = config, config.model, config.mesh
        self.held, self.zero = held(config), config.optimizer.zero
        self.splits_sequence, self.splits_vocabulary = config.sequence_parallel, config.splits_vocabulary
        self.item = ITEM_SIZE[config.precision]
        self.wide = max(4, self.item)
        summed_in = config.optimizer.gradient_dtype
        self.summed = self.wide if summed_in == "fp32" else ITEM_SIZE[summed_in]
        self.microbatches = max(1, config.train.global_batch // (mesh.row_shards * config.train.microbatch))
        self.microbatch = config.train.global_batch // (mesh.row_shards * self.microbatches)
        self.rows = self.microbatch * (model.num_classes if model.head == "choice" else 1)
        self.tokens = model.sequence_length
        self.bidirectional = family_of(model).bidirectional
        shared_by = mesh.tensor if self.splits_sequence else 1
        self.whole: Shape = (self.rows, self.tokens, model.hidden_size)
        self.own: Shape = (self.rows, self.tokens // shared_by, model.hidden_size)
        self.activation_bytes = prod(self.own) * self.item
        self.defers = mesh.pipe > 1 and config.pipeline.weight_gradients == "deferred"
        self.recomputes_stage = config.train.remat == "stage" and mesh.pipe > 1
        self.placement = Placement(model.num_layers, mesh.pipe, config.pipeline.chunks)
        self.layers_of_chunk = self.placement.layers_per_chunk  # as many as the fullest one has

    # What the schedule changes.

    @cached_property
    def ticks(self) -> int:
        """Ticks of the schedule's table."""
        pipeline = self.config.pipeline
        return num_ticks(pipeline.schedule, self.config.mesh.pipe, self.microbatches, pipeline.chunks)

    @property
    def most_layers(self) -> int:
        """Layers of the fullest stage."""
        return int(layers_of_chunks(self.placement).sum(axis=0).max())

    @property
    def of_end(self) -> Times:
        """How often the loop over ticks has an end of the model."""
        return Times(self.ticks, self.microbatches)

    @cached_property
    def of_layer(self) -> Times:
        """How often the loop over ticks has a layer."""
        return Times(self.ticks * self.layers_of_chunk, self.microbatches * self.most_layers)


@lru_cache(maxsize=1024)
def layers_of_chunks(placement: Placement) -> np.ndarray:
    """How many layers every chunk of every stage has, [chunks, stages]."""
    return (placement.layer_index >= 0).sum(axis=2)
