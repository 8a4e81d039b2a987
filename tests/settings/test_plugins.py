"""Names that a user's module registers."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config, user_error

import megajax
from megajax.core.optim.adam import learning_rate
from megajax.core.program.loss import loss_of
from megajax.core.program.program import batch_form
from megajax.runs.directory import stored_config
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
NAMED = [
    *("--model.activation", "cubed", "--model.norm", "none-at-all", "--optimizer.schedule", "square"),
    *("--optimizer.name", "still", "--train.loss", "entropy", "--train.metrics", "surprise"),
    *("--track", "mine", "--pipeline.schedule", "mine"),
]


pytestmark = pytest.mark.usefixtures("no_names_stay")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
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
    assert user_error(parse, [*own_data, "--data.path", "x"], "") == (
        "--data.set mine with --data.path; valid: one of them"
    )
    (file.parent / "config.toml").write_text(to_toml(config))
    registration._TABLES["activation"].pop("cubed")
    sys.modules.pop("megajax_plugin_mine")
    assert stored_config(file.parent, {}).model.activation == "cubed"


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
        (("activations", "x", abs), "kind 'activations'; valid: activation, data, loss"),
        (("activation", "X", abs), "name 'X'; valid: lowercase"),
        (("activation", "x", 3), "activation x: 3; valid: a function"),
        (("activation", "gelu", abs), "activation gelu is one of megajax's own; valid: another name"),
        (("pipeline", "1f1b", abs), "pipeline 1f1b is one of megajax's own; valid: another name"),
    ],
)
def test_what_cannot_be_registered_is_told_in_one_line(given: tuple, problem: str) -> None:
    assert problem in user_error(megajax.register, *given)


def test_the_page_registers_its_names() -> None:
    block = (Path(__file__).parents[2] / "docs" / "own.md").read_text().split("```python\n")[-1].partition("```")[0]
    exec(compile(block, "docs/own.md", "exec"), {})
    for kind, name in (("optimizer", "lion"), ("activation", "relu-squared"), ("schedule", "square")):
        assert callable(registration._TABLES[kind][name])
    page = (Path(__file__).parents[2] / "docs" / "own.md").read_text()
    assert all(f"| `{kind}` |" in page for kind in registration.KINDS)


def test_a_name_can_be_registered_again() -> None:
    """As when a cell of a notebook runs again."""
    for number in range(2):
        megajax.register("metric", "again", lambda logits, batch, number=number: number)
    assert registration._TABLES["metric"]["again"](0, 0) == 1


def test_a_plugin_that_fails_is_told_in_one_line(file: Path) -> None:
    assert "--plugins nothing.here: ModuleNotFoundError" in user_error(plugins.load_plugins, ["nothing.here"])
    assert "--plugins none.py: FileNotFoundError" in user_error(plugins.load_plugins, ["none.py"])
    file.write_text("1 / 0")
    assert f"--plugins {file}: ZeroDivisionError: division by zero; valid" in user_error(
        plugins.load_plugins, [str(file)]
    )


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
    assert "--track mine: a builtin_function_or_method; valid: a function" in user_error(
        RunLog, tmp_path, 2, track="mine"
    )
