"""Evaluate a trained model: `python eval.py TASK --checkpoint RUN [--flag value ...]`. The last line printed is one
JSON object."""

import sys

from megajax.host.ending import run


def main() -> None:
    """Run the command line."""
    from megajax.commands import evaluate

    evaluate.main(sys.argv[1:], "eval.py")


if __name__ == "__main__":
    run(main)
