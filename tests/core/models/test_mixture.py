"""A mixture of experts in numpy: what a comparison of meshes cannot see."""

from typing import Any

import jax
import numpy as np
import pytest
from model_in_numpy import Decoder
from scipy.special import expit, softmax
from tiny import MIXTURE, drawn_params, tiny_config, tiny_program

from megajax.core.batch import IGNORED
from megajax.core.models.attention_mask import CAUSAL
from megajax.core.models.context import Context
from megajax.core.models.decoder.model import real_tokens
from megajax.core.models.experts import capacity_of
from megajax.core.models.router import LOAD, Router, bias_step
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.random import Dropout, NamedKey
from megajax.core.program.program import Program
from megajax.core.program.scoring import scores
from megajax.core.program.train_step import loss_and_gradients, train_step_with_gradients
from megajax.data.synthetic import random_batch
from megajax.verify.run import drawn_state, drawn_weights

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
        y_BTD = super().mlp(weights["shared"], x_BTD) * expit(x_BTD @ weights["shared_expert_gate"])
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
    options = {"expert_capacity": 0.5, "reset_attention": True, "shared_expert_gate": True, **LOSSES}
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


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_by_hand(renormalize):
    """Shares are those of the most probable experts, alone or as they are; losses, loads and figures are those of real
    tokens, and one sequence is only padding. Loads are beyond what half precision counts exactly."""
    coefficients = {"balance": "loss", "balance_coefficient": 0.5, "router_z_loss": 0.25}
    config = tiny_config(**MIXTURE | coefficients | {"renormalize_shares": renormalize}).model
    router, x_BTD = Router(config, NamedKey.from_seed(0), F_AND_G), np.random.default_rng(0).normal(size=(3, 1501, 24))
    router.weight[...] *= 50.0
    real_BT = np.arange(1501) < np.array([1501, 4, 0])[:, None]
    routing = router(x_BTD.astype(np.float32), Context(Dropout.off(), CAUSAL, real_BT=real_BT), 2)
    logits = x_BTD @ np.asarray(router.weight[...])
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-shares, axis=-1)[..., : config.experts_per_token]
    assert (routing.chosen_BTK == np.where(real_BT[..., None], chosen, config.num_experts)).all()
    wanted = np.take_along_axis(shares, chosen, -1)
    wanted = np.where(real_BT[..., None], wanted / (wanted.sum(-1, keepdims=True) ** renormalize), 0)
    np.testing.assert_allclose(routing.share_BTK, wanted, rtol=1e-5)
    load, balance, losses = np.zeros((config.num_blocks, config.num_experts), int), 0.0, [0.0] * 3
    for row, count in enumerate([1501, 4]):
        often = np.bincount(chosen[row, :count].ravel(), minlength=config.num_experts)
        each = config.num_experts * often / often.sum() @ shares[row, :count].mean(axis=0)
        load[2], balance = load[2] + often, balance + each
        losses[row] = 0.5 * each + 0.25 * (np.log(np.exp(logits[row, :count]).sum(-1)) ** 2).mean()
    np.testing.assert_allclose(routing.loss_B, losses, rtol=1e-5)
    assert (routing.figures[LOAD] == load).all()
    np.testing.assert_allclose(routing.figures["balance_loss"], balance, rtol=1e-5)
    entropy = -(shares * np.log(shares)).sum(-1)[real_BT].sum()
    np.testing.assert_allclose(routing.figures["router_entropy"], entropy, rtol=1e-5)


@pytest.mark.parametrize(("scores", "count"), [("softmax", 1), ("sigmoid", 2)])
def test_groups_by_hand(scores, count):
    """A token's experts are in the group whose largest scores, so many, have the largest sum."""
    config = tiny_config(**MIXTURE | {"router_scores": scores, "expert_groups": 2}).model
    router, logits_TE = Router(config, NamedKey.from_seed(0), F_AND_G), np.random.default_rng(0).normal(size=(99, 8))
    score_TGE = (softmax(logits_TE, axis=-1) if scores == "softmax" else expit(logits_TE)).reshape(99, 2, 4)
    best_T = np.sort(score_TGE)[..., -count:].sum(-1).argmax(-1)
    chosen_TK = np.argsort(-score_TGE[np.arange(99), best_T])[:, : config.experts_per_token]
    found = router._chosen(score_TGE.reshape(1, 99, 8).astype(np.float32))
    assert (found[0] == chosen_TK + 4 * best_T[:, None]).all()


@pytest.mark.parametrize("documents", [True, False])
def test_what_is_padding(documents):
    """With documents, what is alone in one and has no target; otherwise what follows a row's last target."""
    targets = np.array([[5, -1, 7, -1, -1, -1], [-1, -1, -1, -1, -1, -1], [-1, 3, 2, 1, 1, 4]])
    positions = np.array([[0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 0]])
    batch = {"tokens": targets, "targets": targets}
    wanted = [[1, 1, 1, 0, 0, 0], [0] * 6, [1] * 6]
    if documents:
        batch, wanted = batch | {"positions": positions}, [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]
    assert real_tokens(batch).astype(int).tolist() == wanted
    assert real_tokens({"tokens": targets}).all()


def biases_of(weights: Any) -> list[Any]:
    """Of the layers' routers, and of modules'."""
    layers = weights["blocks"], weights["shared"]["prediction"]["block"]
    return [layer["mlp"]["router"]["bias"] for layer in layers]


@pytest.mark.slow
def test_padding_changes_nothing():
    """Whatever it holds, in a step by capacity; a step without any target leaves the biases alone, though not those of
    a prompt. In half precision, biases stay in fp32. A module for further tokens has one token less."""
    model = MIXTURE | {"expert_capacity": 1.0, "balance": "bias", "router_z_loss": 0.01, "num_layers": 1}
    model |= {"prediction_modules": 1, "dropout": 0.0, "sequence_length": 16}
    config = tiny_config(microbatch=8, precision="bf16", reset_attention=True, **model)
    program = tiny_program(config)
    bias = program.layout.shapes.params["blocks"]["mlp"]["router"]["bias"]
    assert bias.dtype == np.float32 and program.layout.shapes.params["shared"]["table"].dtype == "bfloat16"
    layout, batch = program.layout, random_batch(config, 0)
    batch["targets"][:, 4:], batch["positions"][:] = -1, np.where(np.arange(16) < 4, np.arange(16), 0)
    state = layout.from_canonical(drawn_state(program))
    step = train_step_with_gradients(program).lower(state, program.put_batch(batch, program.local_rows)).compile()

    def results(batch: dict[str, np.ndarray]) -> Any:
        state = layout.from_canonical(drawn_state(program))
        before = jax.device_get(biases_of(state.main))
        state, *found = step(state, program.put_batch(batch, program.local_rows))
        *found, after = jax.device_get((*found, biases_of(state.main)))
        return *found, [new - old for new, old in zip(after, before, strict=True)]

    filler = batch | {"tokens": np.where(np.arange(16) < 4, batch["tokens"], 77)}
    first, second = results(batch), results(filler)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))
    metrics, _, moved = first
    assert metrics[LOAD].sum(axis=1).tolist() == [8 * 4 * 2, 8 * 3 * 2] and metrics["experts/dropped"] == 0
    expected = [bias_step(load, config.model.balance_step, np.float32) for load in metrics[LOAD]]
    np.testing.assert_allclose([each.ravel() for each in moved], expected, rtol=1e-4)
    metrics, _, moved = results(batch | {"targets": np.full_like(batch["targets"], -1)})
    assert metrics[LOAD].sum(axis=1).tolist() == [8 * 4 * 2, 8 * 3 * 2] and not any(each.any() for each in moved)


def test_a_capacity_is_rounded_up_from_the_exact_product():
    """1.1 times 10 is a little more than 11 in floating point."""
    for capacity, tokens in ((1.1, 11), (1.11, 12), (0.01, 1), (9.0, 40)):
        assert capacity_of(tiny_config(**MIXTURE | {"expert_capacity": capacity}).model, 40) == tokens


def test_biases_follow_loads():
    """Towards those that are chosen too rarely; none moves where all are chosen as often."""
    load = np.array([[3, 1, 2, 2], [2, 2, 2, 2], [3, 2, 2, 2], [0, 0, 0, 0], [10**9, 0, 1, 1]], np.int32)
    wanted = [[-0.5, 0.5, 0, 0], [0] * 4, [-0.5, 0.5, 0.5, 0.5], [0] * 4, [-0.5, 0.5, 0.5, 0.5]]
    assert np.asarray(bias_step(load, 0.5, np.float32)).tolist() == wanted
