"""What a run says of its last validation."""

import pytest

from megajax.core.batch import pairs_form, text_form
from megajax.core.models.own_loss import Loss
from megajax.core.models.preferences import preference_loss
from megajax.evaluation.scoring import Perplexity
from megajax.training.summary import parts_of

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
