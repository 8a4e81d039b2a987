"""The configuration of a run, as frozen dataclasses.

A value's key, `train.global_batch`, is the flag `--train.global-batch` (`megajax.settings.flags`). Values come from
presets (`megajax.settings.presets`) and are checked by `megajax.settings.validation`.
"""

import functools
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from megajax.axes import AXES, BATCH_AXES, OPTIONAL_AXES, ROW_AXES
from megajax.data.config import DataConfig, TokenizerConfig
from megajax.data.loader import BatchSizes
from megajax.models.config import ModelConfig
from megajax.models.lora_config import LoraConfig
from megajax.optim.config import UNKNOWN, Horizon, LossScaleConfig, OptimizerConfig
from megajax.options import AT_LEAST_ZERO, SEED, SHARE, Range, above, between, options
from megajax.pipeline.config import PipelineConfig
from megajax.tasks.registry import PRETRAINING, TaskConfig
from megajax.traits import IS_PATH, SAMPLES, Small

_AXIS = between(1, 100_000)
MOST_ROWS = 1_000_000  # of a global batch
_ROWS = between(1, MOST_ROWS)
_RAMP, _GROWTH = between(0, MOST_ROWS), Small(jointly=True)
MOST_SIMULATED = 1024  # devices; JAX needs seconds for these, minutes for some thousands
_SIMULATED = between(0, MOST_SIMULATED)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes.

    One field for each line of the table in `megajax/axes.py`.
    """

    data: Annotated[int, "data-parallel replicas, each training on its own rows of the batch", _AXIS] = 1
    expert: Annotated[int, "devices that the experts are sharded over; each also trains on its own rows", _AXIS] = 1
    pipe: Annotated[int, "pipeline stages", _AXIS] = 1
    context: Annotated[int, "devices that each sequence's tokens are sharded over", _AXIS] = 1
    tensor: Annotated[int, "devices that each layer is sharded over", _AXIS] = 1

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis by name."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        """Devices in the mesh, over all processes."""
        return self.size_of(AXES)

    @property
    def row_shards(self) -> int:
        """How many shards the rows of a batch are divided into."""
        return self.size_of(ROW_AXES)

    @property
    def zero_shards(self) -> int:
        """How many shards ZeRO divides a weight into."""
        return self.size_of(BATCH_AXES)

    def size_of(self, axes: Sequence[str]) -> int:
        """The number of devices along several axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

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
class TrainConfig:
    """Training steps and batch."""

    steps: Annotated[int, "step at which training ends; 0: use train.epochs", AT_LEAST_ZERO, Small(fixed=10)] = 0
    epochs: Annotated[
        float,
        "passes over the data, unless train.steps ends training earlier; with several sources, "
        "an epoch has as many samples as all of them together",
        AT_LEAST_ZERO,
        Small(fixed=0.0),
    ] = 0
    global_batch: Annotated[int, "sequences per step, summed over all devices", _ROWS]
    ramp_start: Annotated[
        int, "batch size of the first steps, growing to global_batch; 0: constant batch size", _RAMP, _GROWTH
    ] = 0
    ramp_increment: Annotated[int, "sequences added each time the batch grows", _RAMP, _GROWTH] = 0
    ramp_samples: Annotated[int, "sequences consumed before the batch reaches global_batch", AT_LEAST_ZERO, _GROWTH] = 0
    microbatch: Annotated[int, "sequences per microbatch on each data-parallel rank", _ROWS]
    remat: Annotated[
        Literal["none", "selective", "layer", "stage"],
        "activations to recompute in the backward pass instead of storing; selective: those that are cheap to compute",
    ] = "none"
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
    eval_every: Annotated[int, "steps between validations; 0: never", AT_LEAST_ZERO] = 100
    eval_batches: Annotated[int, "global batches per validation; 0: the whole validation split", AT_LEAST_ZERO] = 20
    log_every: Annotated[int, "steps between log lines when there is no progress bar"] = 10

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch sizes of a run's steps."""
        return BatchSizes.of(self.global_batch, self.ramp_start, self.ramp_increment, self.ramp_samples)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints, and which to keep."""

    every: Annotated[int, "steps between checkpoints; the last step always gets one"] = 100
    minutes: Annotated[float, "also checkpoint after this many minutes; 0: by steps only", AT_LEAST_ZERO] = 0
    keep: Annotated[int, "newest checkpoints to keep; imported weights (step 0) always stay"] = 3
    keep_best: Annotated[int, "checkpoints with the lowest validation losses to keep as well", AT_LEAST_ZERO] = 0
    keep_every: Annotated[
        int, "keep every checkpoint whose step is a multiple of this forever; 0: none", AT_LEAST_ZERO
    ] = 0
    max_failures: Annotated[int, "end the run after this many failed checkpoints in a row"] = 3


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text sampled at the end of training."""

    prompt: Annotated[str, "text to continue"] = ""
    tokens: Annotated[int, "tokens to sample; 0: none", between(0, 1_000_000)] = 64
    temperature: Annotated[float, "0: always pick the most probable token", AT_LEAST_ZERO] = 0.8


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes (not needed under SLURM, Open MPI and Kubernetes, which are detected)."""

    coordinator: Annotated[str, "HOST:PORT of process 0"] = ""
    num_processes: Annotated[int, "processes of the run; 0: not given", between(0, 100_000)] = 0
    process_id: Annotated[
        int,
        "rank of this process, from 0; -1: not given",
        Range(lambda x: -1 <= x < 100_000, "0 to 99999, or -1: not given"),
    ] = -1
    patience: Annotated[
        float,
        "seconds without progress after which the run ends and names the process that hangs; 0: never",
        AT_LEAST_ZERO,
    ] = 300


_MOST_TRACED = 100  # steps in a profile; each takes megabytes
_WARM_UP = 2  # steps skipped after a start if no first step is named


def _is_steps(text: str) -> bool:
    """Whether a text is a valid `profile`."""
    if not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", text):
        return not text
    first, last = [1, *map(int, text.split(":"))][-2:]
    return 1 <= first <= last < first + _MOST_TRACED


def profiled_steps(text: str, finished: int, steps: int) -> tuple[int, int]:
    """The first and last step to profile in a run of `steps` steps that continues after step `finished`."""
    *first, number = map(int, text.split(":"))
    if first:
        return first[0], number
    last = min(finished + _WARM_UP + number, steps)
    return max(finished + 1, last - number + 1), last


@dataclass(frozen=True, kw_only=True)
class Config:
    """The run."""

    seed: Annotated[int, "random seed of weights, dropout, data order and sampling", SEED, SAMPLES] = 0
    seeds: Annotated[
        int,
        "fine-tuning: number of runs with consecutive seeds, each in its own folder",
        between(1, 1000),
        Small(fixed=1),
    ] = 1
    init: Annotated[
        str, "run directory to take initial weights from; empty: random initialization", Small(fixed=""), IS_PATH
    ] = ""
    init_step: Annotated[
        str, "which checkpoint of that run: a step, latest, or best (lowest validation loss)", Small(fixed="latest")
    ] = "latest"
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64", "fp8"],
        "number format of the computation; fp8: bf16 with float8 products in the layers, forward and for input "
        "gradients (docs/float8.md); weights are updated in fp32 or better",
    ] = "fp32"
    run_dir: Annotated[str, "output directory; empty: runs/PRESET", IS_PATH] = ""
    resume: Annotated[
        Literal["auto", "never", "must"],
        "auto: continue from the last checkpoint, if any; never: refuse an existing run; must: "
        "fail without a checkpoint",
    ] = "auto"
    compilation_cache: Annotated[
        str,
        "folder that caches compiled programs between starts; off: no cache; empty: "
        "megajax/compiled in your cache folder",
        IS_PATH,
    ] = ""
    compilation_cache_size: Annotated[
        float, "size limit of that cache in GiB; the least recently used programs are removed", above(0, 1e6)
    ] = 4
    simulate_devices: Annotated[int, "CPU devices to simulate in this process; 0: use the real devices", _SIMULATED] = 0
    sequence_parallel: Annotated[
        bool, "shard activations outside attention and MLP along the sequence, over the tensor axis"
    ] = False
    deterministic: Annotated[bool, "bitwise reproducible on the same mesh; on GPUs this selects slower kernels"] = False
    evaluate: Annotated[
        tuple[str, ...],
        "evaluate during training: lambada=FILE, wikitext103=FILE, or the fine-tuning task's own name for its dev set",
    ] = ()
    evaluate_every: Annotated[int, "steps between those evaluations; the last step always has one"] = 1000
    track: Annotated[
        Literal["none", "wandb", "mlflow"],
        "also record the run in Weights & Biases or MLflow, configured by their own environment "
        "variables (docs/monitoring.md)",
    ] = "none"
    profile: Annotated[
        str,
        "profile steps FIRST:LAST, or N steps soon after the start; empty: off",
        Range(_is_steps, f"FIRST:LAST, both included, or how many, such as 10:13 or 3; at most {_MOST_TRACED} steps"),
    ] = ""
    profile_pipeline: Annotated[bool, "time the pipeline stages instead of training"] = False
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: TrainConfig
    optimizer: OptimizerConfig
    loss_scale: LossScaleConfig = LossScaleConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    task: TaskConfig = TaskConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    distributed: DistributedConfig = DistributedConfig()

    def __post_init__(self) -> None:
        if self.lora.rank:  # frozen weights have no gradients to defer
            object.__setattr__(self, "pipeline", replace(self.pipeline, weight_gradients="together"))

    @property
    def pretrains(self) -> bool:
        """Whether it has no fine-tuning task."""
        return self.task.name == PRETRAINING

    @property
    def splits_vocabulary(self) -> bool:
        """Whether every stage holds a part of the vocabulary, and all stages run embedding and head together."""
        return self.pipeline.vocabulary == "split" and self.mesh.pipe > 1

    def with_decay(self, kept: Horizon = UNKNOWN) -> "Config":
        """The configuration with `optimizer.decay_steps` filled in if it is 0: the one `kept`, else `train.steps` if
        that says when training ends (at least the warm-up); and with a `kept` warm-up in place of a fraction. Schedules
        without either are left unchanged."""
        train, optimizer = self.train, self.optimizer
        if not optimizer.ends_decay and not optimizer.warmup_fraction:
            return self
        end = 0 if train.epochs or not train.steps else max(train.steps, optimizer.warmup_steps)
        optimizer = replace(optimizer, decay_steps=optimizer.decay_steps or kept.decay_steps or end)
        if optimizer.warmup_fraction and kept.warmup_steps:
            optimizer = replace(optimizer, warmup_steps=kept.warmup_steps, warmup_fraction=0.0)
        return replace(self, optimizer=optimizer)


RUN_MARK = "run_config"  # a key in a run's `config.toml` and copies of it; other presets lack it
RUN_HORIZON = "run_horizon"  # a table there: the schedule in steps, which is no value of a preset


def to_toml(config: Config, horizon: Horizon | None = None) -> str:
    """The text of a run's `config.toml`; loading it as a preset gives an equal configuration. `horizon` is what the run
    keeps of its schedule when it is resumed."""
    import tomli_w

    return tomli_w.dumps({RUN_MARK: True} | asdict(config) | ({RUN_HORIZON: horizon._asdict()} if horizon else {}))


def to_values(config: Config) -> dict[str, Any]:
    """The configuration by key, with values as in TOML and JSON: a corpus of several sources is a dict."""
    tables = asdict(config)
    return {key: functools.reduce(operator.getitem, key.split("."), tables) for key in options(Config)}
