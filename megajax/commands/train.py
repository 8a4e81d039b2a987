"""`train.py`: pretrain a model by a preset and flags."""

from collections.abc import Sequence

from megajax.flags import parse


def main(argv: Sequence[str]) -> None:
    """Train, or with `--profile-pipeline` measure the stages of a pipeline."""
    config = parse(argv, "Pretrain a GPT on a (data, pipe, tensor) mesh.")
    if config.profile_pipeline:
        from megajax.training.profile import profile_pipeline

        profile_pipeline(config)
    else:
        from megajax.training.loop import train

        train(config)
