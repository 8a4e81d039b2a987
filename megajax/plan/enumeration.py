"""What a search tries: every mesh of a number of GPUs, and on each of them every option but the pipeline's schedule."""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from megajax.core.axes import AXES, CONTEXT, EXPERT, TENSOR
from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.plan.communication import group_of
from megajax.settings.config import Config
from megajax.settings.validation import validate_mesh


class SearchLimits(NamedTuple):
    """Of the meshes that are tried."""

    tokens: int  # fewest per device of a context group
    tensor: int  # largest tensor axis


WIDEST = SearchLimits(128, sys.maxsize)


def on_meshes(config: Config, devices: int, fixed: frozenset[str], limits: SearchLimits) -> Iterator[Config]:
    """The configuration on every mesh that the model can have within the limits, which are not for axes that are
    fixed, with every way of context attention."""
    length, ranks = config.model.sequence_length, config.optimizer.zero_ranks if "optimizer.zero_ranks" in fixed else 0
    optimizer = replace(config.optimizer, zero_ranks=ranks)
    most = length if "mesh.context" in fixed else length // limits.tokens
    tensors = [each for each in _divisors(devices) if each <= limits.tensor or "mesh.tensor" in fixed]
    contexts = [each for each in _divisors(devices) if each == 1 or (each <= most and length % (2 * each) == 0)]
    experts = [each for each in _divisors(devices) if (config.model.num_experts or 1) % each == 0]
    for mesh in _meshes(devices, {CONTEXT: contexts, EXPERT: experts, TENSOR: tensors}):
        if any(f"mesh.{axis}" in fixed and getattr(config.mesh, axis) != size for axis, size in mesh.sizes.items()):
            continue
        if config.train.batch_sizes.divisor % mesh.row_shards or (ranks and mesh.data % ranks):
            continue
        vocabulary = config.pipeline.vocabulary if "pipeline.vocabulary" in fixed else "replicated"
        pairs = config.pipeline.paired_microbatches and "pipeline.paired_microbatches" in fixed
        even = replace(config.pipeline, layers="even", vocabulary=vocabulary, paired_microbatches=pairs)
        plain = replace(even, schedule="1f1b", chunks=1)
        base = replace(config, mesh=mesh, pipeline=plain, sequence_parallel=False, optimizer=optimizer)
        try:
            validate_mesh(base, devices)
        except UserError:
            continue
        base = replace(base, pipeline=even, sequence_parallel=config.sequence_parallel)
        yield from (replace(base, model=model) for model in with_ways(config.model, mesh, fixed))


def with_ways(model: ModelConfig, mesh: MeshConfig, fixed: frozenset[str]) -> list[ModelConfig]:
    """The model with every way of context attention that the mesh supports."""
    if mesh.context == 1 or "model.context_attention" in fixed:
        return [model]
    gathers, divides = (replace(model, context_attention=way) for way in ("gather", "heads"))
    return [divides, gathers] if model.num_heads // mesh.tensor % mesh.context == 0 else [gathers]


def _meshes(devices: int, limited: Mapping[str, list[int]]) -> Iterator[MeshConfig]:
    possible = {axis: limited.get(axis) or _divisors(devices) for axis in AXES[1:]}  # the first axis takes the rest
    for sizes in itertools.product(*possible.values()):
        first, rest = divmod(devices, math.prod(sizes))
        if not rest:
            yield MeshConfig(**dict(zip(AXES, (first, *sizes), strict=True)))


@lru_cache(maxsize=1024)
def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _ranks_in_server(mesh: MeshConfig, server: int) -> list[int]:
    """How many data-parallel ranks are in a server of so many GPUs, if others are not and these have something to
    shard."""
    ranks = group_of(("data",), mesh, server)[1]
    others = ranks < mesh.data and mesh.data % ranks == 0
    return [ranks] if others and ranks * mesh.batch_shards > mesh.data else []


def variants(base: Config, fixed: frozenset[str], server: int) -> Iterator[Config]:
    """On one mesh, every microbatch size, recomputation, ZeRO stage over all ranks or those of a server, sequence
    parallelism, deferral and vocabulary, with layers unrolled, except with ZeRO-3, and as a scan; and two microbatches
    an iteration where that hides a collective."""

    def choices(key: str, possible: list[Any]) -> list[Any]:
        return [attrgetter(key)(base)] if key in fixed else possible

    mesh, length, stages = base.mesh, base.model.sequence_length, base.mesh.pipe > 1 and not base.model.num_experts
    rows = base.train.batch_sizes.divisor // mesh.row_shards
    microbatches = [size for size in choices("train.microbatch", _divisors(rows)) if rows % size == 0]
    remats = choices("train.remat", ["none", "selective", "layer", *["stage"] * stages])
    zeros = choices("optimizer.zero", [1, 3] if mesh.batch_shards > 1 else [1])  # 0 is larger and hardly faster
    ranks = choices("optimizer.zero_ranks", [0, *_ranks_in_server(mesh, server)])
    pieces = mesh.tensor * (2 * mesh.context if mesh.context > 1 else 1)
    splits = choices("sequence_parallel", [False, True] if mesh.tensor > 1 and length % pieces == 0 else [False])
    when = choices("pipeline.weight_gradients", ["together", *(["deferred"] if mesh.pipe > 1 else [])])
    scans = choices("model.scan_layers", ["auto", "true"])
    divides = mesh.pipe > 1 and base.model.padded_vocab_size % (mesh.pipe * mesh.tensor) == 0
    tables = choices("pipeline.vocabulary", ["replicated", *["split"] * divides])
    pairs = choices("pipeline.paired_microbatches", [False, *[True] * (mesh.pipe == 1 < mesh.tensor * mesh.expert)])
    models = [replace(base.model, scan_layers=scan) for scan in scans]
    trains = [replace(base.train, microbatch=b, remat=remat) for b, remat in itertools.product(microbatches, remats)]
    optimizers = [
        replace(base.optimizer, zero=zero, zero_ranks=size) for zero in zeros for size in ranks if zero or not size
    ]
    pipelines = [
        replace(base.pipeline, weight_gradients=later, vocabulary=table, paired_microbatches=pair)
        for later, table, pair in itertools.product(when, tables, pairs)
    ]
    for train, optimizer, split, pipeline, model in itertools.product(trains, optimizers, splits, pipelines, models):
        scanned, zero_3 = model.scan_layers == "true", optimizer.zero == 3
        scans_anyway = scanned and zero_3 and len(scans) > 1
        one_by_one = scanned or zero_3 or rows < 2 * train.microbatch
        hides_nothing = pipeline.paired_microbatches and len(pairs) > 1 and one_by_one
        if not ((split and length % pieces) or scans_anyway or hides_nothing):
            yield replace(
                base, model=model, sequence_parallel=split, train=train, optimizer=optimizer, pipeline=pipeline
            )
