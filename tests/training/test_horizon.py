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


def begun(**values: Any) -> Config:
    overrides = {key.replace("__", "."): value for key, value in values.items()}
    return resolve(DEMO, overrides, decay_follows=False)


@pytest.mark.parametrize(
    ("values", "began_with", "decay_steps"),
    [
        ({}, 0, 100),
        ({"train__steps": 70}, 0, 70),
        ({"train__steps": 7}, 0, 40),  # the warm-up's
        ({"train__steps": 300}, 100, 100),
        ({"train__steps": 300, "optimizer__decay_steps": 200}, 100, 200),
        ({"optimizer__schedule": "linear", "train__steps": 60}, 0, 60),
        ({"optimizer__schedule": "constant", "train__steps": 60}, 0, 0),  # another one can follow
    ],
)
def test_the_decay_ends_with_the_training_that_the_run_began_with(
    values: dict[str, Any], began_with: int, decay_steps: int
) -> None:
    config = in_steps(begun(**values), EPOCH, began_with)
    assert config.optimizer.decay_steps == decay_steps and config.train.steps == values.get("train__steps", 100)
    if not began_with:
        overrides = {key.replace("__", "."): value for key, value in values.items()}
        assert resolve(DEMO, overrides).optimizer.decay_steps == decay_steps, "as where nothing goes on"


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
    assert past_decay(in_steps(begun(), EPOCH)) == ""
    assert past_decay(in_steps(begun(optimizer__schedule="constant", train__steps=900), EPOCH, 100)) == ""
    assert past_decay(in_steps(begun(train__steps=300), EPOCH, 100)) == (
        "warning: --train.steps 300 is past --optimizer.decay-steps 100: from there on the learning rate stays at its "
        "floor, --optimizer.min-learning-rate 0.0001"
    )
    floor = begun(train__steps=300, optimizer__min_learning_rate=0)
    assert past_decay(in_steps(floor, EPOCH, 100)).endswith("rate 0, and nothing is learned")
