"""The command `megajax COMMAND [--flag value ...]`, also `python -m megajax COMMAND`."""

import importlib
import sys
from collections.abc import Sequence

from megajax.ending import run
from megajax.errors import UserError

COMMANDS = {  # name -> what it does; its arguments are those of `megajax.commands.NAME.main`
    "convert": "Import a model from Hugging Face's format, or export a run to it.",
    "generate": "Continue texts by a trained model.",
    "plan": "Say what a run needs and takes on a mesh, without a device of it.",
    "prepare": "Make a tokenized dataset of text: clean it, drop duplicates and test sets, tokenize it.",
    "schedule": "Print a pipeline schedule: its table, ticks, bubble and chunks in flight.",
    "verify": "Hold a preset on a mesh against one device, in small, on simulated devices.",
}


def main(argv: Sequence[str]) -> None:
    """Run the command that a command line names.

    Raises:
        UserError: there is none of that name, or the command cannot do what its arguments say.
    """
    helps = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    usage = f"megajax COMMAND [--flag value ...]\n\n{helps}\n\nmegajax COMMAND --help lists a command's flags"
    if argv and argv[0] in COMMANDS:
        importlib.import_module(f"megajax.commands.{argv[0]}").main(argv[1:])
    elif argv and argv[0] in ("-h", "--help"):
        print(f"usage: {usage}")
    else:
        given = f"unknown command {argv[0]!r}" if argv else "COMMAND missing"
        raise UserError(f"{given}; valid: {', '.join(COMMANDS)}")


def entry() -> None:
    """The installed command `megajax`."""
    run(lambda: main(sys.argv[1:]))
