"""From a configuration to the training loop: checks, the run directory and its lock, data, program, last step."""

import dataclasses
import math
import tomllib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from megajax.core.errors import RunError, UserError
from megajax.core.optim.config import UNKNOWN, Horizon, OptimizerConfig
from megajax.core.options import counted
from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step
from megajax.host import reading
from megajax.host.ending import Exit
from megajax.host.files import writable, write_atomically
from megajax.host.phases import phase, watched
from megajax.host.processes import hosts_of_processes, is_first_process, on_first_process, say
from megajax.host.transcript import transcript
from megajax.plan.machines import machine_of_device
from megajax.plan.placing import placed
from megajax.runs.data import RunData, make_run_data, open_run_data
from megajax.runs.directory import (
    claimed,
    corpora_before,
    has_checkpoints,
    start_order,
    stored_optimizer,
    trained_again,
    without_checkpoint,
)
from megajax.runs.forms import backend_without_wrong_forms
from megajax.runs.init import check_first_weights, keep_init_tokenizer, keep_tokenizer, warning_of_task
from megajax.runs.kept_tokenizer import keep_copy, put_back_copy
from megajax.runs.lock import RunLock
from megajax.runs.metrics import is_of_dev, read_metrics
from megajax.runs.order import Order, default_corpora, read_order, write_order
from megajax.runs.starts import keep_start
from megajax.runs.step_folders import complete
from megajax.runs.store import store_of
from megajax.runs.task_data import TaskData, make_task_data, open_task_data
from megajax.settings.checks import check_cooldown
from megajax.settings.config import Config, lasting, profiled_steps, to_toml
from megajax.settings.plugins import remember
from megajax.settings.preset_files import parse_toml
from megajax.settings.presets import read_run
from megajax.settings.validation import check_ramp, validate, with_data
from megajax.start.device_memory import check_memory
from megajax.start.fused_forms import check_attention
from megajax.start.launch import start
from megajax.start.selftest import selftest
from megajax.training.describe import describe
from megajax.training.display import Display
from megajax.training.given import NOTHING, OwnData, Supplied
from megajax.training.hosts import host_lines
from megajax.training.loop import Trainer
from megajax.training.own_data import registered_data, without_validation


def train(config: Config) -> None:
    """Train as `config` says, from the beginning or from the newest checkpoint in its run directory. Raises `RunError`
    if too many steps in a row were skipped or no checkpoint can be read, and `Stopped` after a signal."""
    start(config)
    train_here(config)


def train_here(config: Config, *, skip_finished: bool = False, given: Supplied = NOTHING) -> None:
    """`train` after JAX has started, with what Python code has `given`; `skip_finished` skips a task's run that has all
    its steps and dev figures."""
    config = with_layers(config)
    program, run_dir = given.program or checked_program(config), Path(config.run_dir)
    if config.data.set and given.data is None:
        data_set = registered_data(config, program)
        given = dataclasses.replace(given, data=data_set, tokenizer=given.tokenizer or data_set.tokenizer)
        config = without_validation(config, data_set)
    store, display = store_of(run_dir), Display(is_first_process())
    lock = store or RunLock(run_dir)
    earlier: OptimizerConfig | None = None
    notes: list[str] = []

    def begin() -> list[int]:
        nonlocal earlier
        with claimed(run_dir, config, lock):
            earlier = earlier_optimizer(config, run_dir, given.horizon)
            notes.extend((trained_again(config, run_dir), without_checkpoint(run_dir)))
            is_new = not has_checkpoints(run_dir)
            corpora = make_data(config, run_dir / "data", run_dir, given)
            notes.extend([warning_of_task(config)] * (is_new and given.state is None))
            order = start_order(config, run_dir, corpora)
            check_ramp(config, order.sizes, order.parts[-1].step)
            write_order(config, run_dir, order)
            if store:
                with writable(run_dir):
                    store.publish()
            return list(config.optimizer.kept_of(earlier, given.horizon))

    try:
        with watched(display.phase):
            kept = Horizon(*on_first_process(begin))
        if store and not is_first_process():
            store.pull()
        Exit.traces = None if store else run_dir
        with display.phase("reading the data", announced=False):
            data = given.data or open_data(config, run_dir / "data")
            order = read_order(config, run_dir)
        if given.epochs and not kept.decay_steps:
            whole = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=given.epochs, steps=0))
            kept = with_total_steps(whole, data.train, kept, order).optimizer.horizon
        ours = with_total_steps(config, data.train, kept, order)
        program = Program(ours, program.mesh)
        if skip_finished and _is_finished(run_dir, ours.train.steps):
            say(f"finished: {run_dir} has {counted(ours.train.steps, 'step')} and its dev results")
            return
        if is_first_process():
            transcript.begin(run_dir)
        if config.train.selftest:
            with display.phase("testing the devices"):
                if wrong := selftest(program):
                    raise RunError(f"--train.selftest: wrong, so no step is trained: {wrong}")
        with display.phase("comparing fused attention and experts with plain code", announced=False):
            backend = backend_without_wrong_forms(program, run_dir)
        if backend != program.backend:
            program = Program(ours, program.mesh, backend)
        say("\n".join(filter(None, [describe(ours, program, data, order, earlier), *notes])))
        with watched(display.phase):
            run = Trainer(ours, program, data, order, lock, given)
        _check_length(run, with_total_steps(config, data.train, kept, run.order))
        if line := run.order.line(run.first):
            say(line)
        if run.first < ours.train.steps:
            on_first_process(lambda: _keep_config(config, run))
        given.on_begin(run)
        run.go()
        transcript.end()
    finally:
        lock.release()


def _keep_config(config: Config, run: Trainer) -> None:
    """Write the run's config.toml, which can be used as a preset: it omits options of this start alone. A resumed run
    keeps its origin."""
    file = Path(config.run_dir) / "config.toml"
    kept = lasting(config)
    if run.checkpoints.saved is not None:
        origin = {key: value for key, value in read_run(file.parent).values.items() if key in ("init", "init_step")}
        kept = dataclasses.replace(kept, **({"init": "", "init_step": "latest"} | origin))
    write_order(config, file.parent, run.order)
    keep_copy(file.parent, again=run.checkpoints.saved is None)
    remember(file.parent, kept.plugins)
    text = to_toml(kept, run.config.optimizer.horizon)
    keep_start(file.parent, run.first, text, given=isinstance(run.data, OwnData) and not config.data.set)
    if not reading.kind(file) or parse_toml(reading.read_bytes(file), str(file)) != tomllib.loads(text):
        write_atomically(file, text)  # otherwise comments in it stay
    run.log.record_config(dataclasses.replace(kept, optimizer=run.config.optimizer))


def _check_length(run: Trainer, config: Config) -> None:
    """Check that a run which continues from an older checkpoint, because newer ones cannot be read, has as many
    steps."""
    if run.config.train.steps != config.train.steps:
        raise RunError(
            f"the run continues after step {run.first}, from which --train.epochs {config.train.epochs:g} are "
            f"{config.train.steps} steps, not {run.config.train.steps}; rerun the command"
        )


def with_layers(config: Config) -> Config:
    """The configuration with numbers for `--mesh.data auto`, by how many devices there are, and for `--pipeline.layers
    auto`, by the plan's times for these GPUs."""
    config = with_data(config, jax.device_count())
    if config.pipeline.layers == "auto":
        validate(config, jax.device_count())
        machine = machine_of_device(jax.devices()[0].device_kind, config.precision)
        config = placed(config, machine)
        say(f"--pipeline.layers auto: {config.pipeline.layers}, by predicted times on {machine.name.upper()}s")
    return config


def checked_program(config: Config) -> Program:
    """The program of a configuration that these devices can train; says on which hosts its groups lie."""
    validate(config, jax.device_count())
    program = Program.on(config)
    for line in host_lines(program.mesh, hosts_of_processes()):
        say(line)
    check_attention(program)
    check_memory(program, training=True, rows=config.train.microbatch)
    check_own(config, program)
    return program


def check_own(config: Config, program: Program) -> None:
    """Trace a step if it has code of the user's, whose mistakes are `UserError`s, before anything is written."""
    if config.plugins or config.own_loss:
        train_step(program).trace(program.layout.shapes, program.batch_types)


def earlier_optimizer(config: Config, run_dir: Path, model: Horizon = UNKNOWN) -> OptimizerConfig | None:
    """The optimizer of a run's last start; None for a new run. Checks that cooldown and `--profile` are within the
    run's steps, unless these depend on its data (`train.epochs`)."""
    earlier, steps = stored_optimizer(run_dir, config), config.train.steps
    if config.profile and 0 < steps < profiled_steps(config.profile, 0, steps)[1]:
        raise UserError(f"--profile {config.profile}: training ends after step {steps}; valid: steps up to {steps}")
    if not config.train.epochs:
        with_total_steps(config, None, config.optimizer.kept_of(earlier, model))
    return earlier


def make_data(config: Config, folder: Path, run_dir: Path, supplied: Supplied = NOTHING) -> list[str]:
    """Make the data of the run in `run_dir` in `folder`, unless it is there or `supplied`; returns the folders of its
    corpora, if it has any. One process calls this, then all may `open_data`."""
    is_new = not has_checkpoints(run_dir)
    if not is_new:
        put_back_copy(run_dir, folder)
    if supplied.tokenizer is not None:
        keep_tokenizer(supplied.tokenizer, config, folder, "the tokenizer of the model", "another run_dir")
    if supplied.data is not None:
        return default_corpora(config)
    if is_new and supplied.state is None:
        check_first_weights(config)
    if not config.pretrains:
        with phase("reading the records of the task"):
            make_task_data(config, folder, again=is_new)
        return []
    if config.init and (is_new or not reading.kind(folder / "tokenizer")):
        keep_init_tokenizer(config, folder)
    return make_run_data(config, folder, corpora_before(run_dir, config))


def open_data(config: Config, folder: Path, corpora: Sequence[str] = ()) -> RunData | TaskData | OwnData:
    """The training data of a run, on any process; `corpora` as in `open_run_data`."""
    return open_run_data(config, folder, corpora=corpora) if config.pretrains else open_task_data(config, folder)


def _is_finished(run_dir: Path, steps: int) -> bool:
    """Whether a run of a task has a checkpoint of its last step and recorded figures on dev."""

    def look() -> list[int]:
        recorded = any(record["step"] == steps and is_of_dev(record) for record in read_metrics(run_dir))
        return [recorded and steps in complete(run_dir / "checkpoints")]

    return any(on_first_process(look))


def with_total_steps(config: Config, samples: Any, kept: Horizon = UNKNOWN, order: Order | None = None) -> Config:
    """The configuration with the end of training and the schedule in steps; epochs are those of the training
    `samples`, which are drawn in an `order`, and `kept` is what a resumed run keeps of its horizon."""
    train, end = config.train, 0
    if train.epochs:
        sizes = order.sizes if order else train.batch_sizes
        end = max(1, sizes.steps(math.ceil(Fraction(str(train.epochs)) * samples.epoch_size)))
        config = dataclasses.replace(config, train=dataclasses.replace(train, steps=min(train.steps or end, end)))
    config = config.with_decay(kept._replace(decay_steps=kept.decay_steps or end))
    check_cooldown(config.optimizer)
    return config
