"""Whether a run directory may be used: by a new run, or to go on with the run it holds."""

from operator import attrgetter
from pathlib import Path

from megajax.config import Config
from megajax.errors import UserError
from megajax.precision import MAIN_DTYPE
from megajax.presets import load_preset, resolve


def claim(run_dir: Path, config: Config) -> None:
    """Check that the run directory may be used as `--resume` says; write nothing."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run-dir {run_dir} is a file; valid: a folder, or a path that does not exist")
    used = run_dir.is_dir() and any(run_dir.iterdir())
    has_checkpoint = (run_dir / "checkpoints").is_dir() and any(
        entry.name.isdecimal() for entry in (run_dir / "checkpoints").iterdir()
    )
    if config.resume == "never" and used:
        raise UserError(
            f"--resume never, but --run-dir {run_dir} is not empty; valid: an empty or new folder, or --resume auto"
        )
    if config.resume == "must" and not has_checkpoint:
        raise UserError(
            f"--resume must, but --run-dir {run_dir} has no checkpoint; valid: the folder of an earlier run"
        )
    if has_checkpoint:
        if not (run_dir / "config.toml").is_file():
            raise UserError(
                f"--run-dir {run_dir} has checkpoints but no config.toml; valid: a whole run directory, or a new one"
            )
        _check_same_run(run_dir, config)


_LASTING = [  # what a run keeps: the shapes of its weights, and which samples it has seen and holds out
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.sequence_length",
    "model.vocab_size",
    "model.padded_vocab_size",
    "seed",
    "data.validation_fraction",
    "train.global_batch",
]


def _check_same_run(run_dir: Path, config: Config) -> None:
    """A run goes on with the model and the data it began with; mesh, microbatch or learning rate may change."""
    earlier = resolve(load_preset(run_dir / "config.toml"))
    for key in _LASTING:
        before, now = attrgetter(key)(earlier), attrgetter(key)(config)
        if before != now:
            raise UserError(
                f"--run-dir {run_dir} holds a run with {key} {before}, not {now}; valid: the same, or another --run-dir"
            )
    if MAIN_DTYPE[earlier.precision] != MAIN_DTYPE[config.precision]:
        raise UserError(
            f"--precision {config.precision}: --run-dir {run_dir} holds a run in {earlier.precision}; valid: that"
        )
