"""`eval.py`: evaluate a run's checkpoint on a task."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from megajax.errors import UserError
from megajax.evaluation.tasks import OVERLAPPING, PAPER_OVERLAP, TASKS
from megajax.flags import Parser, add_flag
from megajax.options import Option, Range
from megajax.paths import check_path
from megajax.processes import is_first_process

USAGE = "eval.py TASK --checkpoint RUN [--step N|latest|best] [--data PATH] [--overlap N] [--flag value ...]"
CONFIG_FLAGS = ("mesh", "pipeline.vocabulary", "distributed", "simulate_devices", "precision", "train.microbatch")
_ANY = Range(lambda _: True, "")  # how large an overlap may be depends on the run


def main(argv: Sequence[str]) -> None:
    """Restore the checkpoint that the command line names, run the task and print its figures as JSON.

    Raises:
        UserError: a flag, the run or the data cannot be used.
    """
    parser = Parser("Evaluate a trained model.", USAGE)
    parser.add_argument("task", metavar="TASK", choices=sorted(TASKS), help=f"one of {', '.join(sorted(TASKS))}")
    parser.add_argument("--checkpoint", metavar="RUN", required=True, help="run directory of the training")
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    data = "what to evaluate on [perplexity: the run's validation split]"
    parser.add_argument("--data", default="", metavar="PATH", help=data)
    overlap = "targets that a window advances by and counts; perplexity: a whole sequence if not given"
    add_flag(parser, Option("overlap", int, PAPER_OVERLAP, overlap, _ANY), PAPER_OVERLAP)
    parser.add_config_flags(*CONFIG_FLAGS)
    args = parser.parse_args(argv)
    check_path(args.checkpoint, "--checkpoint")
    if args.data:
        check_path(args.data, "--data")
    own = {"overlap": args.overlap} if "overlap" in args else {}
    if own and args.task not in OVERLAPPING:
        raise UserError(f"--overlap: {args.task} has no windows; valid: {' or '.join(OVERLAPPING)}")
    run_dir, overrides = Path(args.checkpoint), parser.overrides(args)
    result = TASKS[args.task](run_dir, step=args.step, data=args.data, overrides=overrides, **own)
    if is_first_process():
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in result.items()}
        print(json.dumps(finite, allow_nan=False))
