"""Check the values of a configuration, alone and against each other."""

import importlib.util
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from megajax.core.config import MODELS_OWN
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES, FamilyEntry
from megajax.core.optim.config import OWN, OptimizerConfig
from megajax.core.options import MOST, is_whole, options
from megajax.data.config import DataConfig
from megajax.data.tasks.registry import TASKS, Task
from megajax.host.paths import apart, scheme
from megajax.settings.bitwise import check_bitwise
from megajax.settings.config import Config
from megajax.settings.model_checks import check_lora, check_model
from megajax.settings.option_errors import as_flag, check, check_read

LIBRARIES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}  # of `--track`
NEED_VALIDATION = "checkpoint.keep_best", "data.validation"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_values(config: Config) -> None:
    """Check everything that needs neither devices nor a mesh: values by themselves, and against each other."""
    check(config)
    model, optimizer, distributed = config.model, config.optimizer, config.distributed
    family = FAMILIES[model.family]
    if not config.pretrains and not _fits(TASKS[config.task.name], family):
        able = (name for name, entry in FAMILIES.items() if _fits(TASKS[config.task.name], entry))
        raise _conflict(config, "task.name", "model.family", valid=f"--model.family {' or '.join(able)}")
    for key, value in family.only.items():
        if attrgetter(key)(config) != value:
            raise _conflict(config, key, "model.family", valid=as_flag(key, value))
    check_model(model)
    check_lora(config.lora, model)
    check_bitwise(config)
    if config.precision == "fp8" and model.linear_heads:  # not tested
        raise _conflict(config, "precision", "model.linear_heads", valid="bf16")
    if config.train.freeze and config.lora.rank:
        raise UserError(
            f"--train.freeze {' '.join(config.train.freeze)} with --lora.rank {config.lora.rank}, which freezes all "
            "weights; valid: --lora.rank 0, or without --train.freeze"
        )
    if config.init_step != options(Config)["init_step"].default and not config.init:
        raise UserError(f"--init-step {config.init_step} without --init; valid: --init with the directory of a run")
    _check_task(config)
    _check_loss(config)
    _check_length(config)
    _check_ramp(config)
    if config.data.reset_attention and not family.continues_text:
        why = ", whose samples are single documents"
        raise _conflict(config, "data.reset_attention", "model.family", why=why, valid="--no-data.reset-attention")
    if optimizer.ends_decay and optimizer.decay_steps and optimizer.warmup_steps > optimizer.decay_steps:
        raise UserError(
            f"--optimizer.warmup-steps {optimizer.warmup_steps} is more than --optimizer.decay-steps "
            f"{optimizer.decay_steps}, which includes the warm-up; valid: at most "
            f"{optimizer.decay_steps}"
        )
    check_read(optimizer, "optimizer")
    check_cooldown(optimizer)
    low, high = optimizer.min_learning_rate, optimizer.learning_rate
    if optimizer.schedule != "constant" and low > high:
        raise UserError(
            f"--optimizer.min-learning-rate {low} is above --optimizer.learning-rate {high}; valid: at most {high}"
        )
    computes_in = "bf16" if config.precision == "fp8" else config.precision
    if optimizer.gradient_dtype not in ("fp32", computes_in):
        valid = f"fp32, or --precision {optimizer.gradient_dtype}"
        raise _conflict(config, "optimizer.gradient_dtype", "precision", valid=valid)
    _check_data(config.data)
    _check_validation(config)
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
    """The error for options whose values conflict."""
    given = " with ".join(as_flag(key, attrgetter(key)(config)) for key in keys)
    return UserError(f"{given}{why}; valid: {valid}")


def _all_given(config: Config, keys: Sequence[str]) -> bool:
    """Whether all of these options are given (True) or none is (False); refuses anything in between."""
    known = [options(Config)[key] for key in keys]
    missing = [option.flag for option in known if attrgetter(option.key)(config) == option.default]
    if 0 < len(missing) < len(known):
        flags = ", ".join(option.flag for option in known)
        raise UserError(f"{' and '.join(missing)} missing; valid: all of {flags}, or none of them")
    return not missing


def _fits(task: Task, family: FamilyEntry) -> bool:
    """Whether models of a family can be fine-tuned on a task."""
    return task.head in family.heads and (family.continues_text or not task.continues_text)


def _check_task(config: Config) -> None:
    """Check what a task needs, and options that are only for tasks."""
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


def _check_loss(config: Config) -> None:
    """Check that the loss is for this model, and that it is the task's if only one of them can be."""
    train, task = config.train, TASKS.get(config.task.name)
    if train.metrics or train.loss != MODELS_OWN:
        key = "train.loss" if train.loss != MODELS_OWN else "train.metrics"
        if not FAMILIES[config.model.family].continues_text or config.model.head != "pretraining":
            raise _conflict(config, key, "model.family", valid=f"--train.loss {MODELS_OWN} without metrics")
    of_task = {each.loss for each in TASKS.values()} - {MODELS_OWN}
    if train.loss in of_task and config.model.num_predicting:  # it is not of tokens
        raise _conflict(config, "train.loss", "model.prediction_modules", valid="--model.prediction-coefficient 0")
    wanted = MODELS_OWN if task is None else task.loss
    if train.loss != wanted and {train.loss, wanted} & of_task:
        raise _conflict(config, "train.loss", "task.name", valid=f"--train.loss {wanted}")


def _check_length(config: Config) -> None:
    """Check that the end of training and of the warm-up are defined."""
    train, optimizer = config.train, config.optimizer
    if not train.steps and not train.epochs:
        raise UserError(
            "--train.steps 0 without --train.epochs, so training would never end; valid: 1 to "
            f"{MOST}, or --train.epochs"
        )
    if optimizer.warmup_steps and optimizer.warmup_fraction:
        raise UserError("--optimizer.warmup-steps and --optimizer.warmup-fraction are both given; valid: one of them")


def _check_ramp(config: Config) -> None:
    """Check that the steps of a batch ramp reach the full batch."""
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
    """Check that there is data to validate on, and that options that need validation have it."""
    if config.train.eval_every:
        if not config.data.validation_fraction and not config.data.dev:
            valid = "more than 0, or --train.eval-every 0"
            raise _conflict(config, "data.validation_fraction", "train.eval_every", valid=valid)
        return
    if not config.pretrains and not config.data.validation_fraction and not config.data.dev:
        raise UserError("--data.validation-fraction 0 without --data.dev; valid: more than 0, or --data.dev")
    for key in NEED_VALIDATION:
        if attrgetter(key)(config):
            raise UserError(f"{options(Config)[key].flag} with --train.eval-every 0; valid: 1 or more steps")


def _check_data(data: DataConfig) -> None:
    if data.path and data.sources:
        raise UserError("--data.path and --data.sources are both given; valid: one of them")
    if data.set and (data.path or data.sources):
        given = "--data.path" if data.path else "--data.sources"
        raise UserError(f"--data.set {data.set} with {given}; valid: one of them")
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


def check_cooldown(optimizer: OptimizerConfig) -> None:
    """Check that `wsd`, and no other schedule, has cooldown steps, and that they fit between warm-up and decay."""
    flag = f"--optimizer.cooldown-steps {optimizer.cooldown_steps}"
    if optimizer.schedule != "wsd":
        if optimizer.cooldown_steps:
            raise UserError(
                f"{flag} with --optimizer.schedule {optimizer.schedule}; valid: --optimizer.schedule wsd, or 0"
            )
        return
    end, warmup = optimizer.decay_steps, optimizer.warmup
    most = max(1, end - warmup) if end else MOST
    if not 1 <= optimizer.cooldown_steps <= most:
        why = f", which ends at --optimizer.decay-steps {end} after {warmup} steps of warm-up" if end else ""
        raise UserError(f"{flag} with --optimizer.schedule wsd{why}; valid: 1 to {most}")


def check_given(config: Config) -> None:
    """Check that training data and optimizer are given, and that the library of `--track` is installed."""
    check_there(config)
    if config.pretrains and config.model.head != "pretraining":
        raise UserError(f"--model.head {config.model.head} without a task; valid: --task.name {' or '.join(TASKS)}")
    if config.pretrains and not config.data.path and not config.data.sources and not config.data.set:
        raise UserError(
            "--data.path missing; valid: a text, JSONL or Parquet file, a folder, a prepared prefix, or python-stdlib; "
            "or --data.sources"
        )
    _check_evaluate(config)
    if config.track in LIBRARIES:
        check_installed(config.track)
    if not config.pretrains and not config.data.train:
        raise UserError(f"--data.train missing; valid: files of --task.name {config.task.name}")


def _check_evaluate(config: Config) -> None:
    """Check that the tasks of `--evaluate` are for this model, each with its file, once."""
    reads_text = config.model.head == "pretraining" and FAMILIES[config.model.family].continues_text
    names = [entry.partition("=")[0] for entry in config.evaluate]
    for entry, name in zip(config.evaluate, names, strict=True):
        path = entry.partition("=")[2]
        if not config.pretrains:
            fits, valid = entry == config.task.name, config.task.name
        else:
            fits = reads_text and name in ("lambada", "wikitext103") and path != ""
            otherwise = "without it, since validation already reports all losses"
            valid = "lambada=FILE, wikitext103=FILE" if reads_text else otherwise
        if not fits or names.count(name) > 1:
            several = apart(entry, lambda word: word.partition("=")[0] in ("lambada", "wikitext103", *TASKS))
            raise UserError(f"--evaluate {entry}; valid: {valid}{', each once' * fits}{several}")
        if path and not scheme(path) and not Path(path).is_file():
            several = apart(entry, lambda word: "=" in word)
            raise UserError(f"--evaluate {entry}: no such file; valid: an existing one{several}")


def check_there(config: Config) -> None:
    """Check that a loss and an optimizer that Python code gave are there again."""
    for word, key, name, given in (
        ("loss", "train.loss", config.train.loss, config.own_loss),
        ("optimizer", "optimizer.name", config.optimizer.name, config.own_optimizer),
    ):
        if name == OWN and given is None:
            calls = f"{word}=… in megajax.init or restore"
            raise UserError(f"--{key} {OWN}: Python code gave this {word}; valid: the same code, with {calls}")


def check_installed(name: str) -> None:
    """Check that the library of `--track` is installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder with that name is not the library
        raise UserError(f"--track {name}: {LIBRARIES[name]} is not installed; valid: pip install 'megajax[{name}]'")
