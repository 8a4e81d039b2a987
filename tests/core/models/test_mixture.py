"""A mixture of experts in numpy: what a comparison of meshes cannot see."""

import jax
import numpy as np
import pytest
from model_in_numpy import Decoder
from tiny import MIXTURE, drawn_params, tiny_config, tiny_program

from megajax.core.batch import IGNORED
from megajax.core.program.program import Program
from megajax.core.program.scoring import scores
from megajax.core.program.train_step import loss_and_gradients
from megajax.data.synthetic import random_batch
from megajax.verify.run import drawn_weights

BALANCE, Z_LOSS = 0.3, 0.05
ROWS, TOKENS, EXPERTS, CHOICES = 2, 8, 8, 2
SIZE = {"num_layers": 1, "sequence_length": TOKENS, "global_batch": ROWS, "dropout": 0.0, "init_std": 0.4}
LOSSES = {"balance": "both", "balance_coefficient": BALANCE, "router_z_loss": Z_LOSS}


class NumpyMixture(Decoder):
    """One layer of experts and a shared one."""

    capacity: int | None = None  # without one, every token passes all experts that it chooses

    def mlp(self, weights: dict, x_BTD: np.ndarray) -> np.ndarray:
        self.entered_BTD, self.logits_BTE = x_BTD, x_BTD @ weights["router"]["weight"]
        exp_BTE = np.exp(self.logits_BTE)
        self.share_BTE = exp_BTE / exp_BTE.sum(-1, keepdims=True)
        bias_E = weights["router"]["bias"]  # decides which, but not with what share
        self.chosen_BTK = np.argsort(-self.share_BTE - bias_E, axis=-1)[..., :CHOICES]
        y_BTD = super().mlp(weights["shared"], x_BTD)
        for row, chosen_TK in enumerate(self.chosen_BTK):
            taken = np.zeros(EXPERTS, int)
            for choice, token in np.ndindex(CHOICES, TOKENS):  # all first choices before any second one
                expert, shares_E = chosen_TK[token, choice], self.share_BTE[row, token]
                taken[expert] += 1
                if self.capacity is None or taken[expert] <= self.capacity:
                    own = {name: {"weight": weights[name]["weight"][expert]} for name in ("gate", "up", "down")}
                    share = shares_E[expert] / shares_E[chosen_TK[token]].sum()
                    y_BTD[row, token] += share * super().mlp(own, x_BTD[row, token])
        return y_BTD


@pytest.fixture(scope="module")
def program() -> Program:
    """With so small a capacity that experts drop tokens; of documents, where a token without a target is no padding."""
    options = {"expert_capacity": 0.5, "reset_attention": True, **LOSSES}
    return tiny_program(tiny_config(microbatch=1, **MIXTURE | SIZE | options))


@pytest.fixture(scope="module")
def batch(program: Program) -> dict[str, np.ndarray]:
    """A document in every row."""
    positions = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (ROWS, TOKENS))
    return random_batch(program.config, 0) | {"positions": positions}


@pytest.fixture
def by_hand(program: Program) -> NumpyMixture:
    return NumpyMixture(program.config.model, drawn_weights(program))


def test_loss_by_capacity_and_gradients_of_the_balancing_losses(
    program: Program, batch: dict[str, np.ndarray], by_hand: NumpyMixture
) -> None:
    """The loss of the targets with what is dropped. Without targets the router has only the gradients of its own
    losses: of `E Σ f p` of a sequence, where f is an expert's share of choices and p its mean probability, and of the
    mean of (log Σ exp)², both means over sequences."""

    def found(batch: dict[str, np.ndarray]) -> tuple:
        placed = program.put_batch(batch, program.local_rows)
        return jax.device_get(loss_and_gradients(program)(drawn_params(program), placed, np.int32(0)))

    dropless, by_hand.capacity = by_hand.loss(batch), 1  # 0.5 · 8 tokens · 2 choices / 8 experts
    assert found(batch)[0] == pytest.approx(by_hand.loss(batch), rel=1e-5)
    assert abs(by_hand.loss(batch) / dropless - 1) > 1e-4
    share_BTE = by_hand.share_BTE
    often_BE = np.stack([np.bincount(chosen.ravel(), minlength=EXPERTS) for chosen in by_hand.chosen_BTK])
    f_B1E = often_BE[:, None] / (TOKENS * CHOICES)
    balance_BTE = EXPERTS * share_BTE * (f_B1E - np.sum(f_B1E * share_BTE, axis=-1, keepdims=True))
    z_BTE = 2 * np.log(np.exp(by_hand.logits_BTE).sum(-1, keepdims=True)) * share_BTE
    of_logits_BTE = (BALANCE * balance_BTE + Z_LOSS * z_BTE) / (TOKENS * ROWS)
    expected = np.einsum("BTD,BTE->DE", by_hand.entered_BTD, of_logits_BTE)
    loss, gradients = found(batch | {"targets": np.full_like(batch["targets"], IGNORED)})
    actual = gradients["blocks"]["mlp"]["router"]["weight"].reshape(expected.shape)
    assert loss == 0
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_an_evaluation_drops_no_token(program: Program, batch: dict[str, np.ndarray], by_hand: NumpyMixture) -> None:
    found = scores(program)(drawn_params(program), program.put_batch(batch, program.local_rows))["next_token"]
    loss = np.asarray(found[0])[batch["targets"] != IGNORED].mean()
    assert loss == pytest.approx(by_hand.loss(batch), rel=1e-5)
