"""The configuration of a run: frozen dataclasses, TOML presets, cross-checks.

A value's key, `train.global_batch`, is the flag `--train.global-batch` (`megajax.flags`).
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from megajax.errors import UserError
from megajax.models.config import ModelConfig
from megajax.options import options, sections, suggest
from megajax.presets import find_preset, read_toml


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the three mesh axes."""

    data: Annotated[int, "groups of devices that train on different rows of the batch"] = 1
    pipe: Annotated[int, "stages that the layers are divided into"] = 1
    tensor: Annotated[int, "devices that each layer is split over"] = 1

    @property
    def num_devices(self) -> int:
        """Devices in the mesh, over all processes."""
        return self.data * self.pipe * self.tensor


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How microbatches move through the stages."""

    schedule: Annotated[Literal["gpipe", "1f1b"], "order of the forwards and backwards"] = "1f1b"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and batch of the training run."""

    steps: Annotated[int, "step at which training ends"]
    global_batch: Annotated[int, "sequences per step, over all devices"]
    microbatch: Annotated[int, "sequences per device and microbatch"]
    remat: Annotated[Literal["none", "layer"], "what the backward pass recomputes instead of keeping it in memory"] = (
        "none"
    )
    eval_every: Annotated[int, "steps between two validations"] = 100
    eval_batches: Annotated[int, "global batches per validation; 0: the whole split"] = 0
    log_every: Annotated[int, "steps between two printed lines where there is no progress bar"] = 10


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule: linear warm-up, then one cosine to the floor."""

    learning_rate: Annotated[float, "peak, reached at the end of the warm-up"]
    decay_steps: Annotated[int, "step at which the cosine reaches the floor, warm-up included"]
    warmup_steps: Annotated[int, "steps of linear warm-up from 0"] = 0
    min_learning_rate: Annotated[float, "floor, kept after the decay"] = 0.0
    beta1: Annotated[float, "decay of the mean of the gradients"] = 0.9
    beta2: Annotated[float, "decay of the mean of their squares"] = 0.999
    epsilon: Annotated[float, "added to the denominator"] = 1e-8
    weight_decay: Annotated[float, "decoupled; not on LayerNorm and biases"] = 0.01
    clip_norm: Annotated[float, "largest global norm of the gradients"] = 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus."""

    path: Annotated[str, "text, JSONL, a folder, a prepared prefix, or the word python-stdlib"] = ""
    validation_fraction: Annotated[float, "share of the tokens kept for validation, in whole documents"] = 0.03


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    path: Annotated[str, "folder with vocab.json and merges.txt; empty: trained on the corpus"] = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, and how many stay."""

    every: Annotated[int, "steps between two checkpoints; the last step always has one"] = 100
    keep: Annotated[int, "newest checkpoints to keep"] = 3


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The continuation that is printed at the end of training."""

    prompt: Annotated[str, "text to continue"] = ""
    tokens: Annotated[int, "tokens to sample; 0: none"] = 64
    temperature: Annotated[float, "0: always the most probable token"] = 0.8


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes; found by itself under SLURM, Open MPI and Kubernetes."""

    coordinator: Annotated[str, "HOST:PORT of process 0"] = ""
    num_processes: Annotated[int, "processes of the run; 0: not given"] = 0
    process_id: Annotated[int, "number of this process, from 0; -1: not given"] = -1


@dataclass(frozen=True, kw_only=True)
class Config:
    """The run as a whole."""

    seed: Annotated[int, "of weights, dropout, data order and sampling"] = 0
    precision: Annotated[
        Literal["fp32", "bf16", "fp64"], "of the computation; weights are updated in fp32 or better"
    ] = "fp32"
    run_dir: Annotated[str, "where everything is written; empty: runs/PRESET"] = ""
    resume: Annotated[
        Literal["auto", "never", "must"],
        "continue from the last checkpoint: if there is one, never, or fail without one",
    ] = "auto"
    simulate_devices: Annotated[int, "CPU devices to simulate in this process; 0: use the real devices"] = 0
    model: ModelConfig
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: TrainConfig
    optimizer: OptimizerConfig
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    distributed: DistributedConfig = DistributedConfig()


def load_preset(name_or_file: str | Path) -> dict[str, Any]:
    """Read a preset: a bare name from configs/, or a TOML file. Returns values by key, `run_dir` always among them.

    Raises `UserError` naming the file: malformed TOML, an unknown key, a value of the wrong type.
    """
    path = find_preset(name_or_file)
    tables = read_toml(path)
    values = {}
    for name, entry in tables.items():
        if isinstance(entry, dict) and name in sections(Config):
            values.update({f"{name}.{key}": value for key, value in entry.items()})
        elif isinstance(entry, dict) or name in sections(Config):
            known = ", ".join(f"[{section}]" for section in sections(Config))
            raise UserError(f"{path}: {name} = {reprlib.repr(entry)}; valid tables: {known}")
        else:
            values[name] = entry
    values = {key: _convert(key, value, f"{path}: {key}") for key, value in values.items()}
    return values | {"run_dir": values.get("run_dir") or f"runs/{path.stem}"}


def _convert(key: str, value: object, name: str) -> Any:
    """`value` as the type of `key`. `name` is what error messages call it: with its file, or as a flag."""
    table = options(Config)
    if key not in table:
        section = key.rpartition(".")[0]
        valid = ", ".join(known for known in table if known.rpartition(".")[0] == section)
        raise UserError(f"{name}: unknown key; {suggest(key, table, f'valid: {valid}')}")
    try:
        return table[key].convert(value)
    except ValueError:
        raise UserError(f"{name} = {reprlib.repr(value)}; valid: {table[key].valid}") from None


def resolve(preset: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of values by key, such as `{"mesh.data": 2}`; overrides replace what the preset says.

    Raises `UserError` for an unknown key, a wrong type, a value out of range, and a value that is given nowhere.
    """
    overrides = {key: _convert(key, value, "--" + key.replace("_", "-")) for key, value in (overrides or {}).items()}
    values = {key: _convert(key, value, key) for key, value in preset.items()} | overrides
    for option in options(Config).values():
        if option.default is MISSING and option.key not in values:
            raise UserError(f"the preset lacks {option.key} ({option.help}): add it, or pass {option.flag}")
    parts: dict[str, Any] = {"": {}} | {name: {} for name in sections(Config)}
    for key, value in values.items():
        section, _, field = key.rpartition(".")
        parts[section][field] = value
    config = Config(**parts[""], **{name: kind(**parts[name]) for name, kind in sections(Config).items()})
    _check_values(config)
    return config


def to_toml(config: Config) -> str:
    """The configuration as a preset; loading and resolving it gives the identical one."""
    import tomli_w

    return tomli_w.dumps(asdict(config))


_OR_ZERO = "optimizer.min_learning_rate optimizer.warmup_steps optimizer.weight_decay train.eval_batches sample.tokens"
_OR_ZERO += " sample.temperature simulate_devices distributed.num_processes"
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {  # every other number must be positive
    "seed": (lambda x: 0 <= x < 2**31, f"0 to {2**31 - 1}"),
    "model.dropout": (lambda x: 0 <= x < 1, "0 or more and less than 1"),
    "optimizer.beta1": (lambda x: 0 <= x < 1, "0 or more and less than 1"),
    "optimizer.beta2": (lambda x: 0 <= x < 1, "0 or more and less than 1"),
    "data.validation_fraction": (lambda x: 0 < x < 1, "more than 0 and less than 1"),
    "distributed.process_id": (lambda x: x >= -1, "0 or more, or -1: not given"),
    **{key: (lambda x: x >= 0, "0 or more") for key in _OR_ZERO.split()},
}


def _check_values(config: Config) -> None:
    """Every check that needs neither devices nor a mesh."""
    for key, option in options(Config).items():
        value = attrgetter(key)(config)
        if option.kind in (int, float):
            inside, valid = _RANGES.get(key, (lambda x: x > 0, "1 or more" if option.kind is int else "more than 0"))
            if not inside(value):
                raise UserError(f"{option.flag} {value}; valid: {valid}")
    model, optimizer, distributed = config.model, config.optimizer, config.distributed
    if model.hidden_size % model.num_heads:
        below = model.head_size * model.num_heads
        valid = " or ".join(str(size) for size in (below, below + model.num_heads) if size)
        raise UserError(
            f"--model.hidden-size {model.hidden_size} is not divisible by --model.num-heads {model.num_heads}; "
            f"valid: a multiple of {model.num_heads}, such as {valid}"
        )
    if optimizer.warmup_steps > optimizer.decay_steps:
        raise UserError(
            f"--optimizer.warmup-steps {optimizer.warmup_steps} is more than --optimizer.decay-steps "
            f"{optimizer.decay_steps}, which includes it; valid: at most {optimizer.decay_steps}"
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise UserError(
            f"--optimizer.min-learning-rate {optimizer.min_learning_rate} is above --optimizer.learning-rate "
            f"{optimizer.learning_rate}; valid: at most {optimizer.learning_rate}"
        )
    given = (distributed.coordinator != "", distributed.num_processes != 0, distributed.process_id != -1)
    if any(given) and not all(given):
        flags = ("--distributed.coordinator", "--distributed.num-processes", "--distributed.process-id")
        missing = " and ".join(flag for flag, there in zip(flags, given, strict=True) if not there)
        raise UserError(f"{missing} missing; valid: {', '.join(flags)} together, or none of them")
    if all(given) and distributed.process_id >= distributed.num_processes:
        raise UserError(
            f"--distributed.process-id {distributed.process_id} with --distributed.num-processes "
            f"{distributed.num_processes}; valid: 0 to {distributed.num_processes - 1}"
        )
    host, _, port = distributed.coordinator.rpartition(":")
    if distributed.coordinator and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"--distributed.coordinator {distributed.coordinator!r}; valid: HOST:PORT, as in localhost:12345"
        )


def validate(config: Config, num_devices: int) -> None:
    """Check the values against each other, the mesh, and `num_devices`, those of all processes together.

    Raises one `UserError`, naming flags.
    """
    _check_values(config)
    validate_mesh(config, num_devices)
    rows = config.mesh.data * config.train.microbatch
    if config.train.global_batch % rows:
        raise UserError(
            f"--train.global-batch {config.train.global_batch} is not divisible by --mesh.data {config.mesh.data} x "
            f"--train.microbatch {config.train.microbatch}; valid: a multiple of {rows}"
        )


def validate_mesh(config: Config, num_devices: int) -> None:
    """The part of `validate` that any use of the model needs, not only training."""
    model, mesh = config.model, config.mesh
    if mesh.num_devices != num_devices:
        simulated = -(-mesh.num_devices // max(1, config.distributed.num_processes))  # per process
        raise UserError(
            f"--mesh.data {mesh.data} x --mesh.pipe {mesh.pipe} x --mesh.tensor {mesh.tensor} needs {mesh.num_devices} "
            f"devices, there are {num_devices}; valid: sizes whose product is {num_devices}, "
            f"or --simulate-devices {simulated}"
        )
    split = {
        f"--model.num-heads {model.num_heads}": model.num_heads,
        f"the padded vocabulary of {model.padded_vocab_size} (see --model.vocab-multiple)": model.padded_vocab_size,
        f"the MLP width of {model.mlp_size} (4 x --model.hidden-size)": model.mlp_size,
    }
    for name, size in split.items():
        if size % mesh.tensor:
            common = math.gcd(*split.values())
            valid = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            raise UserError(f"--mesh.tensor {mesh.tensor} does not divide {name}; valid: {valid}")
