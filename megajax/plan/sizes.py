"""The sizes of a training step, from which its memory, communication and time are computed; and what a device holds of
each weight of a model. These are plain numbers: no program, no mesh object, no device.

What is known of a weight is the state's own record of it (`core/program/weight.py`).
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from operator import mul
from typing import Any, Self

import jax

from megajax.core.backend import CPU, GPU, Backend
from megajax.core.config import MeshConfig
from megajax.core.mesh import rules_of
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.config import ModelConfig
from megajax.core.models.context_attention import copies, tile_queries
from megajax.core.models.lora import LORA, Adapters, without_adapters
from megajax.core.models.lora_config import LoraConfig
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.shards import NOT_SHARDED
from megajax.core.parallel.tokens import ContextWay
from megajax.core.pipeline.placement import Placement
from megajax.core.pipeline.schedule import SCHEDULES
from megajax.core.precision import OPERAND_DTYPE
from megajax.core.program.overlap import overlaps_gathers, overlaps_reductions, scans_layers, size_of_layers
from megajax.core.program.program import training_way
from megajax.core.program.weight import Joins, Shape, Weight, gathered_late, joins_of, stacks_of, weights_of
from megajax.settings.config import Config

ITEM_SIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # bytes of a number that layers compute with


@dataclass(frozen=True)
class DeviceWeights:
    """What a device holds of every weight of a configuration."""

    weights: tuple[Weight, ...]  # all of them, in the order of the program's trees
    adapters: tuple[Weight, ...]  # LoRA's, in the same order

    @property
    def trained(self) -> tuple[Weight, ...]:
        """The adapters if there are any, otherwise all weights."""
        return self.adapters or self.weights

    def computed_bytes(self, item: int, wide: int) -> int:
        """Bytes of what layers compute with as a step leaves it (`TrainState.params`), given those of a number and of a
        main weight's."""
        return sum(map(mul, (item, wide), self._computed))

    def gathered_bytes(self, item: int, wide: int) -> int:
        """Bytes of those that a step gathers late."""
        return sum(map(mul, (item, wide), self._gathered))

    @cached_property
    def _computed(self) -> tuple[int, int]:
        return _by_dtype((each, each.size(each.kept)) for each in (*self.weights, *self.adapters))

    @cached_property
    def _gathered(self) -> tuple[int, int]:
        return _by_dtype((each, each.size(each.computed)) for each in self.weights if each.late)

    @cached_property
    def size_of_layers(self) -> int:
        """See `overlap.size_of_layers`."""
        return size_of_layers(self.trained)

    @cached_property
    def num_summed(self) -> int:
        """Number of elements whose gradients are accumulated."""
        return sum(each.size(each.computed) for each in self.trained)

    @cached_property
    def num_trained(self) -> int:
        """Number of elements whose main weights, moments and reduced gradients a device holds."""
        return sum(each.size(each.owned) for each in self.trained)

    @cached_property
    def num_trained_of_layers(self) -> int:
        """The same without the ends'."""
        return sum(each.size(each.owned) for each in self.trained if each.stack)


def _by_dtype(sizes: Iterable[tuple[Weight, int]]) -> tuple[int, int]:
    """How many numbers of weights have the compute dtype, and how many that of main weights."""
    pairs = [(size * each.computed_in(1, 0), size * each.computed_in(0, 1)) for each, size in sizes]
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def held(config: Config, *, late: bool = False) -> DeviceWeights:
    """What a device holds of the weights, for a valid configuration's mesh and ZeRO stage, if it gathers those of
    layers `late`."""
    return _held(
        _plain(config.model),
        config.lora,
        config.mesh,
        tuple(stacks_of(config).items()),
        config.splits_vocabulary,
        joins_of(config),
        config.optimizer.zero,
        late,
    )


@lru_cache(maxsize=64)
def _plain(model: ModelConfig) -> ModelConfig:
    """The model with defaults for options that its weights do not depend on."""
    return replace(model, dropout=0.0, scan_layers="auto")


@lru_cache(maxsize=16384)
def _held(
    model: ModelConfig,
    lora: LoraConfig,
    mesh: MeshConfig,
    stacks: tuple[tuple[str, Placement], ...],
    split_vocabulary: bool,
    joins: Joins,
    zero: int,
    late: bool,
) -> DeviceWeights:
    if zero:
        whole = _held(model, lora, mesh, stacks, split_vocabulary, joins, 0, False)
        parts = ([replace(weight, zero_stage=zero) for weight in group] for group in (whole.weights, whole.adapters))
        parts = (gathered_late(group, model) for group in parts) if late else parts
        return DeviceWeights(*map(tuple, parts))
    rules = rules_of(split_vocabulary=split_vocabulary, whole=model.whole_heads(mesh.tensor))
    weights = weights_of(*_model(model, lora), rules, dict(stacks), mesh.on_devices, zero, joins)
    return DeviceWeights(*(tuple(jax.tree.leaves(group)) for group in (without_adapters(weights), weights.get(LORA))))


@lru_cache(maxsize=64)
def _model(model: ModelConfig, lora: LoraConfig) -> tuple[StagedModel, Adapters | None]:
    """A model and its adapters; their weights are the same on every mesh and kind of device."""
    staged = StagedModel(model, RegionBoundary(), CPU)
    return staged, Adapters(lora, model, staged) if lora.rank else None


@dataclass(frozen=True)
class Occurrences:
    """How often a part of the step occurs in the program's loops, and how often the busiest stage really runs it."""

    count: int
    sent: int


ONCE = Occurrences(1, 1)


@lru_cache(maxsize=4096)
def num_ticks(schedule: str, pipe: int, microbatches: int, chunks: int) -> int:
    """Ticks in a schedule's table, computed without the table."""
    ticks = SCHEDULES[schedule].ticks(pipe, microbatches, chunks)
    assert ticks.backward is not None
    return 1 + int(max(ticks.forward.max(), ticks.backward.max()))


def steady_state_microbatches(schedule: str, pipe: int, microbatches: int) -> int:
    """A number of microbatches, at most the given one, for which the schedule's table has buffers and inboxes of the
    same sizes: 1F1B soon repeats itself, and so does interleaved if the pipe divides the microbatches."""
    settles = schedule == "1f1b" or (schedule == "interleaved" and microbatches % pipe == 0)
    return min(microbatches, 4 * pipe) if settles else microbatches


@lru_cache(maxsize=256)
def scores_of_head(model: ModelConfig, backend: Backend, way: ContextWay, context: int) -> tuple[int, int]:
    """How many scores one head has for a sequence on a device of a context group, if attention is computed in blocks of
    queries, and how many of them exist at once (`core/models/context_attention.py`)."""
    length, here = model.sequence_length, model.sequence_length // context
    visible = AttentionMask.of_model(model, length)

    def seen(queries: int, ahead: int = 0) -> int:
        return sum(map(prod, visible.block_sizes(queries, backend.block_of(queries), ahead)))

    if way == "gather":  # two pieces, each with itself, and a tile of it at a time with the other pieces
        piece = here // 2
        tile, own = tile_queries(piece, backend.block_of(piece)) * piece, seen(piece)
        if visible.causal:
            return 2 * own + (2 * context - 1) * piece**2, max(own, tile)
        return here * length, tile
    found = seen(here, visible.before or 0) if way == "window" else seen(length)
    return found, found


class Sizes:
    """The sizes of a step.

    Attributes:
        held: what a device has of the weights.
        digits: dims of a gradient's sum that its weight lacks.
        item, wide, summed: bytes of a number that layers compute with, of main weights, statistics and losses, and of
            the sums of gradients.
        operand_item: bytes of a number of the layers' products' operands; 0: they have the type of all others.
        counted: bytes of a count: JAX counts in 64 bits if it computes in 64 bits.
        microbatches, microbatch: how many a device has in a step, and the rows of one.
        rows, tokens: texts of a microbatch, of a choice several for a row, and tokens of a text.
        way: how attention reaches tokens in a context group.
        attention_heads, attention_kv_heads: query heads, and key heads, that a device's attention computes with.
        whole, own: shape of an activation inside a tensor-parallel region, and of a device's part between regions.
        activation_bytes: of an activation sent between stages.
        overlaps_reductions, gathers_late: see `core/program/overlap.py`.
        pairs_microbatches: whether the collectives of one microbatch overlap with the products of another.
    """

    def __init__(self, config: Config, backend: Backend = GPU):
        model, mesh, self.zero, self._backend = config.model, config.mesh, config.optimizer.zero, backend
        self.splits_sequence, self.splits_vocabulary = config.sequence_parallel, config.splits_vocabulary
        self.item = ITEM_SIZE[config.precision]
        self.wide = max(4, self.item)
        self.operand_item = 1 if config.precision in OPERAND_DTYPE else 0
        self.counted = 8 if config.precision == "fp64" else 4
        summed_in = config.optimizer.gradient_dtype
        self.summed = self.wide if summed_in == "fp32" else ITEM_SIZE[summed_in]
        self.digits: Shape = (2,) if config.bitwise else ()
        if config.bitwise:
            self.summed = 8
        self.microbatches = max(1, config.train.global_batch // (mesh.row_shards * config.train.microbatch))
        self.microbatch = config.train.global_batch // (mesh.row_shards * self.microbatches)
        self.rows = self.microbatch * (model.num_classes if model.head == "choice" else 1)
        self.tokens = model.sequence_length
        self.way = training_way(config)
        divided_by = mesh.context if self.way == "heads" else 1
        kv_heads = max(1, model.num_kv_heads // mesh.tensor)
        self.attention_heads = model.num_heads // mesh.tensor // divided_by
        self.attention_kv_heads = kv_heads * copies(kv_heads, divided_by) // divided_by
        here, shared_by = self.tokens // mesh.context, mesh.tensor if self.splits_sequence else 1
        self.whole: Shape = (self.rows, here, model.hidden_size)
        self.own: Shape = (self.rows, here // shared_by, model.hidden_size)
        self.activation_bytes = prod(self.own) * self.item
        self.defers = mesh.pipe > 1 and config.pipeline.weight_gradients == "deferred"
        self.recomputes_stage = config.train.remat == "stage" and mesh.pipe > 1
        self._configure(config)

    def placed(self, config: Config) -> Self:
        """The sizes with the schedule, the chunks and the placement of layers of `config`, which is like the own one
        otherwise."""
        other = copy(self)
        for name in ("ticks", "backward_runs", "forward_runs"):
            vars(other).pop(name, None)
        other._configure(config)
        return other

    def _configure(self, config: Config) -> None:
        self.config, mesh, backend = config, config.mesh, self._backend
        self.placement = replace(next(iter(stacks_of(config).values())), runs=())
        self.layers_of_chunk = self.placement.layers_per_chunk  # as many as on the fullest stage
        self.held = held(config)
        of_layers, copied = self.held.size_of_layers, self.operand_item > 0
        self.overlaps_reductions = overlaps_reductions(config, backend, of_layers)
        self.gathers_late = overlaps_gathers(config, backend, of_layers, copied=copied)
        self.held = held(config, late=True) if self.gathers_late else self.held
        in_loop = self.microbatches - self.overlaps_reductions - self.gathers_late
        alone = mesh.pipe == 1 and in_loop > 1 and not scans_layers(config, backend)
        self.pairs_microbatches = config.pipeline.paired_microbatches and alone

    def is_copied(self, weight: Weight) -> bool:
        """Whether it has float8 copies."""
        return self.operand_item > 0 and weight.of_product

    @property
    def copied(self) -> list[Weight]:
        """The weights of a layer that have float8 copies."""
        return [weight for weight in self.held.weights if self.is_copied(weight)]

    @property
    def copied_in_step(self) -> list[Weight]:
        """Those whose copies a step makes: not frozen weights."""
        return [] if self.held.adapters else self.copied

    def parts_of_copies(self, weight: Weight) -> Iterator[tuple[Shape, int, bool]]:
        """For the values and the scales of either copy of a weight of a layer: the shape on a device, the bytes of a
        number, and whether ZeRO-3 shards them."""
        shape = weight.layer_shape(weight.computed)

        def side(dims: Sequence[int]) -> tuple[Shape, bool]:
            sharded = weight.computed.along(dims, len(shape)) != NOT_SHARDED
            return tuple(shape[dim] for dim in dims), sharded

        copies: Any = weight.copies(side)
        for each in (copies.forward, copies.backward):
            for (shape_of_part, sharded), item in zip(each, (self.operand_item, 4), strict=True):
                yield shape_of_part, item, sharded

    def bytes_of_copies(self, weight: Weight) -> int:
        """Bytes of both copies of a weight of a layer on a device."""
        return sum(item * prod(shape) for shape, item, _ in self.parts_of_copies(weight))

    @property
    def queries(self) -> int:
        """Queries per head on a device."""
        return self.tokens if self.way in ("none", "heads") else self.tokens // self.config.mesh.context

    def scores_of_head(self, backend: Backend) -> tuple[int, int]:
        """See the function `scores_of_head`."""
        return scores_of_head(self.config.model, backend, self.way, self.config.mesh.context)

    # The following depend on the schedule.

    @cached_property
    def ticks(self) -> int:
        """Ticks in the schedule's table."""
        pipeline = self.config.pipeline
        return num_ticks(pipeline.schedule, self.config.mesh.pipe, self.microbatches, pipeline.chunks)

    @property
    def most_layers(self) -> int:
        """Layers on the fullest stage."""
        return int(self.placement.counts.sum(axis=0).max())

    # In a pipe the first tick, which has a forward of the first chunk alone, may be apart from the loop, and the last
    # one, which has a backward of it. With one microbatch the loop then has no such end.

    @property
    def embedding_runs(self) -> Occurrences:
        """How often the program runs the embedding."""
        first, loop, _ = self._split_ticks
        return Occurrences(first + loop * (not first or self.microbatches > 1), self.microbatches)

    @property
    def head_runs(self) -> Occurrences:
        """How often the program runs the head."""
        return Occurrences(self._split_ticks[1], self.microbatches)

    @property
    def embedding_backward_runs(self) -> Occurrences:
        """How often the program runs the embedding's backward."""
        _, loop, last = self._split_ticks
        return Occurrences(loop * (not last or self.microbatches > 1) + last, self.microbatches)

    @property
    def _split_ticks(self) -> tuple[int, int, int]:
        """How many ticks are before the loop, in it, and after it; with one stage all are alike."""
        piped = self.config.mesh.pipe > 1
        first, last = int(self.gathers_late and piped), int(self.overlaps_reductions and piped)
        return first, self.ticks - first - last, last

    @cached_property
    def forward_runs(self) -> Occurrences:
        """How often the program runs a layer's forward."""
        first, loop, _ = self._split_ticks
        return Occurrences((first + loop) * self.layers_of_chunk, self.microbatches * self.most_layers)

    @cached_property
    def backward_runs(self) -> Occurrences:
        """How often the program runs a layer's backward."""
        _, loop, last = self._split_ticks
        return Occurrences((loop + last) * self.layers_of_chunk, self.microbatches * self.most_layers)
