"""`megajax eval`, also `eval.py`: evaluate a run's checkpoint on a task."""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax.commands import harness
from megajax.core.errors import UserError
from megajax.core.options import Option, Range, suggest
from megajax.data.tasks.registry import TASKS
from megajax.data.text.inputs import check_input
from megajax.evaluation.options import OVERLAPPING, PAPER_OVERLAP, PRETRAINED
from megajax.host import completion
from megajax.runs.ownership import check_outside_runs
from megajax.runs.store import run_folder
from megajax.settings.flags import Parser, add_flag
from megajax.start.launch import check_mesh_of_flags

USAGE = "TASK --checkpoint RUN [RUN ...] [--step N|latest|best] [--data PATH [PATH ...]] [--flag value ...]"
CONFIG_FLAGS = ("mesh", "pipeline.vocabulary", "distributed", "simulate_devices", "precision", "train.microbatch")
START_FLAGS = ("plugins", "compilation_cache", "compilation_cache_size")
TASK_FLAGS = ("doc_stride", "question_tokens", "answer_tokens", "n_best", "null_threshold", "option_tokens", "strict")
NAMES = sorted([*PRETRAINED, *TASKS])
_ANSWERED = ", ".join(name for name, task in TASKS.items() if not task.continues_text)
_ANY = Range(lambda _: True, "")  # the largest valid overlap depends on the run


def main(argv: Sequence[str], prog: str = "megajax eval") -> None:
    """Restore the checkpoints given on the command line, run the task, and print its figures as JSON."""
    if argv and argv[0] == "harness":
        harness.main(argv[1:], prog)
        return
    parser = Parser("Evaluate a trained model on a task.", f"{prog} {USAGE}")
    others = "; or harness TASKS: those of EleutherAI's lm-eval (harness --help)"
    parser.add_argument("task", metavar="TASK", choices=[*NAMES, "harness"], help=f"one of {', '.join(NAMES)}{others}")
    runs = f"run directory; for {_ANSWERED} several form an ensemble (mean probabilities)"
    parser.add_path("--checkpoint", metavar="RUN", nargs="+", required=True, help=runs)
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    parser.add_weights()
    data = f"file to evaluate on; one or more for {', '.join(TASKS)} [perplexity: the validation split; "
    parser.add_path("--data", default=[], metavar="PATH", nargs="+", help=f"{data}tasks: the run's dev files]")
    overlap = "tokens that each window advances by and scores; perplexity: a whole sequence by default"
    add_flag(parser, Option("overlap", int, PAPER_OVERLAP, overlap, _ANY))
    predictions = f"file to write the answers to; for {_ANSWERED}"
    parser.add_path("--predictions", default="", metavar="FILE", help=predictions)
    parser.add_config_flags(*CONFIG_FLAGS, *START_FLAGS, *(f"task.{name}" for name in TASK_FLAGS))
    task = argv[0] if argv and argv[0].isidentifier() else NAMES[0]
    if task not in NAMES and ("_" in task or not suggest(task, [*NAMES, "harness"], "")) and not completion.asked():
        theirs = f"for a task of lm-eval: {prog} harness {task}"
        raise UserError(f"TASK {task!r}; valid: {', '.join(NAMES)}; {theirs}")
    args = parser.parse_args(argv)
    for path in args.data:
        check_input(path, "--data")
    if args.predictions:
        if args.task not in TASKS or TASKS[args.task].continues_text:
            raise UserError(f"--predictions is not for {args.task}; valid: {_ANSWERED}")
        check_outside_runs(Path(args.predictions), "--predictions")
    overrides = parser.overrides(args)
    check_mesh_of_flags(overrides)
    result = _finetuned(args, overrides) if args.task in TASKS else _pretrained(args, overrides)
    from megajax.host.processes import is_first_process

    if is_first_process():
        finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in result.items()}
        print(json.dumps(finite, allow_nan=False))


def _finetuned(args: Namespace, overrides: dict[str, Any]) -> dict[str, Any]:
    if "overlap" in args:
        raise UserError(f"--overlap: {args.task} does not take it; valid: {' or '.join(OVERLAPPING)}")
    from megajax.evaluation.finetuned import evaluate_task

    runs = [run_folder(path, "--checkpoint") for path in args.checkpoint]
    return evaluate_task(
        args.task, runs, step=args.step, data=args.data, overrides=overrides, predictions=args.predictions
    )


def _pretrained(args: Namespace, overrides: dict[str, Any]) -> dict[str, Any]:
    options = {"overlap": args.overlap} if "overlap" in args else {}
    if options and args.task not in OVERLAPPING:
        raise UserError(f"--overlap: {args.task} has no windows; valid: {' or '.join(OVERLAPPING)}")
    for flag, paths in (("--checkpoint", args.checkpoint), ("--data", args.data)):
        if len(paths) > 1:
            raise UserError(f"{flag}: {len(paths)} paths, but {args.task} takes one; valid: one path")
    of_tasks = [f"--{key}" for key in overrides if key.startswith("task.")]
    if of_tasks:
        raise UserError(f"{of_tasks[0].replace('_', '-')} is not for {args.task}; valid: {', '.join(TASKS)}")
    from megajax.evaluation.pretrained import EVALUATIONS

    data = args.data[0] if args.data else ""
    run_dir = run_folder(args.checkpoint[0], "--checkpoint")
    return EVALUATIONS[args.task](run_dir, step=args.step, data=data, overrides=overrides, **options)
