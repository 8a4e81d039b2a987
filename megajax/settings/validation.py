"""Checks of a configuration: of single values, of values that depend on each other, and against the devices."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from itertools import product
from operator import attrgetter

from megajax.axes import PIPE, ROW_AXES, TENSOR
from megajax.config import Config, MeshConfig
from megajax.data.config import DataConfig
from megajax.errors import UserError
from megajax.models.checks import check_lora, check_model
from megajax.models.config import ModelConfig
from megajax.models.registry import FAMILIES, Entry
from megajax.optim.config import check_cooldown
from megajax.options import MOST, as_flag, check, is_whole, options
from megajax.pipeline.config import check_schedule, check_table
from megajax.tasks.registry import TASKS, Task
from megajax.traits import Size, Through

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_values(config: Config) -> None:
    """Check what needs neither devices nor a mesh: every value by itself, and those that depend on each other."""
    check(config)
    model, optimizer, distributed = config.model, config.optimizer, config.distributed
    family = FAMILIES[model.family]
    if not config.pretrains and not _fits(TASKS[config.task.name], family):
        able = (name for name, entry in FAMILIES.items() if _fits(TASKS[config.task.name], entry))
        raise _conflict(config, "task.name", "model.family", valid=f"--model.family {' or '.join(able)}")
    check_model(model)
    check_lora(config.lora, model)
    _check_task(config)
    _check_length(config)
    _check_ramp(config)
    if config.data.reset_attention and not family.continues_text:
        why = ", whose samples are of one document each"
        raise _conflict(config, "data.reset_attention", "model.family", why=why, valid="--no-data.reset-attention")
    if optimizer.ends_decay and optimizer.decay_steps and optimizer.warmup_steps > optimizer.decay_steps:
        raise UserError(
            f"--optimizer.warmup-steps {optimizer.warmup_steps} is more than --optimizer.decay-steps "
            f"{optimizer.decay_steps}, which includes it; valid: at most {optimizer.decay_steps}"
        )
    check_cooldown(optimizer)
    if optimizer.schedule != "constant":
        _check_order(config, "optimizer.min_learning_rate", "optimizer.learning_rate")
    if optimizer.gradient_dtype not in ("fp32", config.precision):
        valid = f"fp32, or --precision {optimizer.gradient_dtype}"
        raise _conflict(config, "optimizer.gradient_dtype", "precision", valid=valid)
    _check_data(config.data)
    _check_validation(config)
    _check_order(config, "loss_scale.floor", "loss_scale.initial")
    keys = ("distributed.coordinator", "distributed.num_processes", "distributed.process_id")
    if _all_given(config, keys) and distributed.process_id >= distributed.num_processes:
        valid = f"0 to {distributed.num_processes - 1}"
        raise _conflict(config, "distributed.process_id", "distributed.num_processes", valid=valid)
    host, _, port = distributed.coordinator.rpartition(":")
    if distributed.coordinator and not (host and is_whole(port) and 0 < int(port) < 2**16):
        raise UserError(
            f"--distributed.coordinator {distributed.coordinator!r}; valid: HOST:PORT, as in localhost:12345"
        )


def _conflict(config: Config, *keys: str, valid: object, why: str = "") -> UserError:
    """The error of options whose values do not go together."""
    given = " with ".join(as_flag(key, attrgetter(key)(config)) for key in keys)
    return UserError(f"{given}{why}; valid: {valid}")


def _check_order(config: Config, lower: str, upper: str) -> None:
    """That the option of one key is at most that of another."""
    low, high = attrgetter(lower, upper)(config)
    if low > high:
        flags = [options(Config)[key].flag for key in (lower, upper)]
        raise UserError(f"{flags[0]} {low} is above {flags[1]} {high}; valid: at most {high}")


def _all_given(config: Config, keys: Sequence[str]) -> bool:
    """Whether options that belong together are given; False: none is."""
    known = [options(Config)[key] for key in keys]
    missing = [option.flag for option in known if attrgetter(option.key)(config) == option.default]
    if 0 < len(missing) < len(known):
        flags = ", ".join(option.flag for option in known)
        raise UserError(f"{' and '.join(missing)} missing; valid: {flags} together, or none of them")
    return not missing


def _fits(task: Task, family: Entry) -> bool:
    """Whether the models of a family are for a task."""
    return task.head in family.heads and (family.continues_text or not task.continues_text)


def _check_task(config: Config) -> None:
    """What a task needs, and what is for tasks only."""
    model, data, name = config.model, config.data, config.task.name
    if config.pretrains:
        for key in ("data.train", "data.dev", "seeds"):
            option = options(Config)[key]
            if attrgetter(key)(config) != option.default:
                valid = f"--task.name {' or '.join(TASKS)}, or without {option.flag}"
                raise UserError(f"{option.flag} without a task; valid: {valid}")
        return
    task = TASKS[name]
    if model.head != task.head:
        raise _conflict(config, "model.head", "task.name", valid=task.head)
    if model.num_classes != task.classes:
        raise _conflict(config, "model.num_classes", "task.name", valid=task.classes)
    if task.continues_text and not data.reset_attention:
        why = ", of which several records share a row"
        raise _conflict(config, "data.reset_attention", "task.name", why=why, valid="--data.reset-attention")
    for field in ("path", "sources", "validation"):
        if getattr(data, field):
            raise UserError(f"--data.{field} with --task.name {name}; valid: --data.train and --data.dev")


def _check_length(config: Config) -> None:
    """That it is known when training ends, and its warm-up."""
    train, optimizer = config.train, config.optimizer
    if not train.steps and not train.epochs:
        raise UserError(
            f"--train.steps 0, so that nothing says when training ends; valid: 1 to {MOST}, or --train.epochs"
        )
    if optimizer.warmup_steps and optimizer.warmup_fraction:
        raise UserError("--optimizer.warmup-steps and --optimizer.warmup-fraction are both given; valid: one of them")


def _check_ramp(config: Config) -> None:
    """That the batches of a ramp lead to the full one."""
    if not _all_given(config, ("train.ramp_start", "train.ramp_increment", "train.ramp_samples")):
        return
    train = config.train
    full, start = train.global_batch, train.ramp_start
    if start >= full:
        valid = f"1 to {full - 1}" if full > 1 else "0"
        raise _conflict(config, "train.ramp_start", "train.global_batch", why=", to which it grows", valid=valid)
    if (full - start) % train.ramp_increment:
        raise UserError(
            f"--train.ramp-increment {train.ramp_increment} does not lead from --train.ramp-start {start} to "
            f"--train.global-batch {full}; valid: a divisor of {full - start}"
        )


def _check_validation(config: Config) -> None:
    """What there is to validate on, and what needs a validation."""
    if config.train.eval_every:
        if not config.data.validation_fraction and not config.data.dev:
            valid = "more than 0, or --train.eval-every 0"
            raise _conflict(config, "data.validation_fraction", "train.eval_every", valid=valid)
        return
    if not config.pretrains and not config.data.validation_fraction and not config.data.dev:
        raise UserError("--data.validation-fraction 0 without --data.dev; valid: more than 0, or --data.dev")
    for key in ("checkpoint.keep_best", "data.validation"):
        if attrgetter(key)(config):
            raise UserError(f"{options(Config)[key].flag} with --train.eval-every 0; valid: 1 or more steps")


def _check_data(data: DataConfig) -> None:
    if data.path and data.sources:
        raise UserError("--data.path and --data.sources are both given; valid: one of them")
    for source in data.sources:
        if not source.path or not 0 < source.weight <= MOST:
            raise UserError(
                f"--data.sources: path {source.path!r}, weight {source.weight:g}; "
                f"valid: a path and a weight above 0, at most {MOST}"
            )
    names = [entry.name for entry in data.validation]
    for entry in data.validation:
        if not entry.path or not _NAME.fullmatch(entry.name) or names.count(entry.name) > 1:
            raise UserError(
                f"--data.validation: name {entry.name!r}, path {entry.path!r}; "
                "valid: a path and a name of its own, of a-z, A-Z, 0-9, - and _"
            )


def validate(config: Config, num_devices: int) -> None:
    """Check a training: the values by themselves, against each other, and against the devices of all processes."""
    check_values(config)
    _check_training_on_mesh(config, num_devices)


def validate_imagined(config: Config) -> None:
    """`validate` with as many devices as the mesh asks for; the error names the nearest mesh that is valid."""
    check_values(config)
    try:
        _check_training_on_mesh(config, config.mesh.num_devices)
    except UserError as error:
        mesh = nearest_mesh(config)
        raise UserError(f"{error}; the nearest valid mesh: {mesh.flags(between=' ') if mesh else 'none'}") from None


def nearest_mesh(config: Config) -> MeshConfig | None:
    """The mesh that can train a configuration and whose axes differ by the least factors from those it asks for, of
    several the one of fewest devices; None if the batch or the schedule forbids all."""
    there, train = config.mesh, config.train
    possible = {axis: [size] for axis, size in there.sizes.items()}
    possible |= dict.fromkeys(ROW_AXES, _divisors(train.global_batch))
    possible |= {
        PIPE: [*range(1, min(2 * there.pipe, config.model.num_layers) + 1)],
        TENSOR: _divisors(config.model.num_heads),
    }
    meshes = [MeshConfig(**dict(zip(possible, sizes, strict=True))) for sizes in product(*possible.values())]
    meshes = [mesh for mesh in meshes if train.global_batch % (mesh.row_shards * train.microbatch) == 0]

    def distance(mesh: MeshConfig) -> tuple[float, int]:
        pairs = zip(mesh.sizes.values(), there.sizes.values(), strict=True)
        return sum(abs(math.log(size / old)) for size, old in pairs), mesh.num_devices

    for mesh in sorted(meshes, key=distance):
        with contextlib.suppress(UserError):
            _check_training_on_mesh(dataclasses.replace(config, mesh=mesh), mesh.num_devices)
            return mesh
    return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _check_training_on_mesh(config: Config, num_devices: int) -> None:
    validate_mesh(config, num_devices)
    rows, flags = config.mesh.row_shards * config.train.microbatch, config.mesh.flags(ROW_AXES)
    if config.train.global_batch % rows:
        raise UserError(
            f"--train.global-batch {config.train.global_batch} is not divisible by {flags} x "
            f"--train.microbatch {config.train.microbatch}; valid: a multiple of {rows}"
        )
    for stage in config.train.batch_sizes.stages:
        if stage.size % rows:
            raise UserError(
                f"--train.ramp-start {config.train.ramp_start} with --train.ramp-increment "
                f"{config.train.ramp_increment} has steps of {stage.size} sequences, not divisible by {flags} x "
                f"--train.microbatch {config.train.microbatch}; valid: multiples of {rows}"
            )
    divisors = " x ".join([*(f"--mesh.{axis}" for axis in ROW_AXES), "--train.microbatch"])
    name = f"--train.global-batch / ({divisors})"
    check_table(config.pipeline, config.mesh.pipe, config.train.global_batch // rows, name)
    length, tensor = config.model.sequence_length, config.mesh.tensor
    if config.sequence_parallel and length % tensor:
        raise UserError(
            f"--sequence-parallel: --mesh.tensor {tensor} does not divide --model.sequence-length {length}; "
            f"valid: --no-sequence-parallel, or a --mesh.tensor that does, such as {math.gcd(length, tensor)}"
        )


def validate_mesh(config: Config, num_devices: int) -> None:
    """Check what any use of the model needs, not only training: the mesh against the devices and the model's sizes."""
    model, mesh = config.model, config.mesh
    check_schedule(config.pipeline, mesh.pipe, model.num_layers)
    if mesh.num_devices != num_devices:
        each = -(-mesh.num_devices // max(1, config.distributed.num_processes))  # per process
        simulated = "" if options(Config)["simulate_devices"].problem(each) else f", or --simulate-devices {each}"
        raise UserError(
            f"{mesh.flags()} needs {mesh.num_devices} devices, there are {num_devices}; "
            f"valid: sizes whose product is {num_devices}{simulated}"
        )
    split = _split_sizes(model)
    vocabulary = next(words for size, _, words in split if size.dim == "vocabulary")
    if config.splits_vocabulary and model.padded_vocab_size % (mesh.pipe * mesh.tensor):
        multiple = math.lcm(model.vocab_multiple, mesh.pipe * mesh.tensor)
        raise UserError(
            f"--pipeline.vocabulary split: --mesh.pipe {mesh.pipe} x --mesh.tensor {mesh.tensor} does not divide "
            f"{vocabulary}; valid: --pipeline.vocabulary replicated, or in a new run --model.vocab-multiple {multiple}"
        )
    divisors = _divisors(math.gcd(*(number for size, number, _ in split if not size.repeated)))
    for size, number, words in split:
        if number % mesh.tensor == 0 or (size.repeated and mesh.tensor % number == 0):
            continue
        others = [other for each, other, _ in split if each is not size and not each.repeated]
        valid = ", ".join(str(each) for each in divisors if number % each == 0 or each % number == 0)
        if size.dim == "vocabulary" and all(other % mesh.tensor == 0 for other in others):
            valid += f"; or in a new run --model.vocab-multiple {math.lcm(model.vocab_multiple, mesh.tensor)}"
        if size.repeated:
            raise UserError(
                f"--mesh.tensor {mesh.tensor} does not divide {words}, nor is it a multiple of it; valid: {valid}"
            )
        raise UserError(f"--mesh.tensor {mesh.tensor} does not divide {words}; valid: {valid}")


def _split_sizes(model: ModelConfig) -> list[tuple[Size, int, str]]:
    """The sizes of a model that are divided over `tensor`: as declared, as numbers, and in the words of messages."""
    found = []
    for name, option in options(ModelConfig).items():
        size, through = option.trait(Size), option.trait(Through)
        if size and size.split:
            value, flag = getattr(model, through.name if through else name), f"--model.{name.replace('_', '-')}"
            words = f"{through.words} of {value} (see {flag})" if through else f"{flag} {value}"
            found.append((size, value, words))
    return found
