"""Pretrain or fine-tune a model: `python train.py PRESET [--flag value ...]`; `python train.py demo --help` lists every
flag."""

import signal
import sys


def main() -> None:
    """Run the command line."""
    from megajax.commands import train

    train.main(sys.argv[1:], "train.py")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C before `run` handles it: no traceback from an import
    from megajax.host.ending import run

    run(main)
