"""A run directory: whether a run may start or resume in it, and its configuration."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.models.freeze import names_of
from megajax.core.optim.config import OWN, OptimizerConfig
from megajax.core.options import options
from megajax.core.precision import MAIN_DTYPE
from megajax.core.traits import Changes
from megajax.data.text.indexed import prepared_prefix
from megajax.data.text.tokenizers import is_tokenizer_folder
from megajax.host.files import put_back
from megajax.runs.lock import RunLock
from megajax.runs.metrics import read_metrics
from megajax.runs.order import Order, known_corpora, next_order
from megajax.runs.ownership import (
    IMPORTED,
    MARK,
    MARKED,
    check_entries,
    check_format,
    check_outside_runs,
    entries,
    mark,
    marked_format,
)
from megajax.runs.step_folders import candidates, named
from megajax.settings.config import Config
from megajax.settings.option_errors import compared
from megajax.settings.presets import read_run, resolve


def check_claim(run_dir: Path, config: Config) -> None:
    """Check that `--resume` allows using the run directory."""
    flag = f"--run-dir {run_dir}"
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{flag} is a file; valid: a folder, or a path that does not exist")
    check_outside_runs(run_dir, "--run-dir")
    present, run_format = entries(run_dir), marked_format(run_dir)
    never = "--resume never, but " if config.resume == "never" else ""
    if present and run_format is None:
        holds, run = f"{present[0]} instead of a run", "an earlier run"
        if MARK in present:
            holds, run = f"a {MARK} that is not a run's", f"{run}, whose {MARK} is {MARKED.strip()}"
        raise UserError(f"{never}{flag} is not empty and holds {holds}; valid: an empty or new folder, or {run}")
    if present and never:
        raise UserError(f"{never}{flag} already holds a run; valid: a new --run-dir, or --resume auto")
    if run_format is not None:
        check_format(run_format, flag)
        check_entries(run_dir)
    steps = named(run_dir / "checkpoints")
    if config.resume == "must" and not steps:
        valid = "valid: the directory of an earlier run"
        raise UserError(f"--resume must, but --run-dir {run_dir} has no checkpoint; {valid}")
    if steps:
        if not (run_dir / "config.toml").is_file():
            raise UserError(f"{flag} has checkpoints but no config.toml; valid: a complete run directory, or a new one")
        _check_same_run(run_dir, config, trained=max(steps) > 0)


def has_checkpoints(run_dir: Path) -> bool:
    """Whether a run has a checkpoint to resume from."""
    return bool(named(run_dir / "checkpoints"))


def last_start(run_dir: Path, config: Config) -> Config:
    """The configuration of a run's last start. The plugins of this one's `config`, if any, take the place of its."""
    return resolve(read_run(run_dir).values, {"plugins": config.plugins} if config.plugins else {})


def stored_optimizer(run_dir: Path, config: Config) -> OptimizerConfig | None:
    """The optimizer of a run's last start, with its horizon; None if no step was trained."""
    if max(named(run_dir / "checkpoints"), default=0) == 0:
        return None
    preset = read_run(run_dir)
    optimizer = last_start(run_dir, config).optimizer
    return replace(optimizer, **preset.horizon._asdict()) if preset.horizon else optimizer


def start_order(config: Config, run_dir: Path, corpora: Sequence[str]) -> Order:
    """The order of samples of a start that continues a run from its newest checkpoint, with the `corpora` that
    `make_run_data` returned."""
    step = trained_steps(run_dir)
    earlier = last_start(run_dir, config) if step else None
    return next_order(config, run_dir, corpora, earlier, step)


def corpora_before(run_dir: Path, config: Config) -> dict[str, str]:
    """The corpora of a run that has trained (`known_corpora`); empty for another."""
    step = trained_steps(run_dir)
    return known_corpora(last_start(run_dir, config), run_dir, step) if step else {}


def trained_again(config: Config, run_dir: Path) -> str:
    """A warning about another loss than that of a run's last start, or about weights that it froze and this one trains;
    else empty."""
    before = last_start(run_dir, config).train if trained_steps(run_dir) else config.train
    names = [name for name in names_of(before.freeze) if name not in names_of(config.train.freeze)]
    if before.loss != config.train.loss:
        given = " (loss=… in megajax.init)" if before.loss == OWN else ""
        return f"warning: --train.loss {config.train.loss}, while the run was trained with {before.loss}{given}"
    if not names:
        return ""
    return (
        f"warning: --train.freeze no longer has {', '.join(names)}; the first updates of weights that were never "
        "trained are several times too large (docs/finetuning.md)"
    )


def trained_steps(run_dir: Path) -> int:
    """The step of a run's newest checkpoint; 0 if there is none."""
    return max(candidates(run_dir / "checkpoints"), default=0)


def without_checkpoint(run_dir: Path) -> str:
    """A line about recorded steps that no checkpoint has, so that they are trained again; empty if there are none."""
    newest, recorded = trained_steps(run_dir), max((record["step"] for record in read_metrics(run_dir)), default=0)
    if recorded <= newest:
        return ""
    there = f"the newest checkpoint is of step {newest}" if newest else "there is no checkpoint; the run begins anew"
    return f"{run_dir} was trained up to step {recorded}, and {there}"


@contextlib.contextmanager
def claimed(run_dir: Path, config: Config, lock: RunLock) -> Iterator[None]:
    """Check (`check_claim`), mark and lock a run directory for the block that begins the run; after a successful block
    the lock stays. If the block fails and leaves nothing behind, the run directory is restored."""
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    before = {MARK, *entries(run_dir)}
    new = not (run_dir / MARK).exists()
    try:
        check_claim(run_dir, config)
        if marked_format(run_dir) is None:
            mark(run_dir)
        lock.take()
        put_back(run_dir / "data")
        yield
    except BaseException:
        lock.release()
        with contextlib.suppress(OSError):
            if new and before.issuperset(entries(run_dir)):
                (run_dir / MARK).unlink()
                for folder in made:
                    folder.rmdir()
        raise


_FIXED = (Changes.WEIGHTS, Changes.ENDS, Changes.COMPUTATION)  # fixed from a run's first step


def _check_same_run(run_dir: Path, config: Config, trained: bool) -> None:
    """Refuse a model, data or origin other than those that the run began with; mesh, microbatch or learning rate may
    change."""
    earlier = last_start(run_dir, config)
    in_new_run = [*compared(Config, Changes.OPTIMIZER)]  # changing these requires a new run
    in_new_run += compared(Config, Changes.ADAPTERS) if config.lora.rank else ["lora.rank"]
    samples = compared(Config, Changes.SAMPLES) if trained else ()
    for key in (*compared(Config, *_FIXED), *in_new_run, *samples):
        before, now = attrgetter(key)(earlier), attrgetter(key)(config)
        if before != now:
            before, now = (" ".join(each) if isinstance(each, tuple) else each for each in (before, now))
            with_init = f" with --init {run_dir}" if key in in_new_run else ""
            given = " (optimizer=… in megajax.init)" if before == OWN else ""
            valid = f"the same{given}, or another --run-dir{with_init}"
            raise UserError(f"--run-dir {run_dir} holds a run with {key} {before}, not {now}; valid: {valid}")
    if trained and MAIN_DTYPE[earlier.precision] != MAIN_DTYPE[config.precision]:
        raise UserError(
            f"--precision {config.precision}: --run-dir {run_dir} holds a run in {earlier.precision}; "
            f"valid: {earlier.precision}"
        )
    _check_not_narrower(config, earlier, f"--run-dir {run_dir}")
    can_be_made = trained and not earlier.init and not (run_dir / IMPORTED).is_file()
    is_there = any(is_tokenizer_folder(run_dir / name / "tokenizer") for name in ("", "data"))
    paths = [source.path for source in config.data.sources] or [config.data.path]
    is_text = config.data.train or not all(not path or prepared_prefix(path) for path in paths)
    if is_text and not (can_be_made or is_there or config.tokenizer.path or config.init):
        raise UserError(
            f"--tokenizer.path missing: {run_dir} lacks the tokenizer that its weights came with; "
            "valid: the folder of their tokenizer, or a tokenized dataset as --data.path"
        )
    _check_origin(run_dir, config, earlier)


def _check_origin(run_dir: Path, config: Config, earlier: Config) -> None:
    """Refuse an `--init` other than the one that the run began with, in its `earlier` configuration."""
    init, theirs = config.init, earlier.init
    same = bool(theirs) and Path(init).resolve() == Path(theirs).resolve() and config.init_step == earlier.init_step
    if not init or same:
        return
    imported = (run_dir / IMPORTED).is_file()
    origin = _origin(earlier) if theirs else f"{'imported' if imported else 'fresh'} weights"
    raise UserError(
        f"{_origin(config)}: --run-dir {run_dir} holds a run that started from {origin}; valid: without --init, or "
        "another --run-dir"
    )


def _origin(config: Config) -> str:
    """The flags that name where a run's weights are from."""
    step = "" if config.init_step == options(Config)["init_step"].default else f" --init-step {config.init_step}"
    return f"--init {config.init}{step}"


def stored_config(run_dir: Path, overrides: Mapping[str, Any]) -> Config:
    """The configuration of a run with `overrides`; what concerns a single start, such as the mesh, has its default."""
    preset = {key: value for key, value in read_run(run_dir).values.items() if not key.startswith(_OF_ONE_START)}
    config = resolve(preset, overrides, decay_follows=False)
    earlier = resolve(preset, {key: value for key, value in overrides.items() if key != "precision"})
    _check_not_narrower(config, earlier, str(run_dir))
    return config


def _check_not_narrower(config: Config, earlier: Config, name: str) -> None:
    """fp64 can take weights of any precision, by widening; but fp64 weights would be rounded in another precision."""
    if earlier.precision == "fp64" != config.precision:
        raise UserError(f"--precision {config.precision}: {name} holds a run in fp64; valid: fp64")


_OF_ONE_START = (
    *("mesh.", "pipeline.", "simulate_devices"),
    *("optimizer.gradient_dtype", "optimizer.overlap_reductions", "optimizer.overlap_gathers"),
)
