"""Random meshes with random options, each compared with one device exactly, as `megajax verify PRESET … --exact` does,
for all presets.

    python benchmarks/exact_sweep.py --json FILE [--meshes 64] [--presets NAME …] [--seed 0] [--devices 64] [--jobs 2]

What is drawn depends only on seed, preset and number. Four numbers in a row share a mesh and a reference on one device,
and differ in how the step is computed. A line is appended to FILE for each; what is in it is not run again, so it can
be stopped and goes on. The last prints a table by preset. Exit code 1: something differs, or a step does
not run.
"""

import argparse
import dataclasses
import functools
import gc
import json
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.core.axes import AXES
from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.options import options
from megajax.core.pipeline.schedule import SCHEDULES
from megajax.settings.config import Config
from megajax.settings.option_errors import as_flag
from megajax.settings.preset_files import names_in_folders, preset_names
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate
from megajax.verify.beside import beside_training
from megajax.verify.exact import findings
from megajax.verify.fields import ExactStep, run_step
from megajax.verify.forms import plain, steady
from megajax.verify.shrink import shrink
from megajax.verify.verdict import Finding

Values = dict[str, Any]  # overrides of a preset, by key

AXIS_SIZES = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8]
MICROBATCHES = [1, 2, 3, 4, 5, 6, 8]
MOST_DEVICES = [4, 8, 8, 8, 16, 16, 32, 64]  # of a mesh
DIVISIBLE = 5040  # by 1 to 10, so that odd sizes of the mesh can be valid
SIZES: list[list[Values]] = [  # in place of a preset's, one of each row
    [{"model.num_heads": DIVISIBLE, "model.hidden_size": 4 * DIVISIBLE, "model.head_size": 4}],
    [{"model.num_kv_heads": number} for number in (DIVISIBLE, DIVISIBLE // 2, 2, 1)],
    [{"model.mlp_size": number * DIVISIBLE} for number in (3, 16)],
    [{"model.expert_size": DIVISIBLE}],
    [{"model.shared_expert_size": DIVISIBLE}],
    [{"model.num_experts": DIVISIBLE}],
    [{"model.vocab_multiple": DIVISIBLE}],
    [{"model.sequence_length": 2 * DIVISIBLE}],
    [{"model.num_layers": number} for number in (7, 12, 60)],
]
SHARED = 4  # numbers with the same mesh
WHOLE = 8  # of so many numbers one is compared with everything beside the step, too
SOME = 0.15  # how often an option of a preset's model is replaced, or a batch grows
KEPT = ("model.family", "model.head", "model.attention", "pipeline.schedule")  # as presets have them, or drawn below
OTHERS = ("precision", "data.reset_attention")  # beside those of the model, of training and of the optimizer
WAYS = ("sequence_parallel", "train.remat", "model.context_attention", "model.scan_layers")
WAYS += ("optimizer.zero", "optimizer.zero_ranks")
NUMBERS: dict[str, list[Any]] = {
    "train.microbatch": [1, 2],
    "train.ema": [0.0, 0.9],
    "train.freeze": [(), ("embedding",), ("layers.0-1",), ("head", "layers.0.attention")],
    "lora.rank": [0, 0, 4],
    "optimizer.zero_ranks": [0, 1, 2, 3],
    "optimizer.skip_above": [0.0, 2.0],
    "optimizer.clip_norm": [1.0, 1e9],
    "optimizer.weight_decay": [0.0, 0.1],
    "model.dropout": [0.0, 0.1],
    "model.sliding_window": [0, 40, 4000],
    "model.window_layers": ["", "1,1", "2,1"],
    "model.prediction_modules": [0, 1, 2],
    "model.bf16_layers": ["0,0", "1,1", "2,0"],
    "model.expert_capacity": [0.0, 0.5, 1.25],
    "model.router_z_loss": [0.0, 0.001],
    "model.dense_layers": [0, 1],
    "model.experts_per_token": [1, 2, 3],
}


def main() -> None:
    """Run what is missing in the file, and print the table of all in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--meshes", type=int, default=64)
    names = [*preset_names(), *names_in_folders()]
    parser.add_argument("--presets", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    there = {(row["preset"], row["number"]) for row in read(args.json)}
    wanted = [(preset, number) for number in range(args.meshes) for preset in args.presets]
    tasks: dict[tuple[int, str], list[int]] = {}
    for preset, number in wanted:
        if (preset, number) not in there:
            tasks.setdefault((number // SHARED, preset), []).append(number)
    run = functools.partial(compared_all, seed=args.seed, devices=args.devices)
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=8) as pool:
        for rows in pool.imap_unordered(run, tasks.items()):
            for row in rows:
                with args.json.open("a") as file:
                    print(json.dumps(row), file=file)
                print(told(row), flush=True)
    rows = [row for row in read(args.json) if (row["preset"], row["number"]) in wanted]
    print(table(rows))
    sys.exit(any(row["wrong"] for row in rows))


def read(file: Path) -> list[Values]:
    """The rows in a file."""
    return [*map(json.loads, file.read_text().splitlines())] if file.exists() else []


def compared_all(task: tuple[tuple[int, str], list[int]], seed: int, devices: int) -> list[Values]:
    """Compare some numbers of a preset, which share a mesh."""
    (_, preset), numbers = task
    warnings.simplefilter("ignore")  # of a preset that is not complete: they are for its user
    gc.set_threshold(200_000)  # traces are many objects, and none is garbage
    return [compared(preset, number, seed, devices) for number in numbers]


def compared(preset: str, number: int, seed: int, devices: int) -> Values:
    """Draw a mesh, and compare it."""
    values, config = drawn(preset, number, seed, devices)
    began, wrong, checks = time.process_time(), "", 0
    try:
        for finding in found(config, whole=number % WHOLE == WHOLE - 1):
            checks += 1
            wrong = wrong or ("" if finding.passed else f"{finding.name}: {finding.where}")
    except Exception as error:  # what else is wrong with a step is a row, too
        wrong = f"{type(error).__name__}: {error}"
    return {
        "preset": preset,
        "number": number,
        "mesh": str(config.mesh),
        "devices": config.mesh.num_devices,
        "checks": checks,
        "wrong": wrong,
        "seconds": round(time.process_time() - began, 2),
        "command": command(preset, values),
    }


@functools.lru_cache(1)
def reference(config: Config) -> ExactStep:
    """The step on one device."""
    return run_step(config)


def found(config: Config, *, whole: bool) -> Iterator[Finding]:
    """What is compared: the step, or the whole."""
    config = steady(config)
    alone = plain(config)
    model = dataclasses.replace(alone.model, context_attention="auto", scan_layers="auto")
    yield from findings(config, reference(dataclasses.replace(alone, model=model)))
    if whole:
        yield from beside_training(config)


def drawn(preset: str, number: int, seed: int, devices: int) -> tuple[Values, Config]:
    """Overrides of a preset that are valid, and the small configuration that they lead to."""
    of_mesh, own = random.Random(f"{seed} {preset} {number // SHARED}"), random.Random(f"{seed} {preset} {number}")
    while True:
        values = with_mesh(preset, of_mesh, devices)
        for rng, ways in ((of_mesh, False), (own, True)):
            for group in rng.sample(groups := [*proposals(rng, ways)], len(groups)):
                values = with_valid(preset, values, group)
        try:
            return values, shrink(checked(preset, values), devices).config
        except UserError:  # it cannot be shrunk
            continue


def with_mesh(preset: str, rng: random.Random, devices: int) -> Values:
    """A mesh of several devices that is valid for the preset with its own sizes, or with others."""
    while True:
        values: Values = {}
        if rng.random() < 0.5:
            for sizes in SIZES:
                values = with_valid(preset, values, rng.choice(sizes))
        mesh = MeshConfig(**{axis: rng.choice(AXIS_SIZES) for axis in AXES})
        rows = 2 * mesh.row_shards
        batch = {"train.microbatch": 2, "train.global_batch": rows * rng.choice(MICROBATCHES)}
        growth = {"train.ramp_start": rows, "train.ramp_increment": rows, "train.ramp_samples": 100}
        axes = {f"mesh.{axis}": size for axis, size in mesh.sizes.items() if size > 1}
        if 1 < mesh.num_devices <= min(devices, rng.choice(MOST_DEVICES)):
            found = with_valid(preset, values, axes | batch)
            if found != values:
                return with_valid(preset, found, growth) if rng.random() < SOME else found


preset_values = functools.cache(load_preset)


def proposals(rng: random.Random, ways: bool) -> Iterator[Values]:
    """Values to try, one or more at once: ways to compute the same, or all others."""
    if ways:
        schedule = rng.choice(list(SCHEDULES))
        chunks = rng.choice([2, 2, 3]) if SCHEDULES[schedule].chunked else 1
        yield {"pipeline.schedule": schedule, "pipeline.chunks": chunks}
    for key, option in options(Config).items():
        section, choices = key.rpartition(".")[0], NUMBERS.get(key) or option.choices or []
        choices = [False, True] if option.kind is bool else choices
        of_ways = section == "pipeline" or key in WAYS
        known = of_ways or section in ("model", "train", "optimizer", "lora") or key in OTHERS
        often = section != "model" or of_ways or rng.random() < SOME
        if choices and known and often and of_ways == ways and key not in KEPT:
            yield {key: rng.choice(choices)}


def with_valid(preset: str, values: Values, more: Values) -> Values:
    """`values` with `more`, if they are valid together and change anything."""
    try:
        changes = checked(preset, values | more) != checked(preset, values)
    except UserError:
        return values
    return values | more if changes else values


def checked(preset: str, values: Values) -> Config:
    """The configuration, which is valid."""
    config = resolve(preset_values(preset), values)
    validate(config, config.mesh.num_devices)
    return config


def command(preset: str, values: Values) -> str:
    """What repeats it."""
    flags = (
        as_flag(key, " ".join(value) or "none" if isinstance(value, tuple) else value) for key, value in values.items()
    )
    return " ".join(["megajax verify", preset, *flags, "--exact"])


def told(row: Values) -> str:
    """A row as a line, and if something is wrong, what repeats it."""
    verdict = f"DIFFERS: {row['wrong']}\n  {row['command']}" if row["wrong"] else f"equal, {row['checks']} checks"
    return f"{row['preset']} {row['number']}: {row['mesh']}, {row['seconds']:.1f} s: {verdict}"


def table(rows: list[Values]) -> str:
    """Configurations tried and equal, of each preset and of each folder of presets."""
    head = "| preset | configurations | meshes | equal | most devices | CPU seconds each, median and most |"
    lines, names = [head, "|---|---|---|---|---|---|"], list(dict.fromkeys(folder(row["preset"]) for row in rows))
    for name in [*names, "all"]:
        own = [row for row in rows if name in ("all", folder(row["preset"]))]
        meshes, seconds = {(row["preset"], row["mesh"]) for row in own}, [row["seconds"] for row in own]
        equal, devices = sum(not row["wrong"] for row in own), max(row["devices"] for row in own)
        each = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"
        lines.append(f"| {name} | {len(own)} | {len(meshes)} | {equal} | {devices} | {each} |")
    return "\n".join(lines)


def folder(preset: str) -> str:
    """The folder of a preset, or the preset itself if it is in none."""
    return f"{Path(preset).parent}/…" if "/" in preset else preset


if __name__ == "__main__":
    main()
