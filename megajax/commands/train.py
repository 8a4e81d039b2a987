"""`train.py`: pretrain or fine-tune a model from a preset and flags."""

from collections.abc import Sequence

from megajax.config import Config
from megajax.data.inputs import check_input
from megajax.flags import parse
from megajax.paths import check_path, check_place


def main(argv: Sequence[str]) -> None:
    """Train, or with `--profile-pipeline` measure the stages of a pipeline.

    Raises:
        UserError: a flag, the preset or the data cannot be used.
        RunError: the training cannot go on.
    """
    config = parse(argv, "Pretrain or fine-tune a model on a (data, pipe, tensor) mesh.")
    _check_paths(config)
    if config.profile_pipeline:
        from megajax.training.profile import profile_pipeline

        profile_pipeline(config)
    elif config.seeds > 1:
        from megajax.training.seeds import train_seeds

        train_seeds(config)
    else:
        from megajax.training.begin import train

        train(config)


def _check_paths(config: Config) -> None:
    """Raises `UserError` where a path of the configuration cannot be looked at, or the run directory not be made."""
    if not config.profile_pipeline:
        check_place(config.run_dir, "--run-dir")
    texts = [("--data.path", config.data.path)] + [("--data.sources", source.path) for source in config.data.sources]
    texts += [("--data.validation", entry.path) for entry in config.data.validation]
    for flag, path in texts:
        if path:
            check_input(path, flag)
    named = [("--tokenizer.path", config.tokenizer.path)]
    named += [("--data.train", path) for path in config.data.train]
    named += [("--data.dev", path) for path in config.data.dev] + [("--init", config.init)]
    for flag, path in named:
        if path:
            check_path(path, flag)
