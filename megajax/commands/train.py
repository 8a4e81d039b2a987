"""`train.py`: pretrain a model from a preset and flags."""

from collections.abc import Sequence

from megajax.flags import parse


def main(argv: Sequence[str]) -> None:
    """Train, or with `--profile-pipeline` measure the stages of a pipeline.

    Raises:
        UserError: a flag, the preset or the data cannot be used.
        RunError: the training cannot go on.
    """
    config = parse(argv, "Pretrain a GPT on a (data, pipe, tensor) mesh.")
    if config.profile_pipeline:
        from megajax.training.profile import profile_pipeline

        profile_pipeline(config)
    else:
        from megajax.training.loop import train

        train(config)
