"""`megajax plan`: what a run needs and takes on a mesh, without a device of it."""

import dataclasses
import json
import resource
import time
from collections.abc import Sequence

from megajax.config import Config
from megajax.flags import Parser, add_flag
from megajax.launch import imagine_devices
from megajax.options import Option
from megajax.plan.machines import machine_of, peak_of
from megajax.presets import load_preset, preset_names, resolve
from megajax.validation import validate_imagined

_GPU = Option("gpu", str, "h100", "GPU of all devices: h100, h200, a100, v100, b200")


def main(argv: Sequence[str]) -> None:
    """Print the plan of a configuration on a mesh.

    Raises:
        UserError: a flag, the preset or the mesh is not valid.
    """
    began = time.perf_counter()
    values = load_preset(argv[0]) if argv and not argv[0].startswith("-") else {}
    parser = Parser(
        "Say what a training step needs and takes on a mesh, without a device of it: bytes of a device by part, "
        "communication, arithmetic, the pipeline's bubble, a predicted time. The real step is compiled for H200s where "
        "JAX's CUDA packages are installed and they or H100s are asked for, for simulated CPU devices otherwise.",
        "megajax plan PRESET [--mesh.data D] [--mesh.pipe P] [--mesh.tensor T] [--gpu NAME] [--flag value ...]",
    )
    parser.add_argument("preset", metavar="PRESET", help=f"a TOML file, or one of {', '.join(preset_names())}")
    add_flag(parser, _GPU, _GPU.default)
    parser.add_argument("--no-compile", action="store_true", help="figures of the model alone, at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_config_flags(values=values)
    args = parser.parse_args(argv)
    config = resolve(load_preset(args.preset), parser.overrides(args))
    machine = machine_of(getattr(args, "gpu", _GPU.default))
    peak_of(machine, config.precision)
    validate_imagined(config)
    imagine_devices(config)

    from megajax.plan.compiled import MOST_SIMULATED, CompiledStep, compiled_step
    from megajax.plan.h200 import compiles_for
    from megajax.plan.report import Plan, figures, text

    compiled: CompiledStep | None = None
    gpus = compiles_for(machine.name)
    if not args.no_compile and (gpus or config.mesh.num_devices <= MOST_SIMULATED):
        compiled = compiled_step(_scanned(config), gpus=gpus)
    plan = Plan(args.preset, config, machine, compiled, time.perf_counter() - began, _peak_bytes())
    print(json.dumps(figures(plan)) if args.json else text(plan))


def _scanned(config: Config) -> Config:
    """With the layers as one scan: the same step, whose program does not grow with their number."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers="true"))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
