"""The forms in which `megajax verify` runs a configuration."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megajax.core.axes import PIPE, TENSOR
from megajax.core.backend import CPU, Backend
from megajax.core.config import MeshConfig
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.program.program import training_way
from megajax.plan.machines import Machine
from megajax.plan.memory import backend_of
from megajax.plan.placing import placed
from megajax.plan.sizes import ITEM_SIZE, Sizes
from megajax.settings.config import Config

_LEARNING_RATE, _EPSILON = 1e-3, 1e-4  # at most, at least


def steady(config: Config) -> Config:
    """The same with an Adam that does not amplify rounding: with a small epsilon, a gradient that is only rounding (the
    bias of the keys has one) would cause a full-size update."""
    original = config.optimizer
    rate, epsilon = min(original.learning_rate, _LEARNING_RATE), max(original.epsilon, _EPSILON)
    lowest = min(original.min_learning_rate, rate)
    optimizer = dataclasses.replace(original, learning_rate=rate, min_learning_rate=lowest, epsilon=epsilon)
    return dataclasses.replace(config, optimizer=optimizer)


def with_our_optimizer(config: Config) -> Config:
    """The same with AdamW in place of an optimizer of the user's: many amplify rounding, as Lion does, which updates by
    a gradient's sign alone. Without rounding they are compared themselves."""
    if config.optimizer.name in ("adamw", "muon"):
        return config
    optimizer = dataclasses.replace(config.optimizer, name="adamw")
    return dataclasses.replace(config, optimizer=optimizer, own_optimizer=None)


def in_fp64(config: Config) -> Config:
    """The same in fp64."""
    optimizer = dataclasses.replace(config.optimizer, gradient_dtype="fp32")  # of fp64: fp64
    return dataclasses.replace(config, precision="fp64", bitwise=0, optimizer=optimizer)


def one_device(config: Config) -> Config:
    """`plain`, in fp64."""
    return in_fp64(plain(config))


def plain(config: Config) -> Config:
    """The plainest form on one device: the batch in one piece, no recomputation, nothing sharded."""
    return dataclasses.replace(
        config,
        bitwise=0,
        mesh=MeshConfig(),
        pipeline=PipelineConfig(),
        sequence_parallel=False,
        train=dataclasses.replace(config.train, microbatch=config.train.global_batch, remat="none"),
        optimizer=dataclasses.replace(config.optimizer, zero=0, zero_ranks=0),
    )


def on_gpu(config: Config, machine: Machine) -> tuple[Config, str]:
    """A valid configuration with what `auto` is on a GPU in place of it, as far as this depends on the size of the
    model; and what that is, in words."""
    config, optimizer = placed(config, machine), config.optimizer
    sizes = Sizes(config, backend=backend_of(machine))
    decided = {"overlap_reductions": sizes.overlaps_reductions, "overlap_gathers": sizes.gathers_late}
    chosen: dict[str, Any] = {n: str(value).lower() for n, value in decided.items() if getattr(optimizer, n) == "auto"}
    said = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, **chosen)), said


def in_blocks(config: Config) -> Backend:
    """The forms of a CPU, but for weight gradients, whose products transpose their input as on a GPU, and with at least
    two of whatever large sizes divide: blocks of queries, heads one after the other, blocks of an expert's rows, two at
    once as on a GPU. So small a model has one of each otherwise."""
    model = config.model
    pieces = {"gather": 2 * config.mesh.context, "window": config.mesh.context}.get(training_way(config), 1)
    queries = -(-model.sequence_length // (2 * pieces))
    of_expert = model.hidden_size * model.expert_size // config.mesh.tensor * ITEM_SIZE[config.precision]
    forms = dataclasses.replace(CPU, query_block=queries, scores_bytes=1, transposed_copies=False)
    return dataclasses.replace(forms, expert_block=4, expert_bytes=2 * of_expert)


def with_axes(config: Config, axes: Sequence[str]) -> Config:
    """`config` on a mesh with only these axes, with the same number of microbatches."""
    mesh = MeshConfig(**{axis: size for axis, size in config.mesh.sizes.items() if axis in axes})
    train = config.train
    microbatches = train.global_batch // (config.mesh.row_shards * train.microbatch)
    microbatch = train.global_batch // (mesh.row_shards * microbatches)
    return dataclasses.replace(
        config,
        mesh=mesh,
        pipeline=config.pipeline if PIPE in axes else PipelineConfig(),
        sequence_parallel=config.sequence_parallel and TENSOR in axes,
        train=dataclasses.replace(train, microbatch=microbatch),
    )
