"""The state that a new run starts with: fresh weights, or those of another run (`--init`), on any mesh."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.lora import LORA
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.program.program import Program
from megajax.core.program.state import StateLayout, TrainState
from megajax.core.program.transfer import Transfer, moved
from megajax.core.traits import Changes
from megajax.data.text.corpus import corpus_tokenizer
from megajax.data.text.indexed import prepared_prefix
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import is_tokenizer_folder, named_tokenizer
from megajax.host import reading
from megajax.host.phases import phase
from megajax.host.processes import say
from megajax.runs.checkpoint import Checkpoints, choose_step
from megajax.runs.data import has_run_data
from megajax.runs.directory import stored_config, trained_steps
from megajax.runs.step_folders import complete
from megajax.runs.store import run_folder
from megajax.runs.trained import check_run
from megajax.settings.config import Config
from megajax.settings.option_errors import as_flag, compared

_ADAPTERS = jax.tree_util.DictKey(LORA)
_OUTPUT = "head.output."  # prefix of the weights that produce a task's answers


def init_folder(config: Config) -> Path:
    """The folder of the run of `--init`."""
    return run_folder(config.init, "--init")


def check_first_weights(config: Config) -> None:
    """Check that a new run can start with its configured weights, fresh or from `--init`."""
    if config.init:
        check_init(config)
    elif config.lora.rank:
        raise UserError(
            f"--lora.rank {config.lora.rank} without --init: LoRA would freeze random weights; valid: "
            "--init with the run to adapt, or --lora.rank 0"
        )
    elif config.train.loss == "preferences":
        raise UserError(
            f"--task.name {config.task.name} without --init: answers would be compared with a model of random weights; "
            "valid: --init with the run to adapt"
        )


def warning_of_task(config: Config) -> str:
    """A warning if a task begins with random weights, or with a learning rate that is no lower than that of the
    pretraining of `--init`; else empty."""
    ours = config.optimizer.learning_rate
    if config.pretrains:
        return ""
    if not config.init:
        return f"warning: --task.name {config.task.name} without --init trains random weights"
    run_dir = init_folder(config)
    if config.lora.rank or not trained_steps(run_dir):
        return ""
    before = _init_config(config)
    if not before.pretrains or ours < before.optimizer.learning_rate:
        return ""
    return (
        f"warning: --optimizer.learning-rate {ours:g} is no lower than that with which {run_dir} was pretrained, "
        f"{before.optimizer.learning_rate:g}; for a task a tenth of that, or less, is usual"
    )


def _init_config(config: Config) -> Config:
    """The configuration of the run of `--init`, read with this one's precision and plugins."""
    plugins = {"plugins": config.plugins} if config.plugins else {}
    return stored_config(init_folder(config), {"precision": config.precision} | plugins)


def check_init(config: Config) -> None:
    """Check that the run of `--init` has the same model."""
    run_dir = init_folder(config)
    check_run(run_dir, "--init")
    model, theirs = config.model, _init_config(config).model
    differ = _differing(model, theirs, Changes.WEIGHTS)
    if "vocab_size" in differ and "padded_vocab_size" in differ:
        differ.remove("padded_vocab_size")
    if model.sequence_length > theirs.sequence_length and model.positions == "learned":
        differ.append("sequence_length")
    if differ:
        differ += _differing(model, theirs, Changes.COMPUTATION)
        options = compared(ModelConfig, *Changes)
        flags = " ".join(as_flag(f"model.{options[name]}", getattr(theirs, options[name])) for name in differ)
        raise UserError(f"--init {run_dir} holds another model; valid: {flags}, or another run")
    steps = complete(run_dir / "checkpoints")
    if not steps:
        raise UserError(f"--init {run_dir} holds no checkpoint; valid: the directory of a run that wrote one")
    choose_step(run_dir, steps, config.init_step, "--init-step")


def init_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of the run of `--init`; None if it has none."""
    folder = init_folder(config) / "data"
    return corpus_tokenizer(folder) if reading.kind(folder / "tokenizer") else None


def named_or_init_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of `--tokenizer.path`, which `--init` must agree with, or else that of `--init`."""
    ours = named_tokenizer(config.tokenizer.path) if config.tokenizer.path else None
    theirs = init_tokenizer(config) if config.init else None
    if ours and theirs and ours != theirs:
        raise UserError(
            f"--tokenizer.path {config.tokenizer.path}: not the tokenizer of --init {config.init}; "
            "valid: that one, or none"
        )
    return ours or theirs


def keep_init_tokenizer(config: Config, folder: Path) -> None:
    """Save the tokenizer of `--init` in a new run's data folder: the weights need exactly its ids."""
    tokenizer = init_tokenizer(config)
    if tokenizer is not None:
        keep_tokenizer(tokenizer, config, folder, f"--init {config.init}", "another --run-dir")
    elif is_tokenizer_folder(folder / "tokenizer") or has_run_data(config, folder):
        return
    elif config.data.path and not config.tokenizer.path and not prepared_prefix(config.data.path):
        raise UserError(
            f"--init {config.init} has no tokenizer; valid: --tokenizer.path with the tokenizer of its weights"
        )


def keep_tokenizer(tokenizer: Tokenizer, config: Config, folder: Path, source: str, valid: str) -> None:
    """Save the tokenizer of a model's weights in a data folder that has no corpora yet. If there is another tokenizer,
    the error says where this one is from (`source`) and what to do (`valid`)."""
    if is_tokenizer_folder(folder / "tokenizer"):
        if corpus_tokenizer(folder) != tokenizer:
            raise UserError(f"{source}: not the tokenizer in {folder}; valid: {valid}")
    elif not has_run_data(config, folder):
        tokenizer.save(folder / "tokenizer")


def first_state(config: Config, program: Program) -> tuple[TrainState, str]:
    """The state before the first step on the program's mesh, and a line that says where its weights come from.

    With `--init`, weights with the same names are taken from a checkpoint of the other run (`--init-step`), with LoRA
    merged. Differing heads start fresh, and the optimizer from these weights; learned positions are truncated.
    """
    state = program.layout.init()
    if not config.init:
        return state, "weights: fresh"
    check_init(config)
    run_dir = init_folder(config)
    other = _init_config(config)
    theirs = other.model
    model = dataclasses.replace(theirs, dropout=config.model.dropout)
    train = dataclasses.replace(config.train, ema=other.train.ema, freeze=())
    on_our_mesh = dataclasses.replace(config, model=model, lora=other.lora, train=train)
    layout = StateLayout(on_our_mesh, program.mesh, StagedModel(model, F_AND_G, program.backend))
    checkpoints = Checkpoints(run_dir, layout)
    step = choose_step(run_dir, checkpoints.steps(), config.init_step, "--init-step")
    weights = checkpoints.read_weights(step)
    transfer = Transfer(program.layout)
    canonical = transfer.to_host(state)
    del state
    stored = dict(jax.tree_util.tree_leaves_with_path(weights))
    fresh: list[str] = []
    other_classes = theirs.head == "classes" and config.model.num_classes != theirs.num_classes
    other_answers = config.model.head != theirs.head or other_classes

    def choose(path: Any, ours: Array) -> Array:
        if path[0] == _ADAPTERS:
            return ours
        name = ".".join(str(key.key) for key in path[1:])
        if path not in stored or (other_answers and name.startswith(_OUTPUT)):
            fresh.append(name)
            return ours
        return stored[path] if stored[path].shape == ours.shape else _first(stored[path], ours)

    params = jax.tree_util.tree_map_with_path(choose, canonical.params)
    averaged = "the average " * checkpoints.averaged(step)
    origin = f"weights: {averaged}from step {step} of {run_dir}; fresh: {', '.join(fresh) or 'none'}"
    origin += f"; frozen, with fresh adapters of rank {config.lora.rank}" if config.lora.rank else ""
    if theirs.sequence_length > config.model.sequence_length and theirs.positions == "learned":
        origin += f"; the first {config.model.sequence_length} of {theirs.sequence_length} positions"
    for name in _differing(config.model, theirs, Changes.COMPUTATION):
        origin += f"; model.{name} {getattr(config.model, name)} instead of {getattr(theirs, name)}"
    average = program.layout.trained(params) if config.train.ema else None
    begun = transfer.to_devices(dataclasses.replace(canonical, params=params, average=average))
    return program.layout.with_weights(begun) if program.layout.own else begun, origin


def _differing(model: ModelConfig, theirs: ModelConfig, changes: Changes) -> list[str]:
    """Options and properties that differ, among those that declare this change."""
    return [name for name in compared(ModelConfig, changes) if getattr(model, name) != getattr(theirs, name)]


def first_or_newest_state(
    checkpoints: Checkpoints, config: Config, program: Program, initial: TrainState | None = None
) -> TrainState:
    """The newest readable state of a run, or else its first one, which may be `initial`; prints which it is."""
    with phase("preparing the state"):
        state, step, damaged = checkpoints.restore_newest()
        for message in damaged:
            say(f"damaged checkpoint, falling back to the one before it: {message}")
        if state is None and initial is not None:
            return initial
        if state is None:
            state, origin = first_state(config, program)
            if config.init or not config.pretrains:
                say(origin)
            return state
        checkpoints.set_aside(after=step)
        say(f"resumed from step {step} of {config.run_dir}")
        if checkpoints.average_news:
            say(checkpoints.average_news)
        return state


def _first(theirs: Array, ours: Array) -> Array:
    """The first rows of a table in host memory, sharded like ours."""
    place = ours.sharding.with_memory_kind(ours.addressable_shards[0].device.default_memory().kind)
    cut = jax.jit(lambda table: jnp.copy(table[: ours.shape[0]]), out_shardings=place)(moved(theirs))
    return moved(cut, ours.sharding.memory_kind)
