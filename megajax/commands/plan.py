"""`megajax plan`: what a run needs and takes on a mesh, without its devices."""

import json
import time
from collections.abc import Sequence

from megajax.commands import plan_search
from megajax.options import OneOf, Option
from megajax.plan.h200 import compiles_for
from megajax.plan.machines import MACHINES, peak_of
from megajax.settings.flags import MESH_FLAGS, Parser, add_flag
from megajax.settings.launch import imagine_devices, peak_resident_bytes
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_imagined

_GPU = Option("gpu", str, "h100", "GPU of all devices", OneOf(MACHINES))


def main(argv: Sequence[str]) -> None:
    """Print the plan of a configuration on a mesh."""
    began = time.perf_counter()
    parser = Parser(
        "Say what a training step needs and takes on a mesh, without a device of it: bytes of a device by part, "
        "communication, arithmetic, the pipeline's bubble, a predicted time. The real step is compiled for H200s where "
        "JAX's CUDA packages are installed and they or H100s are asked for, for simulated CPU devices otherwise.",
        f"megajax plan PRESET {MESH_FLAGS} [--gpu NAME] [--flag value ...]",
    )
    values = parser.add_preset(argv)
    add_flag(parser, _GPU, _GPU.default)
    parser.add_argument("--no-compile", action="store_true", help="figures of the model alone, at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    plan_search.add_flags(parser)
    parser.add_config_flags(values=values)
    args = parser.parse_args(argv)
    plan_search.check_flags(args)
    preset, given = load_preset(args.preset), parser.overrides(args)
    config = resolve(preset, given)
    machine = MACHINES[getattr(args, "gpu", _GPU.default)]
    peak_of(machine, config.precision)
    if args.search:
        plan_search.print_search(args, config, resolve(preset, {}), machine, given)
        return
    validate_imagined(config)
    gpus = compiles_for(machine.name)
    compiles = not args.no_compile and (gpus or config.mesh.num_devices <= plan_search.MOST_SIMULATED)
    imagine_devices(config, None if compiles and not gpus else 1)

    from megajax.plan.compiled import compiled_step
    from megajax.plan.report import figures, text

    compiled = compiled_step(plan_search.scanned(config), gpus=gpus) if compiles else None
    plan = figures(args.preset, config, machine, compiled)
    plan |= {"seconds": time.perf_counter() - began, "peak_bytes": peak_resident_bytes()}
    print(json.dumps(plan) if args.json else text(plan, config))
