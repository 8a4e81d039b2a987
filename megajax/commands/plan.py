"""`megajax plan`: estimate a run on a mesh without the hardware; with `--search` all meshes, ranked."""

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megajax.commands.plots import check_page, check_plot, plot_atomically
from megajax.core.errors import UserError
from megajax.core.options import MORE_THAN_ZERO, OneOf, Option, Range, between
from megajax.host.signals import Stopped, stop_signals
from megajax.plan.h200 import compiles_for
from megajax.plan.machines import MACHINES, Machine, peak_of
from megajax.plan.whole_run import WholeRun, tokens_of
from megajax.settings.config import MOST_SIMULATED, Config
from megajax.settings.flags import MESH_FLAGS, Parser, add_flag
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import check_no_auto, validate_imagined
from megajax.start.launch import imagine_devices, peak_resident_bytes

if TYPE_CHECKING:
    from megajax.plan.compiled import Compilation


class _Several(OneOf):
    """Names with commas between."""

    def problem(self, value: str) -> str:
        return next(filter(None, map(super().problem, value.split(","))), "")


_GPU = Option("gpu", str, "h100", "GPU to plan for; a search takes several, such as h100,h200", _Several(MACHINES))
_DEVICES = Option("devices", int, 0, "number of GPUs to search meshes for; implies --search", between(1, 100_000))
_BEST = Option("best", int, 10, "number of configurations to list", between(1, 1000))
_MARGIN = Option(
    "margin", float, 0.05, "memory to keep free: a share of what a program gets, or from 1 on GiB", between(0, 1000)
)
_TOKENS = Option(
    "tokens", str, "", "tokens of the whole training, such as 15T: days and GPU-hours are printed",
    Range(lambda text: tokens_of(text) is not None, "a number up to 10^18; K, M, B, T: 10^3, 10^6, 10^9, 10^12"),
)  # fmt: skip
_PRICE = Option("price", float, 0.0, "price of an hour of a GPU: with --tokens the cost is printed", MORE_THAN_ZERO)


def main(argv: Sequence[str]) -> None:
    """Print the plan of a configuration on a mesh."""
    began = time.perf_counter()
    gc.set_threshold(200_000, 20, 20)  # tracing makes many long-lived objects, and JAX does work in every collection
    parser = _parser(argv)
    args = parser.parse_args(argv)
    args.search |= hasattr(args, "devices")
    for name in ("best", "all", "plot", "html"):
        if getattr(args, name, None) and not args.search:
            raise UserError(f"--{name} without --search; valid: --search, or without --{name}")
    preset, overrides = load_preset(args.preset), parser.overrides(args)
    config = resolve(preset, overrides)
    check_no_auto(config)
    machines = _machines(args, config.precision)
    run = WholeRun(tokens_of(getattr(args, "tokens", "")) or 0.0, getattr(args, "price", 0.0))
    if run.price and not run.tokens:
        raise UserError("--price without --tokens; valid: both, such as --tokens 15T --price 2")
    if args.search:
        _print_search(args, config, resolve(preset, {}), machines, overrides, run)
    else:
        _print_plan(args, config, machines[0], run, began)


def _parser(argv: Sequence[str]) -> Parser:
    parser = Parser(
        "Estimate what a training step needs on a mesh, without the hardware: memory per device, communication, "
        "arithmetic, the pipeline bubble, and a predicted time. The real step is compiled too: for H200s if JAX's CUDA "
        "packages are installed and H100s or H200s are planned for, otherwise for simulated CPU devices.",
        f"megajax plan PRESET {MESH_FLAGS} [--gpu NAME] [--flag value ...]",
    )
    values = parser.add_preset(argv)
    for option in (_GPU, _MARGIN, _TOKENS, _PRICE):
        add_flag(parser, option)
    parser.add_argument("--no-compile", action="store_true", help="skip compiling; print the analytical estimate only")
    parser.add_argument("--json", action="store_true", help="print a single JSON object")
    group = parser.add_argument_group("search")
    searching = "rank every mesh of --devices GPUs, schedule, microbatch size and memory option that fits, by predicted"
    group.add_argument("--search", action="store_true", help=f"{searching} tokens/s; options given as flags stay fixed")
    add_flag(group, _DEVICES, "the size of the mesh")
    add_flag(group, _BEST)
    every = "list the fastest of all configurations, not the fastest of each kind of mesh"
    group.add_argument("--all", action="store_true", help=every)
    drawing = "draw memory and time of all configurations that fit, as PNG or SVG"
    group.add_argument("--plot", metavar="FILE", type=os.path.expanduser, help=drawing)
    looking = "write a page, for a browser without a network, on which every configuration that fits is a point"
    group.add_argument("--html", metavar="FILE", type=os.path.expanduser, help=looking)
    parser.add_config_flags(values=values)
    return parser


def _machines(args: argparse.Namespace, precision: str) -> list[Machine]:
    """The GPUs to plan for, which must support the precision."""
    margin = getattr(args, "margin", _MARGIN.default)
    names = dict.fromkeys(getattr(args, "gpu", _GPU.default).split(","))
    if len(names) > 1 and (args.plot or not args.search):
        several = f"--gpu {','.join(names)} {'with --plot' if args.search else 'without --search'}"
        raise UserError(f"{several}; valid: one GPU{', or --devices N' * (not args.search)}")
    machines = [dataclasses.replace(MACHINES[name], margin=margin) for name in names]
    for machine in machines:
        if machine.usable <= 0:
            most = f"less than {machine.largest / 2**30:.1f} GiB, what a program gets on one {machine.name.upper()}"
            raise UserError(f"--margin {margin:g}: leaves no memory; valid: {most}")
        peak_of(machine, precision)
    return machines


def _print_plan(args: argparse.Namespace, config: Config, machine: Machine, run: WholeRun, began: float) -> None:
    """Print the plan of one mesh, with what is compiled for it."""
    validate_imagined(config)
    gpus = compiles_for(machine.name)
    compiles = not args.no_compile and (gpus or config.mesh.num_devices <= MOST_SIMULATED)
    imagine_devices(config, None if compiles and not gpus else 1)

    from megajax.core.program.program import Program
    from megajax.plan.figures import figures, text
    from megajax.plan.memory import backend_of
    from megajax.plan.placing import placed
    from megajax.start.fused_forms import check_attention

    config = placed(config, machine)
    if config.model.attention not in ("auto", "blocks"):
        check_attention(Program.abstract(config, backend_of(machine)))

    def shown(compiled: "Sequence[Compilation]") -> str:
        plan = figures(args.preset, config, machine, next(iter(compiled), None), run)
        plan |= {"seconds": time.perf_counter() - began, "peak_bytes": peak_resident_bytes()}
        return json.dumps(plan) if args.json else text(plan, config)

    _print(shown, [config] if compiles else [], gpus)


def _print_search(
    args: argparse.Namespace, config: Config, original: Config, machines: Sequence[Machine], overrides: dict[str, Any],
    run: WholeRun,
) -> None:  # fmt: skip
    """Search meshes of every GPU for `config`, keeping the values in `overrides`, and print the best; `original` is the
    configuration of the preset alone."""
    devices = getattr(args, "devices", None) or config.mesh.num_devices
    plot, page = (Path(file) if file else None for file in (args.plot, args.html))
    if plot:
        from megajax.plan.picture import MARK, draw_search

        check_plot(plot, MARK, "picture of megajax plan")
    if page:
        check_page(page)
    gpus = compiles_for(machines[0].name)
    compiles = len(machines) == 1 and not args.no_compile and (gpus or devices <= MOST_SIMULATED)
    imagine_devices(config, devices if compiles and not gpus else 1)

    from rich.console import Console

    from megajax.plan.page import page_of_search, title_of
    from megajax.plan.ranking import figures, lines
    from megajax.plan.search import VARIED, Found, search
    from megajax.training.display import Display

    count, watch = getattr(args, "best", _BEST.default), Display(console=Console(stderr=True)).phase
    searches, failed = list[tuple[Machine, Found]](), list[UserError]()
    with stop_signals.deferred("the best configurations so far are printed"):
        kept = [key for key in VARIED if key in overrides]
        for machine in machines:
            if stop_signals.number and (searches or failed):
                break
            try:
                result = search(config, devices, machine, given=kept, count=count, of_all=args.all, watch=watch)
                searches.append((machine, result))
            except UserError as error:
                failed.append(error)
        if not searches:
            raise failed[0]
        for failure in failed:
            print(f"warning: {failure}", file=sys.stderr)
        complete = len(searches + failed) == len(machines) and all(result.complete for _, result in searches)
        if page and complete:
            with plot_atomically(page, "--html") as new:
                new.write_text(page_of_search(searches, args.preset, original), encoding="utf-8")
        if plot and complete:
            with plot_atomically(plot) as new:
                draw_search(new, title_of(searches, args.preset), *searches[0])

    def shown(compiled: "Sequence[Compilation]") -> str:
        abouts = [(result, args.preset, original, machine, compiled, run) for machine, result in searches]
        if args.json:
            plans = [figures(*about) for about in abouts]
            return json.dumps(plans[0] if len(machines) == 1 else {plan["gpu"]: plan for plan in plans})
        return "\n\n".join("\n".join(lines(*about)) for about in abouts)

    _print(shown, [plan.config for plan in searches[0][1].checked] if compiles else [], gpus)


def _print(shown: "Callable[[Sequence[Compilation]], str]", configs: Sequence[Config], gpus: bool) -> None:
    """Print what `shown` returns for the compiled steps of `configs`, or for none if a signal has come or comes."""
    from megajax.plan.compiled import Compilation, scanned

    stop = Stopped(stop_signals.number) if stop_signals.number else None
    try:
        lines = shown([] if stop else [Compilation(scanned(config), gpus=gpus) for config in configs])
    except Stopped as raised:
        stop, lines = raised, shown([])
    print(lines)
    if stop:
        raise stop
