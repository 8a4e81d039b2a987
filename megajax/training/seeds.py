"""Fine-tuning with several seeds, one after the other, and their median, as in the paper."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.data.tasks.registry import TASKS
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.host.processes import on_first_process, say
from megajax.runs.metrics import DEV, read_metrics
from megajax.runs.ownership import check_outside_runs, marked_format
from megajax.settings.config import Config
from megajax.start.launch import start
from megajax.training.begin import train_here
from megajax.training.figures import in_words

_REPORT = "seeds.json"
_KIND = "seeds of a task"
_OWN = re.compile(r"seed-\d+|seeds\.json(\.partial.*)?")


def train_seeds(config: Config) -> None:
    """Train with `config.seeds` consecutive seeds from `config.seed`, each in its folder `seed-N` of the run directory.
    Finished seeds are skipped, an interrupted one is resumed. Then `seeds.json` gets the median by the task's figure on
    dev; with an even number, the lower of the two middle ones. Raises what `train` raises."""
    start(config)
    runs, folder = seed_runs(config), Path(config.run_dir)
    for number, own in enumerate(runs, start=1):
        say(f"seed {own.seed} ({number} of {config.seeds}): {own.run_dir}")
        train_here(own, skip_finished=True)
    on_first_process(lambda: _report(config, folder, runs))


def seed_runs(config: Config) -> list[Config]:
    """The configurations for all seeds."""
    folder, last = Path(config.run_dir), config.seed + config.seeds - 1
    if last >= 1 << 31:
        raise UserError(f"--seeds {config.seeds} from --seed {config.seed} on: up to {last}; valid: to {2**31 - 1}")
    on_first_process(lambda: _check_folder(folder))
    return [
        dataclasses.replace(config, seed=seed, seeds=1, run_dir=str(folder / f"seed-{seed}"))
        for seed in range(config.seed, last + 1)
    ]


def _check_folder(folder: Path) -> None:
    """Check that the folder for the seeds holds nothing else."""
    valid = "valid: a new or empty folder, or one with earlier seeds"
    check_outside_runs(folder, "--run-dir")
    there = reading.kind(folder)
    if there and there != "a folder":
        raise UserError(f"--run-dir {folder} is {there}; {valid}")
    if marked_format(folder) is not None:
        raise UserError(f"--run-dir {folder} is the directory of a single run; valid: a new folder, or without --seeds")
    foreign = sorted(name for name in reading.names(folder) if not _OWN.fullmatch(name))
    if foreign:
        raise UserError(f"--run-dir {folder} holds {foreign[0]} instead of the seeds of a task; {valid}")
    file = folder / _REPORT
    if not reading.kind(file):
        return
    try:
        ours = reading.read_json(file)
    except UserError:
        ours = None
    if not isinstance(ours, dict) or ours.get("kind") != _KIND:
        raise UserError(f"{file} was not written by --seeds; valid: another --run-dir, or another name for that file")


def _dev(run_dir: Path, figure: str) -> dict[str, Any]:
    """The figures of a finished run on its dev records, of which `figure` is one, and their step."""
    records = [record for record in read_metrics(run_dir) if record.get(f"{DEV}{figure}") is not None]
    if not records:
        raise UserError(f"{run_dir / 'metrics.jsonl'} has no finite {DEV}{figure}; valid: rerun the command")
    return {name.removeprefix(DEV): value for name, value in records[-1].items()}


def _report(config: Config, folder: Path, runs: list[Config]) -> None:
    figure = TASKS[config.task.name].figure
    done = {run.seed: _dev(Path(run.run_dir), figure) for run in runs}
    ranked = sorted(runs, key=lambda run: done[run.seed][figure])
    middle = ranked[(len(ranked) - 1) // 2]
    median = middle.seed
    checkpoint = Path(middle.run_dir) / "checkpoints" / str(done[median]["step"])
    report = {
        "kind": _KIND,
        "task": config.task.name,
        "figure": figure,
        "median": done[median][figure],
        "median_seed": median,
        "median_run": middle.run_dir,
        "median_checkpoint": str(checkpoint),
        "seeds": [{"seed": run.seed, "run": run.run_dir, **done[run.seed]} for run in runs],
    }
    write_atomically(folder / _REPORT, json.dumps(report, indent=2, allow_nan=False) + "\n")
    for seed, figures in done.items():
        words = in_words(figure, figures[figure], percent=True)
        print(f"seed {seed}: {words}{'  (median)' if seed == median else ''}")
    words = in_words(figure, done[median][figure], percent=True)
    print(f"median {words}: {checkpoint}; written to {folder / _REPORT}", flush=True)
