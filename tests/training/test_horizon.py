"""When training ends, and the decay of the learning rate that no preset gives."""

from types import SimpleNamespace
from typing import Any

import pytest

from megajax.config import Config
from megajax.settings.presets import load_preset, resolve
from megajax.training.begin import in_steps
from megajax.training.describe import past_decay

DEMO = {key: value for key, value in load_preset("demo").items() if key != "optimizer.decay_steps"}
EPOCH = SimpleNamespace(epoch_size=80)


def begun(values: dict[str, Any], began_with: int = 100) -> Config:
    """A run of the demo that has begun with so many steps, with other values."""
    return in_steps(resolve(DEMO, values, decay_follows=False), EPOCH, began_with)


@pytest.mark.parametrize(
    ("values", "began_with", "decay_steps"),
    [
        ({}, 0, 100),
        ({"train.steps": 70}, 0, 70),
        ({"train.steps": 7}, 0, 40),  # the warm-up's
        ({"train.steps": 300}, 100, 100),
        ({"train.steps": 300, "optimizer.decay_steps": 200}, 100, 200),
        ({"optimizer.schedule": "linear", "train.steps": 60}, 0, 60),
        ({"optimizer.schedule": "constant", "train.steps": 60}, 0, 0),  # another one can follow
    ],
)
def test_the_decay_ends_with_the_training_that_the_run_began_with(
    values: dict[str, Any], began_with: int, decay_steps: int
) -> None:
    config = begun(values, began_with)
    assert config.optimizer.decay_steps == decay_steps and config.train.steps == values.get("train.steps", 100)
    if not began_with:
        assert resolve(DEMO, values).optimizer.decay_steps == decay_steps, "as where nothing goes on"


def test_epochs_in_steps() -> None:
    """The decay of a run that goes on for more epochs stays, too."""
    preset = load_preset("finetune/mnli-demo") | {"data.train": ("x",), "train.global_batch": 8}
    config = resolve(preset, {"train.epochs": 2.5})
    assert config.optimizer.decay_steps == 0
    found = in_steps(config, EPOCH)
    assert (found.train.steps, found.optimizer.decay_steps, found.optimizer.warmup_steps) == (25, 25, 2)
    more = in_steps(resolve(preset, {"train.epochs": 5}), EPOCH, 25)
    assert (more.train.steps, more.optimizer.decay_steps, more.optimizer.warmup_steps) == (50, 25, 2)


def test_training_past_the_decay_is_told() -> None:
    assert past_decay(begun({}, 0)) == ""
    assert past_decay(begun({"optimizer.schedule": "constant", "train.steps": 900})) == ""
    assert past_decay(begun({"train.steps": 300})) == (
        "warning: --train.steps 300 is past --optimizer.decay-steps 100: from there on the learning rate stays at its "
        "floor, --optimizer.min-learning-rate 0.0001"
    )
    floor = begun({"train.steps": 300, "optimizer.min_learning_rate": 0})
    assert past_decay(floor).endswith("rate 0, and nothing is learned")
