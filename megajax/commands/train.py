"""`megajax train`, also `train.py`: pretrain or fine-tune a model from a preset and flags."""

import dataclasses
from collections.abc import Sequence

from megajax.core.errors import UserError
from megajax.data.text.inputs import check_input
from megajax.host.paths import check_path, check_place, in_store
from megajax.host.streams import output
from megajax.runs.store import run_folder
from megajax.settings.checks import check_given
from megajax.settings.config import Config
from megajax.settings.flags import print_left_out, read_command
from megajax.settings.validation import validate, with_data
from megajax.start.launch import known_devices


def main(argv: Sequence[str], prog: str = "megajax train") -> None:
    """Train, or do what `--print-config` or `--dry-run` say instead."""
    command = read_command(argv, "Pretrain or fine-tune a model on any mesh of devices.", prog)
    if command.print_config:
        from megajax.settings.origins import printed

        print(printed(command.config(decay_follows=False), command.preset, command.overrides))
        return
    config = command.config(decay_follows=False)
    if in_store(config.run_dir) and config.seeds > 1:
        raise UserError(f"--seeds {config.seeds}: {config.run_dir} is in a store; valid: a folder, or --seeds 1")
    if not command.dry_run:
        output.is_optional()
    print_left_out(command, config)
    _check_paths(config)
    check_given(config)
    if not config.distributed.coordinator and (count := known_devices(config.simulate_devices)):
        validate(with_data(config, count), count)
    config = dataclasses.replace(config, run_dir=str(run_folder(config.run_dir, "--run-dir")))
    if command.dry_run:
        from megajax.training.dry_run import dry_run

        dry_run(config)
    elif config.seeds > 1:
        from megajax.training.seeds import train_seeds

        train_seeds(config)
    else:
        from megajax.training.begin import train

        train(config)


def _check_paths(config: Config) -> None:
    """Refuse paths in the configuration that cannot be accessed, and a run directory that cannot be made."""
    if not in_store(config.run_dir):
        check_place(config.run_dir, "--run-dir")
    for flag, path in config.data.texts:
        check_input(path, flag)
    named = [("--tokenizer.path", config.tokenizer.path), ("--init", "" if in_store(config.init) else config.init)]
    named += [("--data.train", path) for path in config.data.train]
    named += [("--data.dev", path) for path in config.data.dev]
    for flag, path in named:
        if path:
            check_path(path, flag)
