"""Evaluate a trained model: `python eval.py TASK --checkpoint RUN [--flag value ...]`. The last line printed is one
JSON object."""

import json
import math
import sys
from pathlib import Path

from megajax.launch import run

USAGE = "eval.py TASK --checkpoint RUN [--step N|latest|best] [--data PATH] [--overlap N] [--flag value ...]"
CONFIG_FLAGS = ("mesh", "pipeline.vocabulary", "distributed", "simulate_devices", "precision", "train.microbatch")


def main() -> None:
    """Parse the command line, restore the checkpoint and run the task."""
    from megajax.errors import UserError
    from megajax.evaluation.tasks import OVERLAPPING, PAPER_OVERLAP, TASKS
    from megajax.flags import Parser, add_flag
    from megajax.options import Option

    parser = Parser("Evaluate a trained model.", USAGE)
    parser.add_argument("task", metavar="TASK", choices=sorted(TASKS), help=f"one of {', '.join(sorted(TASKS))}")
    parser.add_argument("--checkpoint", metavar="RUN", required=True, help="run directory of the training")
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    data = "what to evaluate on [perplexity: the run's validation split]"
    parser.add_argument("--data", default="", metavar="PATH", help=data)
    overlap = "targets that a window advances by and counts; perplexity: a whole sequence if not given"
    add_flag(parser, Option("overlap", int, PAPER_OVERLAP, overlap), PAPER_OVERLAP)
    parser.add_config_flags(*CONFIG_FLAGS)
    args = parser.parse_args(sys.argv[1:])
    own = {"overlap": args.overlap} if "overlap" in args else {}
    if own and args.task not in OVERLAPPING:
        raise UserError(f"--overlap: {args.task} has no windows; valid: {' or '.join(OVERLAPPING)}")
    run_dir, overrides = Path(args.checkpoint), parser.overrides(args)
    result = TASKS[args.task](run_dir, step=args.step, data=args.data, overrides=overrides, **own)
    import jax

    if jax.process_index() == 0:
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in result.items()}
        print(json.dumps(finite, allow_nan=False))


if __name__ == "__main__":
    run(main)
