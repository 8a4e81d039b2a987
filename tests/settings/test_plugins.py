"""Names that a user's module registers."""

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config, user_error

import megajax
from megajax.core.optim.adam import learning_rate
from megajax.core.program.loss import loss_of
from megajax.core.program.program import batch_form
from megajax.host.files import write_atomically
from megajax.runs.directory import last_start, stored_config
from megajax.runs.init import _init_config
from megajax.runs.ownership import mark
from megajax.settings import plugins, registration
from megajax.settings.config import to_toml
from megajax.settings.flags import parse
from megajax.training.run_log import RunLog
from megajax.training.trackers import Tracker

PLUGIN = """
import megajax

megajax.register("activation", "cubed", lambda x: x * x * x)
megajax.register("norm", "none-at-all", lambda config: None)
megajax.register("schedule", "square", lambda over: (1 - over) ** 2)
megajax.register("optimizer", "still", lambda schedule: None)
megajax.register("loss", "entropy", lambda logits, batch: logits.entropy())
megajax.register("metric", "surprise", lambda logits, batch: logits.cross_entropy(batch["targets"]))
megajax.register("data", "mine", lambda config: [[1, 2, 3]])
megajax.register("tracker", "mine", lambda run_dir: None)
megajax.register("pipeline", "mine", lambda stages, microbatches, chunks: None)
"""
Opened = Callable[[Path, dict[str, Any]], megajax.Config]
NAMED = [
    *("--model.activation", "cubed", "--model.norm", "none-at-all", "--optimizer.schedule", "square"),
    *("--optimizer.name", "still", "--train.loss", "entropy", "--train.metrics", "surprise"),
    *("--track", "mine", "--pipeline.schedule", "mine"),
]


pytestmark = pytest.mark.usefixtures("no_names_stay")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(PLUGIN)
    yield tmp_path / "mine.py"
    sys.modules.pop("megajax_plugin_mine", None)


def test_a_flag_names_what_a_plugin_registers_and_a_run_remembers_the_plugin(file: Path) -> None:
    said = user_error(parse, ["demo", *NAMED], "")
    assert said.startswith("--model.activation 'cubed'; valid: auto, gelu, gelu-tanh, swiglu, geglu-tanh, swiglu-c")
    config = parse(["demo", *NAMED, "--plugins", str(file)], "")
    assert (config.model.activation, config.optimizer.name, config.track) == ("cubed", "still", "mine")
    assert config.plugins == (str(file),)
    said = user_error(parse, ["demo", f"--plugins={file}", "--model.activation", "cube"], "")
    assert said.endswith("gelu-tanh, swiglu, geglu-tanh, swiglu-clamped, cubed (did you mean cubed?)")
    own_data = ["demo", "--plugins", str(file), "--data.set", "mine"]
    assert parse(own_data, "").data.path == ""  # the preset's
    assert "--data.set mine with --data.path; valid" in user_error(parse, [*own_data, "--data.path", "x"], "")
    (file.parent / "config.toml").write_text(to_toml(config))
    plugins.remember(file.parent, config.plugins)
    registration._TABLES["activation"].pop("cubed")
    sys.modules.pop("megajax_plugin_mine")
    assert stored_config(file.parent, {}).model.activation == "cubed"


OPENED = {  # each with values by key
    "restore, generate, eval, export-hf": lambda run, values: stored_config(run, values),
    "load_preset": lambda run, values: megajax.load_preset(run / "config.toml", values),
    "train, verify": lambda run, values: parse(
        [str(run / "config.toml"), *(word for name in values.get("plugins", ()) for word in ("--plugins", name))], ""
    ),
    "its copy": lambda run, values: megajax.load_preset(shutil.copy(run / "config.toml", "copy.toml"), values),
    "a base": lambda run, values: megajax.load_preset(_based_on(run / "config.toml"), values),
    "resumed": lambda run, values: last_start(run, dataclasses.replace(tiny_config(), **values)),
    "--init": lambda run, values: _init_config(dataclasses.replace(tiny_config(), init=str(run), **values)),
}


def _based_on(config: Path) -> Path:
    Path("based.toml").write_text(f'base = "{config}"')
    return Path("based.toml")


@pytest.mark.parametrize("opened", OPENED.values(), ids=OPENED)
def test_a_run_of_somebody_else_imports_nothing_that_no_flag_names(opened: Opened, file: Path) -> None:
    """A record of the user's own run does not help a copy of that run, nor other contents, nor another user's file."""
    run, other = file.parent / "theirs", file.parent / "other.py"
    config = dataclasses.replace(tiny_config(), plugins=(str(file),))
    write_atomically(run / "config.toml", to_toml(config))
    mark(run)
    plugins.remember(file.parent / "mine", config.plugins)
    (record,) = (file.parent / "state" / "megajax" / "plugins").iterdir()
    assert record.stat().st_mode & 0o777 == 0o600 and record.parent.stat().st_mode & 0o777 == 0o700
    said = user_error(opened, run, {})
    assert ".toml names plugins, whose code would run, and by your record" in said
    assert said.endswith(f": {file}; valid: --plugins {file}, if you trust that code")
    other.write_text("")
    assert opened(run, {"plugins": [str(other)]}).model == config.model  # moved, so named anew
    assert "megajax_plugin_mine" not in sys.modules
    opened(run, {"plugins": [str(file)]})
    assert sys.modules.pop("megajax_plugin_mine")


@pytest.mark.parametrize("is_file", [True, False])
def test_the_record_of_a_run_has_its_path_and_the_contents_of_its_plugins(
    is_file: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(file.parent)
    run, moved, modules = file.parent / "run", file.parent / "moved", (str(file) if is_file else "mine",)
    write_atomically(run / "config.toml", to_toml(dataclasses.replace(tiny_config(), plugins=modules)))
    plugins.remember(run, modules)
    (record,) = (file.parent / "state" / "megajax" / "plugins").iterdir()
    assert stored_config(run, {}).plugins == modules
    assert sys.modules.pop("megajax_plugin_mine" if is_file else "mine")
    for spoil, mend in (
        (lambda: file.write_text(PLUGIN + "1"), lambda: file.write_text(PLUGIN)),
        (lambda: record.chmod(0o620), lambda: record.chmod(0o600)),
        (lambda: run.rename(moved), lambda: moved.rename(run)),
        (lambda: record.write_text("[1]"), lambda: plugins.remember(run, modules)),
        (lambda: monkeypatch.setenv("XDG_STATE_HOME", "/proc/none"), lambda: plugins.remember(run, modules)),
    ):
        spoil()
        assert "names plugins" in user_error(stored_config, run if run.exists() else moved, {})
        mend()


def test_a_preset_from_a_url_names_no_plugins(file: Path) -> None:
    theirs, mine = file.with_name("theirs.toml"), file.with_name("mine.toml")
    mine.write_text(f'base = "demo"\nplugins = ["{file}"]')
    theirs.write_text(f'base = "{mine.with_suffix("")}"')
    mine.with_suffix("").symlink_to(mine)
    for url in mine.as_uri(), theirs.as_uri():
        assert "names plugins" in user_error(megajax.load_preset, url)
    assert megajax.load_preset(mine).plugins == (str(file),)


def test_what_a_plugin_registers_is_used(file: Path) -> None:
    plugins.load_plugins([str(file)])
    config = tiny_config(optimizer={"schedule": "square", "warmup_steps": 0})
    assert float(learning_rate(5, config.optimizer)) == pytest.approx(config.optimizer.learning_rate / 4)
    np.testing.assert_array_equal(registration._TABLES["activation"]["cubed"](jnp.arange(3)), [0, 1, 8])
    told = user_error(registration._TABLES["activation"]["cubed"], None)
    assert told.startswith("activation cubed: TypeError: ") and told.endswith("; valid: a function of an array")
    megajax.register("activation", "first", lambda x: x[:1])
    told = user_error(registration._TABLES["activation"]["first"], jnp.arange(3))
    assert told == "activation first returned an array of shape [1] for [3]; valid: the same shape"
    form = batch_form(_with(config, loss="entropy", metrics=("surprise",)))
    assert (form.targets, form.measures) == ({"entropy": "targets"}, {"surprise": "targets"})
    assert loss_of(config) is None


def _with(config: megajax.Config, **words: object) -> megajax.Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **words))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("activations", "x", abs), "kind 'activations'; valid: activation, attention-gate, data, family"),
        (("activation", "X", abs), "name 'X'; valid: lowercase"),
        (("activation", "x", 3), "activation x: 3; valid: a function"),
        (("activation", "gelu", abs), "activation gelu is one of megajax's own; valid: another name"),
        (("schedule", "1-sqrt", abs), "schedule 1-sqrt is one of megajax's own; valid: another name"),
        (("pipeline", "1f1b", abs), "pipeline 1f1b is one of megajax's own; valid: another name"),
    ],
)
def test_what_cannot_be_registered_is_told_in_one_line(given: tuple, problem: str) -> None:
    assert problem in user_error(megajax.register, *given)


def test_a_name_can_be_registered_again() -> None:
    """As when a cell of a notebook runs again."""
    for number in range(2):
        megajax.register("metric", "again", lambda logits, batch, number=number: number)
    assert registration._TABLES["metric"]["again"](0, 0) == 1


def test_a_plugin_that_fails_is_told_in_one_line(file: Path) -> None:
    assert "--plugins nothing.here: ModuleNotFoundError" in user_error(plugins.load_plugins, ["nothing.here"])
    assert "--plugins none.py: FileNotFoundError" in user_error(plugins.load_plugins, ["none.py"])
    file.write_text("1 / 0")
    assert f"--plugins {file}: ZeroDivisionError" in user_error(plugins.load_plugins, [str(file)])


def test_a_registered_tracker_is_told_figures(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    class Mine(Tracker):
        name = "mine"

        def figures(self, step, figures) -> None:
            seen.append((step, figures["loss"]))

    megajax.register("tracker", "mine", lambda run_dir: Mine())
    with RunLog(tmp_path, 2, track="mine", write=True) as log:
        log._record(1, {"loss": 3.0})
        with pytest.raises(KeyError) as failed:
            log._record(2, {})
    assert seen == [(1, 3.0)] and failed.value.__notes__ == ["raised by mine"]
    megajax.register("tracker", "mine", lambda run_dir: print)
    assert "--track mine: a builtin_function" in user_error(RunLog, tmp_path, 2, track="mine")
