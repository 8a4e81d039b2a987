"""Random meshes with random options, each compared with one device exactly (`megajax verify PRESET … --exact`), for all
presets.

    python benchmarks/exact_sweep.py --json FILE [--meshes 64] [--presets NAME …] [--seed 0] [--devices 64] [--jobs 2]

What is drawn depends only on seed, preset and number. A line is appended to FILE for each mesh; what is in it is not
run again, so it can be stopped and goes on, and what differs is run again if its line is removed. At the end the table
of docs/correctness.md. Exit code 1: something differs, or a step does not run.
"""

import argparse
import functools
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

from megajax.axes import AXES
from megajax.config import Config, MeshConfig
from megajax.errors import UserError
from megajax.options import as_flag, options
from megajax.pipeline.schedule import SCHEDULES
from megajax.settings.preset_files import names_in_folders, preset_names
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate
from megajax.verify.check import verify
from megajax.verify.shrink import shown, shrink

Values = dict[str, Any]  # overrides of a preset, by key

AXIS_SIZES = [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8]
MICROBATCHES = [1, 2, 3, 4, 5, 6, 8]
MOST_DEVICES = [8, 8, 16, 16, 16, 32, 64]  # of a mesh; most have 2 to 16
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
OF_THE_MODEL = 0.15  # how often what a preset says of its model is replaced
KEPT = ("model.family", "model.head", "model.attention", "optimizer.cooldown_shape")  # as presets have them
NUMBERS: dict[str, list[Any]] = {
    "pipeline.max_deferred": [-1, 0, 1, 3],
    "train.microbatch": [1, 2],
    "train.ema": [0.0, 0.9],
    "train.freeze": [(), ("embedding",), ("layers.0-1",), ("head", "layers.0.attention")],
    "lora.rank": [0, 0, 4],
    "optimizer.skip_above": [0.0, 2.0],
    "optimizer.clip_norm": [1.0, 1e9],
    "optimizer.weight_decay": [0.0, 0.1],
    "model.dropout": [0.0, 0.1],
    "model.sliding_window": [0, 40, 4000],
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
    parser.add_argument("--presets", nargs="+", default=[*preset_names(), *names_in_folders()])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    there = {(row["preset"], row["number"]) for row in read(args.json)}
    wanted = [(preset, number) for number in range(args.meshes) for preset in args.presets]
    tasks = [(*each, args.seed, args.devices) for each in wanted if each not in there]
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=20) as pool:
        for row in pool.imap_unordered(compared, tasks):
            with args.json.open("a") as file:
                print(json.dumps(row), file=file)
            print(told(row), flush=True)
    rows = [row for row in read(args.json) if (row["preset"], row["number"]) in wanted]
    print(table(rows))
    sys.exit(any(row["wrong"] for row in rows))


def read(file: Path) -> list[Values]:
    """The rows in a file."""
    return [*map(json.loads, file.read_text().splitlines())] if file.exists() else []


def compared(task: tuple[str, int, int, int]) -> Values:
    """Draw a mesh, and compare it."""
    preset, number, seed, devices = task
    warnings.simplefilter("ignore")  # of a preset that is not complete: they were for its user
    values, config = drawn(preset, random.Random(f"{seed} {preset} {number}"), devices)
    mesh, began, wrong, checks = shown(config.mesh), time.process_time(), "", 0
    try:
        result = verify(config, compiled=False)
        checks = len(result.verdict.findings)
        wrong = "; ".join([*(f"{each.name}: {each.where}" for each in result.verdict.failed), result.first][:3])
    except Exception as error:  # what else is wrong with a step is a row, too
        wrong = f"{type(error).__name__}: {error}"
    return {
        "preset": preset,
        "number": number,
        "mesh": mesh,
        "devices": config.mesh.num_devices,
        "checks": checks,
        "wrong": wrong,
        "seconds": round(time.process_time() - began, 2),
        "command": command(preset, values),
    }


def drawn(preset: str, rng: random.Random, devices: int) -> tuple[Values, Config]:
    """Overrides of a preset that are valid, and the small configuration that they lead to."""
    while True:
        values = with_mesh(preset, rng, devices)
        for group in rng.sample(groups := [*proposals(rng)], len(groups)):
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
        batch = {"train.microbatch": 2, "train.global_batch": 2 * mesh.row_shards * rng.choice(MICROBATCHES)}
        sizes = {f"mesh.{axis}": size for axis, size in mesh.sizes.items() if size > 1}
        if 1 < mesh.num_devices <= min(devices, rng.choice(MOST_DEVICES)):
            found = with_valid(preset, values, sizes | batch)
            if found != values:
                return found


preset_values = functools.cache(load_preset)


def proposals(rng: random.Random) -> Iterator[Values]:
    """Values to try, one or more at once."""
    schedule = rng.choice(list(SCHEDULES))
    yield {
        "pipeline.schedule": schedule,
        "pipeline.chunks": rng.choice([2, 2, 3]) if SCHEDULES[schedule].chunked else 1,
    }
    for key, option in options(Config).items():
        section = key.rpartition(".")[0]
        choices = NUMBERS.get(key) or option.choices or ([False, True] if option.kind is bool else [])
        ours = section in ("model", "pipeline", "train", "optimizer", "lora") or key in (
            "precision",
            "sequence_parallel",
            "data.reset_attention",
        )
        if ours and choices and key not in (*KEPT, "pipeline.schedule"):
            if section != "model" or key == "model.context_attention" or rng.random() < OF_THE_MODEL:
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
    """Meshes tried and equal of each preset."""
    lines = ["| preset | meshes | equal | devices | CPU seconds each |", "|---|---|---|---|---|"]
    names = list(dict.fromkeys(row["preset"] for row in rows))
    for name in [*names, "all"]:
        own = [row for row in rows if name in ("all", row["preset"])]
        seconds, devices = [row["seconds"] for row in own], [row["devices"] for row in own]
        equal = sum(not row["wrong"] for row in own)
        each = f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}"
        lines.append(f"| {name} | {len(own)} | {equal} | {min(devices)} to {max(devices)} | {each} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
