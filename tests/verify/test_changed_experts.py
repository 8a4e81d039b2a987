"""In half precision, rounding may change the expert of a token: what the comparison then allows, and what not."""

import dataclasses

import numpy as np
import pytest
from test_verdict import LAYERS, STEPS, config_of, made_up, with_gradient

from megajax.verify.check import all_checks
from megajax.verify.forms import one_device
from megajax.verify.verdict import Verdict


@pytest.mark.parametrize(
    ("changed", "error", "passes"), [(0, 0.05, False), (1, 0.2, True), (1, 0.3, False), (9, 0.5, False)]
)
def test_a_token_whose_expert_changes_widens_the_limit_of_its_step(changed: int, error: float, passes: bool) -> None:
    """By 2 (2/144)^0.5 = 0.236 for one of 144 tokens, and at most to ten times the usual limit."""
    config, loads = config_of("bf16"), [{"expert_load": np.full((LAYERS, 4), 9)} for _ in range(STEPS)]
    alone = dataclasses.replace(made_up(one_device(config)), counts=loads)
    other = with_gradient(1, "blocks/mlp/up/weight", lambda grad: grad * (1 + error))(made_up(config))
    moved = loads[1]["expert_load"] + np.array([[changed, -changed, 0, 0], *[[0] * 4] * 3])
    for step in range(STEPS):
        counts = [{"expert_load": moved} if number == step else each for number, each in enumerate(loads)]
        found = Verdict(tuple(all_checks(alone, dataclasses.replace(other, counts=counts))))
        assert found.passed == (passes and step == 1)


def test_the_bias_of_experts_is_compared_where_their_loads_are_equal() -> None:
    loads = [{"expert_load": np.full((LAYERS, 4), 9)} for _ in range(STEPS)]
    config, bias = config_of("bf16"), "blocks/mlp/router/bias"
    alone, other = (dataclasses.replace(made_up(each), counts=loads) for each in (one_device(config), config))
    alone, other = (
        dataclasses.replace(run, state=run.state | {"params": run.weights | {bias: np.full((LAYERS, 4), 0.03 + by)}})
        for run, by in ((alone, 0.0), (other, 0.01))
    )
    (failed,) = Verdict(tuple(all_checks(alone, other))).failed
    assert failed.name == "bf16 weights after the last step" and bias in failed.where
    moved = [*loads[:2], {"expert_load": loads[2]["expert_load"] + np.array([1, -1, 0, 0])}]
    assert Verdict(tuple(all_checks(alone, dataclasses.replace(other, counts=moved)))).passed
