"""`megajax eval harness TASK ...`: a run on tasks of EleutherAI's lm-eval."""

import json
from collections.abc import Sequence
from typing import Any

from megajax.core.errors import UserError
from megajax.core.options import AT_LEAST_ZERO, Option, suggest
from megajax.runs.store import run_folder
from megajax.settings.flags import Parser, add_flag
from megajax.start.launch import check_mesh_of_flags

_FLAGS = "mesh", "distributed", "simulate_devices", "precision", "compilation_cache", "compilation_cache_size"
_LIMIT = Option("limit", int, 0, "examples of each task; 0: all", AT_LEAST_ZERO)
_FEWSHOT = Option("num_fewshot", int, 0, "solved examples before each question", AT_LEAST_ZERO)


def main(argv: Sequence[str], prog: str) -> None:
    """Evaluate the run on the tasks, and print their figures as JSON."""
    parser = Parser(
        "Evaluate a run on tasks of EleutherAI's lm-eval (pip install -e '.[eval]').",
        f"{prog} harness TASK [TASK ...] --checkpoint RUN [--flag value ...]",
    )
    naming = "tasks or groups of lm-eval, such as hellaswag; separated by spaces or commas"
    parser.add_argument("tasks", metavar="TASK", nargs="+", help=naming)
    parser.add_path("--checkpoint", metavar="RUN", required=True, help="run directory")
    parser.add_argument("--step", default="latest", help="a step, latest, or best (lowest validation loss) [latest]")
    parser.add_path("--include-path", metavar="FOLDER", help="folder with further tasks [none]")
    add_flag(parser, _FEWSHOT, "as the task says")
    add_flag(parser, _LIMIT)
    parser.add_argument("--apply-chat-template", action="store_true", help="ask with the tokenizer's chat template")
    rows = Option("batch_size", int, 0, "rows per device and microbatch; 0: as in training", AT_LEAST_ZERO)
    add_flag(parser, rows)
    parser.add_config_flags(*_FLAGS, "plugins")
    args = parser.parse_args(argv)
    check_mesh_of_flags(parser.overrides(args))
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from megajax.evaluation.harness import MegajaxLM
    except ImportError as error:
        raise UserError(
            f"eval harness: {error.name} is not installed; valid: after pip install -e '.[eval]' -c constraints.txt"
        ) from error
    manager = TaskManager(include_path=args.include_path)
    tasks = [name for word in args.tasks for name in word.split(",") if name]
    for name in tasks:
        if name not in manager.all_tasks:
            near = suggest(name, manager.all_tasks, "valid: lm-eval ls tasks")
            raise UserError(f"TASK {name!r}: lm-eval has none; {near}")
    run_dir = run_folder(args.checkpoint, "--checkpoint")
    model = MegajaxLM(str(run_dir), args.step, getattr(args, "batch_size", 0), **parser.overrides(args))
    fewshot: dict[str, Any] = {"num_fewshot": args.num_fewshot} if "num_fewshot" in args else {}
    report = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager,
        limit=getattr(args, "limit", 0) or None,
        apply_chat_template=args.apply_chat_template,
        bootstrap_iters=0,  # which would fork a process that has used JAX
        **fewshot,
    )
    from megajax.host.processes import is_first_process

    if is_first_process():
        print(json.dumps(report["results"], default=str))
