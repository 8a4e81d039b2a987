"""The configuration of a training step: all that changes its compiled program, and nothing else.

A run's `Config` (`megajax/settings/config.py`) extends it with data, checkpoint and logging options.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from megajax.core.axes import AXES, BATCH_AXES, OPTIONAL_AXES, REPLICA, ROW_AXES, ZERO_AXES
from megajax.core.models.config import ModelConfig
from megajax.core.models.lora_config import LoraConfig
from megajax.core.optim.config import OWN, LossScaleConfig, OptimizerConfig
from megajax.core.options import SEED, SHARE, OneOf, Range, above, between
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.traits import COMPUTATION, SAMPLES, Named

MODELS_OWN = "cross-entropy"  # or what else the family's losses are
LOSSES: dict[str, Any] = {MODELS_OWN: None, "preferences": None, OWN: None}
"""By `train.loss`: for a registered one, a `Loss` or the function of one (`models/own_loss.py`)."""
METRICS: dict[str, Any] = {}
"""By `train.metrics`: functions of logits and batch."""
_MOST = 100_000
_AXIS, AUTO = between(1, _MOST), 0  # the latter: not known before there are devices (`settings/validation.py`)
MOST_ROWS = 1_000_000  # of a global batch
ROWS = between(1, MOST_ROWS)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes.

    One field for each line of the table in `megajax/core/axes.py`. All but `replica` are options.
    """

    data: Annotated[
        int,
        "data-parallel replicas, each training on its own rows of the batch; auto: as many as the devices allow",
        Range(lambda x: 0 <= x <= _MOST, f"1 to {_MOST}"),
        Named("auto", AUTO),
    ] = 1
    expert: Annotated[int, "devices that the experts are sharded over; each also trains on its own rows", _AXIS] = 1
    pipe: Annotated[int, "pipeline stages", _AXIS] = 1
    context: Annotated[int, "devices that each sequence's tokens are sharded over", _AXIS] = 1
    tensor: Annotated[int, "devices that each layer is sharded over", _AXIS] = 1
    replica: int = 1  # parts of `data`, each of which has all of ZeRO's shards (`--optimizer.zero-ranks`)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis with a flag, by name."""
        return {axis: getattr(self, axis) for axis in AXES}

    @cached_property
    def on_devices(self) -> dict[str, int]:
        """The sizes of the device mesh's axes, which has `replica` only if that divides `data`."""
        outside = {REPLICA: self.replica} if self.replica > 1 else {}
        return outside | self.sizes | {"data": self.data // self.replica}

    @property
    def num_devices(self) -> int:
        """Devices in the mesh, over all processes."""
        return math.prod(self.sizes.values())

    @property
    def row_shards(self) -> int:
        """How many shards the rows of a batch are divided into."""
        return self.size_of(ROW_AXES)

    @property
    def batch_shards(self) -> int:
        """How many devices have different tokens of a batch."""
        return self.size_of(BATCH_AXES)

    @property
    def zero_shards(self) -> int:
        """How many shards ZeRO divides a weight into."""
        return self.size_of(ZERO_AXES)

    def size_of(self, axes: Sequence[str]) -> int:
        """The number of devices along several axes of the device mesh together."""
        return math.prod(self.on_devices.get(axis, 1) for axis in axes)

    def there(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Those of some axes that the device mesh has."""
        return tuple(axis for axis in axes if axis in self.on_devices)

    @property
    def shown(self) -> list[str]:
        """The axes to mention: all except optional ones of size 1."""
        return [axis for axis in AXES if axis not in OPTIONAL_AXES or self.sizes[axis] > 1]

    def flags(self, axes: Sequence[str] = AXES, between: str = " x ") -> str:
        """The sizes of those of the `axes` that are worth mentioning, as flags."""
        return between.join(f"--mesh.{axis} {self.sizes[axis]}" for axis in self.shown if axis in axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.sizes[axis]}" for axis in self.shown)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch, what its backward pass recomputes, and which weights it trains."""

    global_batch: Annotated[int, "sequences per step, summed over all devices", ROWS]
    microbatch: Annotated[int, "sequences per microbatch on each data-parallel rank", ROWS]
    remat: Annotated[
        Literal["none", "selective", "layer", "stage"],
        "activations to recompute in the backward pass instead of storing; selective: those that are cheap to compute",
    ] = "none"
    loss: Annotated[
        str,
        "what to minimize: the model's own loss, or one that --plugins registered; own: one that Python code gave "
        "(docs/own.md)",
        OneOf(LOSSES),
    ] = MODELS_OWN
    dpo_beta: Annotated[
        float, "preferences: how strongly the model is held to the one it began with", above(0, 1e6)
    ] = 0.1
    metrics: Annotated[
        tuple[str, ...], "means to report besides the loss, of those that --plugins registered", OneOf(METRICS)
    ] = ()
    ema: Annotated[
        float,
        "decay of an exponential moving average of the weights, updated every step and used for "
        "validation, evaluation, generation and export; 0: none",
        SHARE,
    ] = 0.0
    freeze: Annotated[
        tuple[str, ...],
        "weights not to train: embedding, head, layers.0-3, layers.0-3.attention, ..., separated by commas or spaces; "
        "none: train all",
    ] = ()


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How documents are packed in sequences, as far as a step computes with it."""

    reset_attention: Annotated[
        bool, "restart attention and positions at every document, even when several share a sequence"
    ] = False


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """A training step."""

    seed: Annotated[int, "random seed of weights, dropout, data order and sampling", SEED, SAMPLES] = 0
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64", "fp8"],
        "number format of the computation; fp8: bf16 with float8 products in the layers, forward and for input "
        "gradients (docs/float8.md); weights are updated in fp32 or better",
    ] = "fp32"
    sequence_parallel: Annotated[
        bool, "shard activations outside attention and MLP along the sequence, over the tensor axis"
    ] = False
    bitwise: Annotated[
        int,
        "the same bits on every mesh (docs/bitwise.md): 1, on any --mesh.data and --mesh.pipe; 2, 4, 8, ...: also "
        "on any --mesh.tensor that divides it; 0: off",
        Range(lambda parts: 0 <= parts <= 1024 and parts & (parts - 1) == 0, "0, or a power of two up to 1024"),
        COMPUTATION,
    ] = 0
    deterministic: Annotated[bool, "bitwise reproducible on the same mesh; on GPUs this selects slower kernels"] = False
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: BatchConfig
    optimizer: OptimizerConfig
    loss_scale: LossScaleConfig = LossScaleConfig()
    data: PackingConfig = PackingConfig()
    # What Python code gives in place of an option; in no file and no flag.
    own_optimizer: Any = None  # an `OwnOptimizer` (`optim/own.py`)
    own_loss: Any = None  # a `Loss` (`models/own_loss.py`)

    def __post_init__(self) -> None:
        if self.lora.rank:  # frozen weights have no gradients to defer
            object.__setattr__(self, "pipeline", replace(self.pipeline, weight_gradients="together"))
        if self.bitwise:  # one row at a time, on any mesh, by kernels that always add in the same order
            object.__setattr__(self, "deterministic", True)
            object.__setattr__(self, "train", replace(self.train, microbatch=1))
        replicas = self.optimizer.replicas(self.mesh.data)
        if replicas != self.mesh.replica:
            object.__setattr__(self, "mesh", replace(self.mesh, replica=replicas))

    @property
    def splits_vocabulary(self) -> bool:
        """Whether every stage holds a part of the vocabulary, and all stages run embedding and head together."""
        return self.pipeline.vocabulary == "split" and self.mesh.pipe > 1
