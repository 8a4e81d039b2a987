"""What a run says of its last validation."""

import dataclasses

import pytest
from tiny import tiny_config

from megajax.core.batch import pairs_form, text_form
from megajax.core.models.own_loss import Loss
from megajax.core.models.preferences import preference_loss
from megajax.data.tasks.registry import TaskConfig
from megajax.evaluation.scoring import Perplexity
from megajax.training.summary import parts_of, validation_text

NONE_RIGHT = Perplexity(8.0, 4, 0)


@pytest.mark.parametrize(
    ("form", "name", "tells"),
    [
        (pairs_form(), "masked", True),  # none is right yet
        (preference_loss(0.1).form(text_form()), "preferences", False),
        (Loss(lambda logits, batch: {}, measures=("entropy",)).form(text_form()), "lambda", False),
    ],
)
def test_a_loss_without_an_accuracy_has_none(form, name: str, tells: bool) -> None:
    figures = parts_of({name: NONE_RIGHT}, form)
    assert figures == ({f"validation_{name}_loss": 2.0, f"validation_{name}_accuracy": 0.0} if tells else {})


def test_only_losses_of_text_have_a_perplexity() -> None:
    parts = {"masked": Perplexity(8.0, 4, 2)}
    assert "masked perplexity 7.39 (loss 2.0000, accuracy 50.0%)" in validation_text(tiny_config(), parts)
    task = dataclasses.replace(tiny_config(), task=TaskConfig(name="preferences"))
    assert validation_text(task, parts) == "validation: masked loss 2.0000, accuracy 50.0%"
