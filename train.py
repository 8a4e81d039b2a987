"""Pretrain or fine-tune a model: `python train.py PRESET [--flag value ...]`; `python train.py demo --help` lists every
flag."""

import sys

from megajax.host.ending import run


def main() -> None:
    """Run the command line."""
    from megajax.commands import train

    train.main(sys.argv[1:], "train.py")


if __name__ == "__main__":
    run(main)
