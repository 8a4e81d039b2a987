# PYTHON_ARGCOMPLETE_OK
"""The command `megajax COMMAND [--flag value ...]`, also `python -m megajax COMMAND`."""

import importlib
import signal
import sys
from collections.abc import Callable, Sequence

import megajax
from megajax.core.errors import UserError
from megajax.host import completion

COMMANDS = {  # name -> description; `megajax.commands.NAME.main` takes the arguments
    "convert": "Import a model from the Hugging Face format, or export a run to it.",
    "eval": "Evaluate a trained model on a task.",
    "generate": "Generate text with a trained model.",
    "plan": "Estimate a run's memory, communication and time on a mesh, without the hardware.",
    "prepare": "Turn raw text into a tokenized dataset: clean, deduplicate, remove test sets, tokenize.",
    "replay": "Run steps of a run again, on any mesh, and compare them with what was recorded.",
    "schedule": "Print and draw a pipeline schedule: its table, ticks, bubble and chunks in flight.",
    "train": "Pretrain or fine-tune a model from a preset.",
    "verify": "Check a scaled-down model on your mesh against one device, on simulated devices.",
}
_OTHERS = {  # what other programs call theirs -> ours
    "chat": "generate --checkpoint RUN --interactive",
    **dict.fromkeys(("export", "export-hf"), "convert export-hf RUN PATH"),
    **dict.fromkeys(("import", "import-hf"), "convert import-hf PATH RUN"),
    "finetune": "train PRESET --init RUN (docs/finetuning.md)",
    "pretrain": "train PRESET",
    "serve": "convert export-hf RUN PATH, for a server such as vLLM; there is none of ours",
    "sample": "generate --checkpoint RUN",
    "evaluate": "eval TASK --checkpoint RUN",
    "tokenize": "prepare INPUT --output PREFIX",
}
_MODULES = {"eval": "evaluate"}  # modules whose names differ from their commands'


def main(argv: Sequence[str]) -> None:
    """Run the command named on the command line."""
    helps = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    usage = f"megajax COMMAND [--flag value ...]\n\n{helps}\n\nmegajax COMMAND --help lists a command's flags"
    valid = f"valid: {', '.join(COMMANDS)}"
    if completion.asked():
        _complete()
    elif argv and argv[0] in COMMANDS:
        _command(argv[0])(argv[1:])
    elif argv and argv[0] in ("-h", "--help"):
        print(f"usage: {usage}")
    elif argv and argv[0] == "--version":
        print(f"megajax {megajax.__version__}")
    elif argv and (ours := _OTHERS.get(argv[0].lower())):
        raise UserError(f"{argv[0]}: unknown command; valid: megajax {ours}")
    elif argv:
        from megajax.core.options import suggest

        raise UserError(f"unknown command {argv[0]!r}; {suggest(argv[0], [*COMMANDS, '--help', '--version'], valid)}")
    else:
        raise UserError(f"COMMAND missing; {valid}")


def _command(name: str) -> Callable[[Sequence[str]], None]:
    return importlib.import_module(f"megajax.commands.{_MODULES.get(name, name)}").main


def _complete() -> None:
    """Answer a shell that asks for completions."""
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="store_true")
    parser.add_argument("command", choices=COMMANDS)
    _command(completion.command(COMMANDS, parser))([])


def entry() -> None:
    """The installed command `megajax`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before `run` handles it: no traceback from an import
    from megajax.host.ending import run

    run(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
