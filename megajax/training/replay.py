"""Steps of a run again, on the same mesh or another one: `megajax replay`.

The run that does it lies in a folder of its own, which begins with the checkpoint and the data of the other one, and is
removed at the end. It is resumed like any run; only what it records is compared.
"""

import contextlib
import dataclasses
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from megajax.core.errors import Damaged, RunError, UserError
from megajax.core.models.router import LOAD
from megajax.core.optim.config import UNKNOWN, Horizon
from megajax.core.program.program import Program
from megajax.host import reading
from megajax.host.files import writable
from megajax.host.processes import of_first_process, on_first_process, say
from megajax.runs.metrics import read_metrics
from megajax.runs.ownership import FORMS, IMPORTED, OF_SAMPLES, mark
from megajax.runs.starts import Start, starts, this_machine
from megajax.runs.step_folders import complete
from megajax.runs.store import store_of
from megajax.runs.stored import fetch
from megajax.runs.trained import check_run
from megajax.settings.checks import check_given
from megajax.settings.config import Config, lasting, to_toml
from megajax.settings.presets import resolve
from megajax.settings.validation import validate
from megajax.start.launch import start
from megajax.training.begin import train_here
from megajax.training.given import Supplied
from megajax.training.loop import Trainer
from megajax.training.reference import init_has_changed
from megajax.training.step_layers import Norms, beside, norms_of_layers
from megajax.training.step_samples import losses_of_samples

_OF_TIME = {"step", "seconds", "data_seconds", "tokens_per_second", "tflops_per_device", "mfu", "resumed_from", LOAD}
_OF_TIME |= {"memory_bytes", "peak_memory_bytes"}
_EXACT = {"tokens", "skipped_steps", "loss_scale"}  # figures that no rounding changes
# The relative difference that rounding makes in a step of a run: of losses, and of other figures, such as the gradient
# norm. It grows with the steps since the checkpoint. docs/operations.md says how it was measured.
ROUNDING = {"fp64": (2e-15, 1e-14), "fp32": (1e-6, 1e-4), "fp16": (4e-6, 2.5e-3), "bf16": (4e-4, 0.15)}
ROUNDING["fp8"] = ROUNDING["bf16"]


def replay(
    run_dir: Path,
    first: int,
    last: int,
    overrides: Mapping[str, Any],
    *,
    plugins: bool = True,
    samples: bool = False,
    layers: bool = False,
) -> None:
    """Train steps of a run again and compare what they record. Raises `RunError` if a step differs.

    Args:
        first, last: the steps.
        overrides: replace values of the run's configuration.
        plugins: whether to load those that the run has.
        samples, layers: what to show of a single step: the losses of its documents; the norms of its layers, on the
            run's own mesh and on the other one.
    """
    check_run(run_dir, "RUN")
    recorded, known = _by_step(run_dir), starts(run_dir)
    with_loss = [step for step, record in recorded.items() if "loss" in record]
    if missing := sorted({*range(first, last + 1)} - {*with_loss}):
        valid = f"steps from {min(with_loss)} to {max(with_loss)}" if with_loss else "a run that has trained"
        lacks = f"{run_dir / 'metrics.jsonl'} lacks step {missing[0]}"
        raise UserError(f"--steps {first}:{last}: {lacks}; valid: {valid}")
    begin = _begin(run_dir, first, known)
    parts = [_at(known, begin), *[each for each in known if begin < each.step < last]]
    if any(each.given for each in parts):
        what = f"{run_dir}: its steps were trained on data that Python code gave"
        raise UserError(f"{what}; valid: steps trained on a corpus, a task or --data.set")
    if not begin and init_has_changed(known[0].preset.values, run_dir):
        raise UserError(f"--steps {first}: --init was trained since {run_dir} began; valid: steps after a checkpoint")
    left_out = () if plugins and "plugins" not in overrides else ("plugins",)
    configs, own = ({each.step: _config(each, of, left_out) for each in parts} for of in (overrides, {}))
    meshes = (own, configs)[not layers :]
    for config in configs.values():
        check_given(config)
    simulated = max(config.simulate_devices for mesh in meshes for config in mesh.values())
    start(dataclasses.replace(configs[parts[0].step], simulate_devices=simulated))
    if jax.process_count() > 1 and (layers or store_of(run_dir)):
        what = "--layers" if layers else f"RUN {run_dir}"
        raise UserError(f"{what} with several processes; valid: one process")
    fetch(run_dir / "checkpoints" / str(begin))
    exact = all(_same_bits(configs[each.step], own[each.step], each) for each in parts)
    since = f"its checkpoint of step {begin}" if begin else "the weights that it began with"
    say(f"steps {first} to {last} of {run_dir} again, from {since}")
    before, norms = _at(known, begin - 1), list[Norms]()
    laid_out = _config(before, overrides, left_out), before.preset.horizon
    stops = {*[each.step for each in parts[1:]], *[first - 1] * (samples or layers), last}

    def show(run: Trainer) -> None:
        """What is wanted of a step, before it is trained."""
        if run.first == first - 1 and layers:
            norms.append(norms_of_layers(run))
        if run.first == first - 1 and samples and len(norms) in (0, 2):  # once
            say("\n".join(losses_of_samples(run, first)))

    def compare() -> list[int]:
        differs, what = compared(recorded, _by_step(folder), begin, laid_out[0].precision, exact)
        return [differs, *what.encode()]

    for mesh in meshes:
        with _workplace(run_dir) as folder:
            on_first_process(partial(_lay_out, run_dir, folder, begin, *laid_out))
            at = begin
            for stop in sorted(stop for stop in stops if stop > begin):
                part, at = _at(parts, at), stop
                horizon = part.preset.horizon or UNKNOWN
                given = Supplied(horizon=horizon, ending="saved" if stop < last else "none", on_begin=show)
                _train(mesh[part.step], folder, stop, given, some=layers)
            differs, *text = on_first_process(compare)
    if layers:
        say("\n".join([f"norms of step {last} on the run's own mesh and on the other one:", *beside(*norms)]))
    line = f"steps {begin + 1} to {last} of {run_dir}: {bytes(text).decode()}"
    if differs:
        raise RunError(line)
    say(line)


def _config(each: Start, overrides: Mapping[str, Any], left_out: Sequence[str]) -> Config:
    """The configuration of a start with `overrides`, without the plugins, which are there from then on. A mesh that
    they name stands for all of it, and on simulated devices they are as many."""
    left_out = (*left_out, *(("mesh.", "pipeline.") if any(key.startswith("mesh.") for key in overrides) else ()))
    values = {key: value for key, value in each.preset.values.items() if not key.startswith(tuple(left_out))}
    config = dataclasses.replace(resolve(values, overrides, decay_follows=False), plugins=())
    if config.simulate_devices and "simulate_devices" not in overrides and config.distributed.num_processes < 2:
        config = dataclasses.replace(config, simulate_devices=config.mesh.num_devices or config.simulate_devices)
    return config


def compared(
    recorded: Mapping[int, Mapping[str, Any]],
    replayed: Mapping[int, Mapping[str, Any]],
    begin: int,
    precision: str,
    exact: bool,
) -> tuple[bool, str]:
    """Whether figures of steps after `begin` differ, bit by bit or by more than rounding, and a line that names the
    first step, or says how near they are."""
    nearest = 0.0, ""
    for step, figures in sorted(replayed.items()):
        for name in [name for name in figures if name in recorded.get(step, {}) and name not in _OF_TIME]:
            value, other = figures[name], recorded[step][name]  # None: it was not finite
            off = 0.0 if value == other else math.inf
            if off and None not in (value, other):
                off = abs(value - other) / max(abs(value), abs(other))
            rounds = not exact and name not in _EXACT
            limit = ROUNDING[precision][not name.startswith("loss")] * (step - begin) * rounds
            if off > limit:
                what = f"{name} {value}, not {other} ({off:.2g} of it"
                bound = f"; rounding in {precision} makes up to {limit:.1g})" if rounds else ")"
                return True, f"step {step} is the first that differs: {what}{bound}"
            nearest = max(nearest, (off, f"{name} of step {step}"))
    if exact or not nearest[0]:
        return False, "the same, bit for bit"
    return False, f"the same up to rounding, at most {nearest[0]:.2g} of the {nearest[1]}"


def _by_step(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The figures of every step of a run."""
    found: dict[int, dict[str, Any]] = {}
    for record in read_metrics(run_dir):
        found.setdefault(record["step"], {}).update(record)
    return found


def _at(known: Sequence[Start], step: int) -> Start:
    """The start that trained the step after `step`."""
    return [each for each in known if each.step <= step or each is known[0]][-1]


def _begin(run_dir: Path, first: int, known: Sequence[Start]) -> int:
    """The step of the newest checkpoint before the step `first`; 0 for the first weights, if there should be none."""
    steps = complete(run_dir / "checkpoints")
    if earlier := [step for step in steps if step < first]:
        return earlier[-1]
    every = _at(known, first - 1).preset.values.get("checkpoint.every", 100)
    needed = (first - 1) // every * every
    if needed:
        gone = f"{run_dir} no longer has its checkpoint of step {needed}, nor an older one"
        valid = "steps from 1" + "".join(f", or from {step + 1}" for step in steps[:1])
        raise UserError(f"--steps {first}: {gone}; valid: {valid}")
    return 0


def _same_bits(config: Config, own: Config, each: Start) -> bool:
    """Whether a replay must give the same bits: it computes the same, on the same kind of devices."""
    here, theirs = this_machine(), each.machine
    if config.bitwise:  # on every mesh, and any number of processes
        return here.rpartition(", ")[0] == theirs.rpartition(", ")[0]
    ours, before = (dataclasses.replace(lasting(one), simulate_devices=0) for one in (config, own))
    return here == theirs and ours == before and (jax.default_backend() == "cpu" or config.deterministic)


@contextlib.contextmanager
def _workplace(run_dir: Path) -> Iterator[Path]:
    """Where the run that replays lies, until it is removed; of several processes beside the run, where all see it."""
    parent = tempfile.gettempdir() if jax.process_count() == 1 else run_dir.absolute().parent
    folder = Path(parent, f"{run_dir.name}.replay-{of_first_process(secrets.randbits(31)):08x}")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lay_out(run_dir: Path, folder: Path, begin: int, config: Config, horizon: Horizon | None) -> None:
    """Make a run directory with what a run had when it had done `begin` steps, after its start with `config`."""
    with writable(folder):
        folder.mkdir(0o700)
        mark(folder)
        (folder / "config.toml").write_text(to_toml(lasting(config), horizon))
        for name in (*OF_SAMPLES, FORMS, IMPORTED):
            if reading.kind(run_dir / name):
                shutil.copy(run_dir / name, folder / name)
        for name in ("data", "tokenizer", f"checkpoints/{begin}"):
            if (run_dir / name).exists():
                shutil.copytree(run_dir.resolve() / name, folder / name, copy_function=os.symlink)


def _train(config: Config, folder: Path, end: int, given: Supplied, some: bool) -> None:
    """Go on in a folder up to a step, and do nothing else; on `some` of the devices, if there are more."""
    recheck = config.train.recheck * (config.mesh.data != 1)
    train = dataclasses.replace(config.train, steps=end, eval_every=0, recheck=recheck)
    checkpoint = dataclasses.replace(config.checkpoint, every=end, minutes=0, keep_best=0)
    nothing: dict[str, Any] = {"evaluate": (), "track": "none", "profile": "", "seeds": 1, "resume": "auto"}
    config = dataclasses.replace(config, run_dir=str(folder), train=train, checkpoint=checkpoint, **nothing)
    if some:
        validate(config, config.mesh.num_devices)
        given = dataclasses.replace(given, program=Program.on(config, jax.devices()[: config.mesh.num_devices]))
    try:
        train_here(config, given=given)
    except Damaged as error:
        raise UserError(f"{str(error).partition('; valid: ')[0]}; valid: steps after another checkpoint") from None
