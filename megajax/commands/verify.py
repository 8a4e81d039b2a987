"""`megajax verify`: check a scaled-down model on your mesh against one device, on simulated devices."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.options import OneOf, Option, between
from megajax.host.children import children, num_cores
from megajax.host.garbage import rarely_collected
from megajax.plan.machines import MACHINES, peak_of
from megajax.settings.config import Config, DistributedConfig
from megajax.settings.flags import MESH_FLAGS, Parser, add_flag
from megajax.settings.plugins import load_plugins
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_imagined
from megajax.start.launch import in_cluster, peak_resident_bytes, start

if TYPE_CHECKING:
    from megajax.verify.shrink import Shrunk
    from megajax.verify.verdict import Finding

_EXACTLY = 64  # devices at most, where nothing is compiled
_OPTIONS = (
    Option(
        "devices", int, 16, "most devices to simulate, with --exact 64; a larger mesh is folded to fit", between(1, 512)
    ),
    Option("steps", int, 3, "compiled steps, plus one that overflows", between(2, 100)),
    Option("repeats", int, 1, "exact comparisons, each with other random numbers", between(1, 100)),
    Option("gpu", str, "h100", "GPU whose choices `auto` is, in the model's full size", OneOf(MACHINES)),
)


def main(argv: Sequence[str]) -> None:
    """Verify a configuration on a mesh: exit code 0 if nothing differs, 1 if anything does."""
    began = time.monotonic()
    parser = Parser(
        "Check a scaled-down model on your mesh against one device: losses, gradients, weights and "
        "communication, exactly over finite fields, then compiled on simulated CPU devices. "
        "Exit code 0: nothing differs; 1: something differs, and the report says where.",
        f"megajax verify PRESET {MESH_FLAGS} [--flag value ...]",
    )
    values = parser.add_preset(argv)
    for option in _OPTIONS:
        add_flag(parser, option)
    parser.add_argument("--exact", action="store_true", help="only the exact comparison, which compiles nothing")
    parser.add_argument(
        "--optimize", action="store_true", help="compile with full optimization, as training does; slower"
    )
    parser.add_argument("--json", action="store_true", help="print a single JSON object")
    parser.add_config_flags(values=values)
    args = parser.parse_args(argv)
    config = resolve(load_preset(args.preset), parser.overrides(args))
    devices, steps, repeats, gpu = (getattr(args, option.key, option.default) for option in _OPTIONS)
    if args.exact and not hasattr(args, "devices"):
        devices = _EXACTLY
    validate_imagined(config)
    peak_of(MACHINES[gpu], config.precision)
    if in_cluster(os.environ):
        raise UserError(
            "megajax verify runs in one process, but several were started; valid: start it without a launcher"
        )
    with contextlib.ExitStack() as stack:
        beside = None
        if num_cores() > 1:
            beside = stack.enter_context(children(1))(_beside, config, devices, gpu)
        small = _begun(config, devices, gpu, args.exact)  # imports JAX; mistakes above are reported without it

        from megajax.verify.check import verify
        from megajax.verify.report import Report

        report = Report(args.preset, config, small, exact=args.exact, printed=not args.json, began=began)
        try:
            quick = not args.optimize
            result = verify(
                small.config,
                steps=steps,
                quick_compile=quick,
                repeats=repeats,
                compiled=not args.exact,
                beside=beside,
                on_start=report.start,
                on_finding=report.found,
            )
        finally:
            report.stop()
        report.close(result)
    if args.json:
        print(json.dumps(_finite(report.figures(result) | {"peak_bytes": peak_resident_bytes()}), allow_nan=False))
    if not result.passed:
        raise SystemExit(1)


def _begun(config: Config, devices: int, gpu: str, exact: bool) -> "Shrunk":
    """A small version of the configuration, for which JAX is set up: on one device, or simulated ones."""
    from megajax.verify.forms import on_gpu
    from megajax.verify.shrink import fold, shrink

    mesh = MeshConfig() if exact else fold(config.mesh, devices)
    alone = dataclasses.replace(config, precision="fp32", distributed=DistributedConfig(), mesh=mesh)
    start(dataclasses.replace(alone, simulate_devices=mesh.num_devices))
    decided, words = on_gpu(config, MACHINES[gpu])
    small = shrink(decided, devices)
    note = f"auto is what it is in full size on --gpu {gpu}: {words}"
    return dataclasses.replace(small, notes=((note,) if words else ()) + small.notes)


def _beside(config: Config, devices: int, gpu: str) -> "list[Finding]":
    """The checks of programs beside training, in another process. It says nothing: if it dies, this one runs them."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    load_plugins(config.plugins)
    small = _begun(config, devices, gpu, exact=True)

    from megajax.verify.beside import beside_training
    from megajax.verify.forms import steady

    with rarely_collected():
        return [*beside_training(steady(dataclasses.replace(small.config, bitwise=0)))]


def _finite(value: Any) -> Any:
    """`value` with infinities as text and NaN as null, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)
