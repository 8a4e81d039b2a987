"""A mixture of experts by hand, in numpy: what a comparison of meshes cannot see."""

import dataclasses

import jax
import numpy as np
import pytest
from plain import Decoder, linear
from tiny import MIXTURE, drawn_params, tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.program.program import Program
from megajax.program.scoring import scores
from megajax.program.synthetic import random_batch
from megajax.program.train_step import loss_and_gradients
from megajax.verify.run import drawn_weights

BALANCE, Z_LOSS = 0.3, 0.05
SIZE = {"num_layers": 1, "sequence_length": 8, "global_batch": 2, "dropout": 0.0, "init_std": 0.4}


class NumpyMixture(Decoder):
    """Without a capacity, tokens pass all experts that they choose."""

    capacity: int | None = None

    def mlp(self, weights: dict, x_BTD: np.ndarray, layer: int) -> np.ndarray:
        self.router_input_BTD, count = x_BTD, self.model.experts_per_token
        logits_BTE = x_BTD @ weights["router"]["weight"]
        share_BTE = np.exp(logits_BTE - logits_BTE.max(-1, keepdims=True))
        self.logits_BTE, self.share_BTE = logits_BTE, share_BTE / share_BTE.sum(-1, keepdims=True)
        self.chosen_BTK = np.argsort(-self.share_BTE, axis=-1)[..., :count]
        y_BTD = super().mlp(weights["shared"], x_BTD, layer)
        for row, chosen_TK in enumerate(self.chosen_BTK):
            taken = np.zeros(self.model.num_experts, int)
            for choice in range(count):
                for token, expert in enumerate(chosen_TK[:, choice]):
                    taken[expert] += 1
                    if self.capacity is None or taken[expert] <= self.capacity:
                        own = {name: {"weight": weights[name]["weight"][expert]} for name in ("gate", "up", "down")}
                        shares = self.share_BTE[row, token]
                        share = shares[expert] / shares[chosen_TK[token]].sum()
                        y_BTD[row, token] += share * super().mlp(own, x_BTD[row, token], layer)
        return y_BTD


@pytest.fixture(scope="module")
def program() -> Program:
    """By a capacity so small that experts drop tokens."""
    options = {"expert_capacity": 0.5, "balance": "loss", "balance_coefficient": BALANCE, "router_z_loss": Z_LOSS}
    return tiny_program(tiny_config(microbatch=1, **MIXTURE | SIZE | options))


@pytest.fixture(scope="module")
def by_hand(program: Program) -> NumpyMixture:
    return NumpyMixture(program.config, drawn_weights(program), 0.0, 0)


def test_the_balancing_loss_and_that_of_large_logits_pull_at_the_router(
    program: Program, by_hand: NumpyMixture
) -> None:
    """In a batch without targets its gradient is theirs alone: that of `E Σ f p` of every sequence, where f is an
    expert's share of choices and p its mean probability, and of the mean of the squares of log Σ exp, both means over
    the batch. The loss of the targets is numpy's with the capacity."""
    batch = random_batch(program.config, 0)

    def found(batch: dict) -> tuple:
        placed = program.put_batch(batch, program.local_rows)
        return jax.device_get(loss_and_gradients(program)(drawn_params(program), placed, np.int32(0)))

    (_, tokens), experts, count = batch["tokens"].shape, program.config.model.num_experts, by_hand.model.experts_per_token
    by_hand.capacity = 1  # 0.5 · 8 tokens · 2 choices / 8 experts
    assert found(batch)[0] == pytest.approx(by_hand.loss(batch), rel=1e-5)
    by_hand.capacity = None
    assert abs(by_hand.loss(batch) / found(batch)[0] - 1) > 1e-4
    share_BTE = by_hand.share_BTE
    f_BE = np.stack([np.bincount(chosen.ravel(), minlength=experts) for chosen in by_hand.chosen_BTK]) / (tokens * count)
    mean_BT1 = np.sum(f_BE[:, None] * share_BTE, axis=-1, keepdims=True)
    balance_BTE = BALANCE * experts / tokens * share_BTE * (f_BE[:, None] - mean_BT1)
    z_BTE = Z_LOSS * 2 / tokens * np.log(np.exp(by_hand.logits_BTE).sum(-1, keepdims=True)) * share_BTE
    of_logits_BTE = (balance_BTE + z_BTE) / len(share_BTE)
    expected = np.einsum("BTD,BTE->DE", by_hand.router_input_BTD, of_logits_BTE)
    loss, gradients = found(batch | {"targets": np.full_like(batch["targets"], IGNORED)})
    actual = gradients["blocks"]["mlp"]["router"]["weight"].reshape(expected.shape)
    assert loss == 0
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_an_evaluation_drops_no_token(program: Program, by_hand: NumpyMixture) -> None:
    batch = random_batch(program.config, 0)
    loss_BT, _ = scores(program)(drawn_params(program), program.put_batch(batch, program.local_rows))["next_token"]
    by_hand.capacity = None
    assert np.asarray(loss_BT)[batch["targets"] != IGNORED].mean() == pytest.approx(by_hand.loss(batch), rel=1e-5)
