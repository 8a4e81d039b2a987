"""The configuration of a run, as frozen dataclasses.

A value's key, `train.global_batch`, is the flag `--train.global-batch` (`megajax.settings.flags`). Values come from
presets (`megajax.settings.presets`) and are checked by `megajax.settings.validation`.
"""

import functools
import operator
import re
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from megajax.core.config import MOST_ROWS, BatchConfig, StepConfig
from megajax.core.optim.config import UNKNOWN, Horizon
from megajax.core.options import AT_LEAST_ZERO, OneOf, Range, above, between, options
from megajax.core.traits import IS_PATH, PER_START, PerStart, ShrinkRule
from megajax.data.config import DataConfig, TokenizerConfig
from megajax.data.samples.loader import BatchSizes
from megajax.data.tasks.registry import PRETRAINING, TaskConfig

TRACKERS: dict[str, Any] = dict.fromkeys(("none", "wandb", "mlflow"))
"""By `track`: for a registered one, the function that makes it from the run directory."""
_RAMP, _GROWTH = between(0, MOST_ROWS), ShrinkRule(jointly=True)
MOST_SIMULATED = 1024  # devices; JAX needs seconds for these, minutes for some thousands
_SIMULATED = between(0, MOST_SIMULATED)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(BatchConfig):
    """Training steps and batch."""

    steps: Annotated[int, "step at which training ends; 0: use train.epochs", AT_LEAST_ZERO, ShrinkRule(fixed=10)] = 0
    epochs: Annotated[
        float,
        "passes over the data, unless train.steps ends training earlier; with several sources, "
        "an epoch has as many samples as all of them together",
        AT_LEAST_ZERO,
        ShrinkRule(fixed=0.0),
    ] = 0
    ramp_start: Annotated[
        int, "batch size of the first steps, growing to --train.global-batch; 0: constant batch size", _RAMP, _GROWTH
    ] = 0
    ramp_increment: Annotated[int, "sequences added each time the batch grows", _RAMP, _GROWTH] = 0
    ramp_samples: Annotated[
        int, "sequences consumed before the batch reaches its full size", AT_LEAST_ZERO, _GROWTH
    ] = 0
    selftest: Annotated[
        bool, "before the first step, check products, sums and exchanges of every device, exactly", PER_START
    ] = False
    recheck: Annotated[
        int,
        "every so many steps, another data-parallel replica repeats what each computes, and gradients must have the "
        "same bits; 0: never",
        AT_LEAST_ZERO,
    ] = 0
    recheck_continue: Annotated[
        bool, "if gradients differ, skip the step and go on; without it, the run ends with exit code 3"
    ] = False
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

    coordinator: Annotated[str, "HOST:PORT of process 0", PER_START] = ""
    num_processes: Annotated[int, "processes of the run; 0: not given", between(0, 100_000), PER_START] = 0
    process_id: Annotated[
        int,
        "rank of this process, from 0; -1: not given",
        Range(lambda x: -1 <= x < 100_000, "0 to 99999, or -1: not given"),
        PER_START,
    ] = -1
    patience: Annotated[
        float,
        "seconds without progress after which the run ends and names the process that hangs; 0: never",
        AT_LEAST_ZERO,
        PER_START,
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
    *first, last_or_count = map(int, text.split(":"))
    if first:
        return first[0], last_or_count
    last = min(finished + _WARM_UP + last_or_count, steps)
    return max(finished + 1, last - last_or_count + 1), last


@dataclass(frozen=True, kw_only=True)
class Config(StepConfig):
    """The run."""

    seeds: Annotated[
        int,
        "fine-tuning: number of runs with consecutive seeds, each in its own folder",
        between(1, 1000),
        ShrinkRule(fixed=1),
    ] = 1
    init: Annotated[
        str, "run directory to take initial weights from; empty: random initialization", ShrinkRule(fixed=""), IS_PATH
    ] = ""
    init_step: Annotated[
        str,
        "which checkpoint of that run: a step, latest, or best (lowest validation loss)",
        ShrinkRule(fixed="latest"),
    ] = "latest"
    run_dir: Annotated[str, "output directory; empty: runs/PRESET", IS_PATH] = ""
    resume: Annotated[
        Literal["auto", "never", "must"],
        "auto: continue from the last checkpoint, if any; never: refuse an existing run; must: "
        "fail without a checkpoint",
        PER_START,
    ] = "auto"
    compilation_cache: Annotated[
        str,
        "folder that caches compiled programs between starts; off: no cache; empty: "
        "megajax/compiled in your cache folder",
        IS_PATH,
        PER_START,
    ] = ""
    compilation_cache_size: Annotated[
        float, "size limit of that cache in GiB; the least recently used programs are removed", above(0, 1e6), PER_START
    ] = 4
    simulate_devices: Annotated[int, "CPU devices to simulate in this process; 0: use the real devices", _SIMULATED] = 0
    plugins: Annotated[
        tuple[str, ...], "Python files or modules that register further names (docs/own.md)", IS_PATH
    ] = ()
    evaluate: Annotated[
        tuple[str, ...],
        "evaluate during training: lambada=FILE, wikitext103=FILE, or the fine-tuning task's own name for its dev set",
    ] = ()
    evaluate_every: Annotated[int, "steps between those evaluations; the last step always has one"] = 1000
    track: Annotated[
        str,
        "also record the run in Weights & Biases or MLflow, configured by their own environment "
        "variables (docs/monitoring.md)",
        OneOf(TRACKERS),
        PerStart(kept=True),
    ] = "none"
    profile: Annotated[
        str,
        "profile steps FIRST:LAST, or N steps soon after the start; empty: off",
        Range(_is_steps, f"FIRST:LAST, both included, or how many, such as 10:13 or 3; at most {_MOST_TRACED} steps"),
        PER_START,
    ] = ""
    train: TrainConfig
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    task: TaskConfig = TaskConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    distributed: DistributedConfig = DistributedConfig()

    @property
    def pretrains(self) -> bool:
        """Whether it has no fine-tuning task."""
        return self.task.name == PRETRAINING

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


def lasting(config: Config) -> Config:
    """The configuration without what belongs to one start, for a run's `config.toml`."""
    for key, option in options(Config).items():
        if (start := option.trait(PerStart)) and not start.kept:
            section, _, name = key.rpartition(".")
            changed: Any = replace(getattr(config, section) if section else config, **{name: option.default})
            config = replace(config, **{section: changed}) if section else changed
    return config


def to_toml(config: Config, horizon: Horizon | None = None) -> str:
    """The text of a run's `config.toml`; loading it as a preset gives an equal configuration. `horizon` is what the run
    keeps of its schedule when it is resumed."""
    import tomli_w

    tables: dict[str, Any] = {RUN_MARK: True}
    for key, value in to_values(config).items():
        section, _, name = key.rpartition(".")
        (tables.setdefault(section, {}) if section else tables)[name] = value
    return tomli_w.dumps(tables | ({RUN_HORIZON: horizon._asdict()} if horizon else {}))


def to_values(config: Config) -> dict[str, Any]:
    """The configuration by key, with values as in TOML and JSON: a corpus of several sources is a dict."""
    tables = asdict(replace(config, own_optimizer=None, own_loss=None))
    return {key: functools.reduce(operator.getitem, key.split("."), tables) for key in options(Config)}
