"""Evaluate a trained model: `python eval.py TASK --checkpoint RUN [--flag value ...]`. The last line printed is one
JSON object."""

import json
import sys
from pathlib import Path

from megajax.launch import run

USAGE = "eval.py TASK --checkpoint RUN [--step N|latest|best] [--data PATH] [--flag value ...]"
CONFIG_FLAGS = ("mesh", "pipeline.vocabulary", "distributed", "simulate_devices", "precision", "train.microbatch")


def main() -> None:
    """Parse the command line, restore the checkpoint and run the task."""
    from megajax.evaluation.restore import check_run
    from megajax.evaluation.tasks import TASKS
    from megajax.flags import Parser

    parser = Parser("Evaluate a trained model.", USAGE)
    parser.add_argument("task", metavar="TASK", choices=sorted(TASKS), help=f"one of {', '.join(sorted(TASKS))}")
    parser.add_argument("--checkpoint", metavar="RUN", required=True, help="run directory of the training")
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    parser.add_argument("--data", default="", metavar="PATH", help="text to evaluate on [the run's validation split]")
    parser.add_config_flags(*CONFIG_FLAGS)
    args = parser.parse_args(sys.argv[1:])
    run_dir = Path(args.checkpoint)
    check_run(run_dir)
    result = TASKS[args.task](run_dir, step=args.step, data=args.data, overrides=parser.overrides(args))
    import jax

    if jax.process_index() == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    run(main)
