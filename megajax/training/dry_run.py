"""`megajax train PRESET --dry-run`: everything before the first step, leaving nothing behind.

Text is tokenized into a temporary folder (`TMPDIR`); if a run would be resumed, its data is read in place.
"""

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path

import jax

from megajax.core.errors import UserError
from megajax.core.optim.config import Horizon
from megajax.core.options import counted
from megajax.core.program.program import Program
from megajax.data.text.corpus import has_only_tokenizer
from megajax.data.text.inputs import read_folders
from megajax.data.text.tokenizers import is_tokenizer_folder
from megajax.host.phases import watched
from megajax.host.processes import is_first_process, on_first_process, say
from megajax.plan.compiled import traced_step
from megajax.runs.data import has_whole_run_data
from megajax.runs.directory import check_claim, corpora_before, has_checkpoints, start_order, trained_steps
from megajax.runs.step_folders import complete
from megajax.runs.task_data import has_task_data
from megajax.settings.config import Config
from megajax.settings.validation import check_ramp
from megajax.start.launch import start
from megajax.training.begin import (
    checked_program,
    earlier_optimizer,
    make_data,
    open_data,
    with_layers,
    with_total_steps,
)
from megajax.training.describe import describe
from megajax.training.display import Display
from megajax.training.given import NOTHING, Supplied
from megajax.training.own_data import registered_data
from megajax.training.seeds import seed_runs


def dry_run(config: Config) -> None:
    """Check a run (the first one of several seeds), read its data, print its memory plan and compile its step."""
    start(config)
    if config.seeds > 1:
        config = seed_runs(config)[0]
    config = with_layers(config)
    program = checked_program(config)
    lines: list[str] = []

    def read() -> list[int]:
        with tempfile.TemporaryDirectory(prefix="megajax-dry-run-") as folder:
            found = _read_data(config, program, Path(folder), lines)
        return [found.train.steps, *found.optimizer.horizon]

    display = Display(is_first_process())
    with watched(display.phase):
        steps, *horizon = on_first_process(read)  # so that every process compiles the same step
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    config = config.with_decay(Horizon(*horizon))
    say("\n".join(lines))
    began = time.perf_counter()
    with display.phase("compiling the step"):
        compiled = traced_step(config, jax.devices()).lower().compile()
    seconds, needed = time.perf_counter() - began, compiled.memory_analysis()
    say(
        f"compiled the step in {seconds:.1f} s: {needed.argument_size_in_bytes / 2**20:,.1f} MiB "
        f"of state and batch per device, {needed.temp_size_in_bytes / 2**20:,.1f} MiB of "
        "temporaries"
    )
    steps, done = config.train.steps, max(complete(Path(config.run_dir) / "checkpoints"), default=0)
    would = f"the same command would train steps {done + 1} to {steps} in {config.run_dir}"
    if done >= steps:
        would = f"there would be nothing to train: {config.run_dir} already has {counted(done, 'step')}"
    say(f"dry run: nothing was trained or kept; without --dry-run {would}")


def _read_data(config: Config, program: Program, folder: Path, lines: list[str]) -> Config:
    """The configuration with its length in steps, for a run's data; appends to `lines` what the run would print."""
    run_dir = Path(config.run_dir)
    check_claim(run_dir, config)
    earlier = earlier_optimizer(config, run_dir)
    _check_apart(config, run_dir)
    data_dir = run_dir / "data"
    trained, read = trained_steps(run_dir) > 0, has_checkpoints(run_dir) and has_task_data(data_dir)
    made = has_whole_run_data(config, data_dir, corpora_before(run_dir, config)) if config.pretrains else read
    if not config.data.set and not made:
        if has_only_tokenizer(data_dir) or (trained and is_tokenizer_folder(data_dir / "tokenizer")):  # of the weights
            shutil.copytree(data_dir / "tokenizer", folder / "data" / "tokenizer")
        data_dir = folder / "data"
    supplied = Supplied(data=registered_data(config, program)) if config.data.set else NOTHING
    corpora = make_data(config, data_dir, run_dir, supplied)
    data = supplied.data or open_data(config, data_dir, corpora)
    data.train[0]
    order = start_order(config, run_dir, corpora)
    check_ramp(config, order.sizes, order.parts[-1].step)
    config = with_total_steps(config, data.train, config.optimizer.kept_of(earlier), order)
    lines.append(describe(config, Program(config, program.mesh), data, order, earlier))
    return config


def _check_apart(config: Config, run_dir: Path) -> None:
    """Refuse a run directory inside a folder that is read as data."""
    for flag, path in config.data.texts:
        if any(read.resolve() in (run_dir / "data").resolve().parents for read in read_folders(path, flag)):
            raise UserError(
                f"{flag} {path}: this folder is read as data, and {run_dir} lies in it; valid: a --run-dir outside it"
            )
