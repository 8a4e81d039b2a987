"""In half precision, rounding may change the expert of a token: what the comparison then allows, and what not."""

import dataclasses

import numpy as np
import pytest
from test_verdict import LAYERS, config_of, made_up, with_gradient

from megajax.verify.check import all_checks
from megajax.verify.forms import one_device
from megajax.verify.verdict import Verdict

LOADS = {"expert_load": np.full((LAYERS, 4), 9)}


@pytest.mark.parametrize(
    ("changed", "error", "passes"), [(0, 0.05, False), (1, 0.2, True), (1, 0.3, False), (9, 0.5, False)]
)
def test_a_token_whose_expert_changes_widens_the_limit(changed: int, error: float, passes: bool) -> None:
    """By 2 (2/144)^0.5 = 0.236 for one of 144 tokens, and at most to ten times the usual limit."""
    config = config_of("bf16")
    alone = dataclasses.replace(made_up(one_device(config)), loads=LOADS)
    other = with_gradient("blocks/mlp/up/weight", lambda grad: grad * (1 + error))(made_up(config))
    moved = LOADS["expert_load"] + np.array([[changed, -changed, 0, 0], *[[0] * 4] * 3])
    other = dataclasses.replace(other, loads={"expert_load": moved})
    assert Verdict(tuple(all_checks(alone, other))).passed == passes


def test_the_bias_of_experts_is_compared_where_their_loads_are_equal() -> None:
    config, bias = config_of("bf16"), "blocks/mlp/router/bias"
    alone, other = (
        dataclasses.replace(run, loads=LOADS, weights=run.weights | {bias: np.full((LAYERS, 4), 0.03 + by)})
        for run, by in ((made_up(one_device(config)), 0.0), (made_up(config), 0.01))
    )
    (failed,) = Verdict(tuple(all_checks(alone, other))).failed
    assert failed.name == "bf16 weights after one step" and bias in failed.where
    moved = {"expert_load": LOADS["expert_load"] + np.array([1, -1, 0, 0])}
    assert Verdict(tuple(all_checks(alone, dataclasses.replace(other, loads=moved)))).passed
