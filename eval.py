"""Evaluate a trained model: `python eval.py TASK --checkpoint RUN [--flag value ...]`. The last line printed is one
JSON object."""

import signal
import sys


def main() -> None:
    """Run the command line."""
    from megajax.commands import evaluate

    evaluate.main(sys.argv[1:], "eval.py")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before `run` handles it: no traceback from an import
    from megajax.host.ending import run

    run(main)
