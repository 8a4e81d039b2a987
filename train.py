"""Pretrain a model: `python train.py PRESET [--flag value ...]`; `python train.py demo --help` lists every flag."""

import sys

from megajax.launch import run


def main() -> None:
    """Parse the command line and train."""
    from megajax.flags import parse

    config = parse(sys.argv[1:], "Pretrain a GPT on a (data, pipe, tensor) mesh.")
    if config.profile_pipeline:
        from megajax.training.profile import profile_pipeline

        profile_pipeline(config)
    else:
        from megajax.training.loop import train

        train(config)


if __name__ == "__main__":
    run(main)
