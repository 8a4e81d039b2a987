"""`megajax plan`: what a run needs and takes on a mesh, without its devices; with `--search` all meshes, ranked."""

import argparse
import dataclasses
import gc
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax.commands.plots import check_plot, plot_atomically
from megajax.config import MOST_SIMULATED, Config
from megajax.errors import UserError
from megajax.options import OneOf, Option, between
from megajax.plan.h200 import compiles_for
from megajax.plan.machines import MACHINES, Machine, peak_of
from megajax.settings.flags import MESH_FLAGS, Parser, add_flag
from megajax.settings.launch import imagine_devices, peak_resident_bytes
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_imagined

_GPU = Option("gpu", str, "h100", "GPU of all devices", OneOf(MACHINES))
_DEVICES = Option("devices", int, 0, "GPUs to search the meshes of", between(1, 100_000))
_BEST = Option("best", int, 10, "how many are listed", between(1, 1000))
_COMPILED = 2  # of the best


def main(argv: Sequence[str]) -> None:
    """Print the plan of a configuration on a mesh."""
    began = time.perf_counter()
    gc.set_threshold(20_000, 20, 20)  # tracing makes many objects that live long, and JAX has work in every collection
    parser = Parser(
        "Say what a training step needs and takes on a mesh, without a device of it: bytes of a device by part, "
        "communication, arithmetic, the pipeline's bubble, a predicted time. The real step is compiled for H200s where "
        "JAX's CUDA packages are installed and they or H100s are asked for, for simulated CPU devices otherwise.",
        f"megajax plan PRESET {MESH_FLAGS} [--gpu NAME] [--flag value ...]",
    )
    values = parser.add_preset(argv)
    add_flag(parser, _GPU)
    parser.add_argument("--no-compile", action="store_true", help="figures of the model alone, at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    group = parser.add_argument_group("search")
    searching = "rank every mesh of --devices GPUs, schedule, microbatch and memory option that fits by predicted"
    group.add_argument("--search", action="store_true", help=f"{searching} tokens/s; what is given as a flag stays")
    add_flag(group, _DEVICES, "those of the mesh")
    add_flag(group, _BEST)
    drawing = "a PNG or SVG of memory and time of all that fit"
    group.add_argument("--plot", metavar="FILE", type=os.path.expanduser, help=drawing)
    parser.add_config_flags(values=values)
    args = parser.parse_args(argv)
    for name in ("devices", "best", "plot"):
        if getattr(args, name, None) is not None and not args.search:
            raise UserError(f"--{name} without --search; valid: --search, or without --{name}")
    preset, given = load_preset(args.preset), parser.overrides(args)
    config = resolve(preset, given)
    machine = MACHINES[getattr(args, "gpu", _GPU.default)]
    peak_of(machine, config.precision)
    if args.search:
        _print_search(args, config, resolve(preset, {}), machine, given)
        return
    validate_imagined(config)
    gpus = compiles_for(machine.name)
    compiles = not args.no_compile and (gpus or config.mesh.num_devices <= MOST_SIMULATED)
    imagine_devices(config, None if compiles and not gpus else 1)

    from megajax.plan.compiled import Compilation
    from megajax.plan.report import figures, text

    compilation = Compilation(_scanned(config), gpus=gpus) if compiles else None
    plan = figures(args.preset, config, machine, compilation)
    plan |= {"seconds": time.perf_counter() - began, "peak_bytes": peak_resident_bytes()}
    print(json.dumps(plan) if args.json else text(plan, config))


def _print_search(
    args: argparse.Namespace, config: Config, original: Config, machine: Machine, given: dict[str, Any]
) -> None:
    """Search the meshes for `config`, where values of `given` stay, and print the best; `original` is the preset's
    own."""
    devices = getattr(args, "devices", None) or config.mesh.num_devices
    plot = Path(args.plot) if args.plot else None
    if plot:
        from megajax.plan.picture import MARK

        check_plot(plot, MARK, "picture of megajax plan")
    gpus = compiles_for(machine.name)
    compiles = not args.no_compile and (gpus or devices <= MOST_SIMULATED)
    imagine_devices(config, devices if compiles and not gpus else 1)

    from megajax.plan.compiled import Compilation
    from megajax.plan.picture import draw_search
    from megajax.plan.ranking import figures, lines
    from megajax.plan.search import VARIED, search

    count = getattr(args, "best", _BEST.default)
    found = search(config, devices, machine, given=[key for key in VARIED if key in given], count=count)
    planned = found.best[:_COMPILED] if compiles else []
    compiled = [Compilation(_scanned(each.config), gpus=gpus) for each in planned]
    if plot:
        fit = f"{len(found.fitting):,} of {found.tried:,} configurations fit"
        title = f"{args.preset} on {devices} {machine.name.upper()}s: {fit}"
        with plot_atomically(plot) as new:
            draw_search(new, title, found, machine)
    about = args.preset, original, machine, compiled
    print(json.dumps(figures(found, *about)) if args.json else "\n".join(lines(found, *about)))


def _scanned(config: Config) -> Config:
    """With the layers as one scan: the same step, in a program that does not grow with their number."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers="true"))
