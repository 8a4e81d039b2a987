"""`megajax replay`: run steps of a run again, on any mesh, and compare them with what was recorded."""

import re
from collections.abc import Sequence

from megajax.core.errors import UserError
from megajax.runs.store import run_folder
from megajax.settings.flags import Parser

FLAGS = (
    *("mesh", "pipeline", "sequence_parallel", "train.microbatch", "train.remat", "optimizer.zero"),
    *("optimizer.zero_ranks", "deterministic", "distributed", "simulate_devices", "plugins"),
    *("compilation_cache", "compilation_cache_size"),
)


def main(argv: Sequence[str]) -> None:
    """Replay the steps that the command line names; a step that differs is a `RunError`."""
    parser = Parser(
        "Run steps of a run again, on any mesh, and compare.",
        "megajax replay RUN --steps FIRST:LAST [--flag value ...]",
    )
    parser.add_path("run", metavar="RUN", help="run directory, in which nothing is written")
    steps = "the steps, both included, or one"
    parser.add_argument("--steps", metavar="FIRST:LAST", required=True, help=steps)
    parser.add_argument("--no-plugins", action="store_true", help="leave out the plugins that the run has")
    samples = "of one step: its documents or records by their losses, with file and row"
    parser.add_argument("--samples", action="store_true", help=samples)
    layers = "of one step: norms of every layer's output and of its gradient, on the run's mesh and on another"
    parser.add_argument("--layers", action="store_true", help=layers)
    parser.add_config_flags(*FLAGS)
    args = parser.parse_args(argv)
    first, _, last = args.steps.partition(":")
    if not re.fullmatch(r"[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", args.steps) or int(last or first) < int(first):
        raise UserError(f"--steps {args.steps}; valid: FIRST:LAST, such as 41:45, or one step, counted from 1")
    if args.samples + args.layers and int(last or first) > int(first):
        raise UserError(f"--{'samples' if args.samples else 'layers'} with --steps {args.steps}; valid: one step")
    overrides = parser.overrides(args)
    if args.layers and not any(key.startswith("mesh.") for key in overrides):
        raise UserError("--layers without another mesh; valid: --mesh.… of one")
    from megajax.training.replay import replay

    shown = {"samples": args.samples, "layers": args.layers}
    replay(run_folder(args.run, "RUN"), int(first), int(last or first), overrides, plugins=not args.no_plugins, **shown)
