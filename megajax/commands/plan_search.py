"""`megajax plan PRESET --devices N --search`: all meshes of N GPUs, ranked."""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from megajax.commands.plots import check_plot, plot_atomically
from megajax.config import Config
from megajax.errors import UserError
from megajax.options import Option, between
from megajax.plan.h200 import compiles_for
from megajax.plan.machines import Machine
from megajax.settings.flags import Parser, add_flag
from megajax.settings.launch import imagine_devices

_DEVICES = Option("devices", int, 0, "GPUs to search the meshes of", between(1, 100_000))
_BEST = Option("best", int, 10, "how many are listed", between(1, 1000))
_COMPILED = 2  # of the best
MOST_SIMULATED = 1024  # which take JAX seconds; some thousands, minutes


def add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--search",
        action="store_true",
        help="rank every mesh of --devices GPUs, schedule, microbatch and memory option that fits by predicted "
        "tokens/s; what is given as a flag stays",
    )
    add_flag(group, _DEVICES, "those of the mesh")
    add_flag(group, _BEST, _BEST.default)
    group.add_argument(
        "--plot", metavar="FILE", type=os.path.expanduser, help="a PNG or SVG of memory and time of all that fit"
    )


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags of a search without `--search`."""
    for name in ("devices", "best", "plot"):
        if getattr(args, name, None) is not None and not args.search:
            raise UserError(f"--{name} without --search; valid: --search, or without --{name}")


def print_search(
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

    from megajax.plan.compiled import compiled_step
    from megajax.plan.picture import draw_search
    from megajax.plan.ranking import figures, lines
    from megajax.plan.search import VARIED, search

    count = getattr(args, "best", _BEST.default)
    found = search(config, devices, machine, given=[key for key in VARIED if key in given], count=count)
    planned = found.best[:_COMPILED] if compiles else []
    compiled = [compiled_step(scanned(each.config), gpus=gpus) for each in planned]
    if plot:
        title = f"{args.preset} on {devices} {machine.name}: {len(found.fitting)} of {found.tried} fit"
        with plot_atomically(plot) as new:
            draw_search(new, title, found, machine)
    about = args.preset, original, machine, compiled
    print(json.dumps(figures(found, *about)) if args.json else "\n".join(lines(found, *about)))


def scanned(config: Config) -> Config:
    """With the layers as one scan: the same step, in a program that does not grow with their number."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers="true"))
