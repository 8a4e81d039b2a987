"""The model's numbers, on one device and split over eight, against GPT-2 written plainly in numpy from the weights.

Letters: B batch, T and S tokens, D model, H heads, K head size, F feed-forward, V vocabulary, L layers.
"""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.config import Config
from megajax.mesh import shardings
from megajax.parallel.random import RandomBits
from megajax.program.program import Program
from megajax.program.scoring import next_logits, scores
from megajax.program.synthetic import random_batch
from megajax.program.train_step import loss_and_gradients

STEP = 3
QUICKLY = {"xla_backend_optimization_level": 0}  # compile with little optimisation of the machine code
EMBEDDING, ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = 0xFFFF_FFFF, 0, 1, 2  # what the masks are drawn for


@jax.jit
def hash_of(*coordinates) -> jax.Array:
    state = RandomBits.from_seed(coordinates[0])
    for index in coordinates[1:-1]:
        state = state.fold(index)
    return state.last(coordinates[-1])


class NumpyGPT2:
    """GPT-2 with dropout in float64, unsplit and unblocked."""

    def __init__(self, config: Config, weights: dict, rate: float):
        self.config, self.rate = config, rate
        self.weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)

    def dropped(self, x: np.ndarray, *site: int) -> np.ndarray:
        """`x` [B, …] times the mask of (seed, step, sample, *site, its other coordinates)."""
        if self.rate == 0:
            return x
        sample, *others = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in x.shape), indexing="ij", sparse=True)
        bits = hash_of(np.uint32(self.config.seed), STEP, sample, *(np.uint32(index) for index in site), *others)
        return x * (np.asarray(bits) >= round(self.rate * 2**32)) / (1 - self.rate)

    def norm(self, weights: dict, x_BTD: np.ndarray) -> np.ndarray:
        normal_BTD = (x_BTD - x_BTD.mean(-1, keepdims=True)) / np.sqrt(x_BTD.var(-1, keepdims=True) + 1e-5)
        return normal_BTD * weights["scale"] + weights["bias"]

    def attention(self, weights: dict, x_BTD: np.ndarray, layer: int) -> np.ndarray:
        q_BTHK, k_BSHK, v_BSHK = (
            np.einsum("BTD,DHK->BTHK", x_BTD, weights[part]["weight"]) + weights[part]["bias"]
            for part in ("query", "key", "value")
        )
        scores_BHTS = np.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / np.sqrt(q_BTHK.shape[-1])
        scores_BHTS = np.where(np.tri(x_BTD.shape[1], dtype=bool), scores_BHTS, -np.inf)
        exp_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
        probability_BHTS = self.dropped(exp_BHTS / exp_BHTS.sum(-1, keepdims=True), layer, ATTENTION_WEIGHTS)
        y_BTHK = np.einsum("BHTS,BSHK->BTHK", probability_BHTS, v_BSHK)
        return np.einsum("BTHK,HKD->BTD", y_BTHK, weights["output"]["weight"]) + weights["output"]["bias"]

    def mlp(self, weights: dict, x_BTD: np.ndarray) -> np.ndarray:
        x_BTF = x_BTD @ weights["up"]["weight"] + weights["up"]["bias"]
        x_BTF = x_BTF / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x_BTF + 0.044715 * x_BTF**3)))
        return x_BTF @ weights["down"]["weight"] + weights["down"]["bias"]

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        shared = self.weights["shared"]
        x_BTD = shared["table"][tokens_BT] + shared["positions"][: tokens_BT.shape[1]]
        x_BTD = self.dropped(x_BTD, EMBEDDING)
        for layer in range(self.config.model.num_layers):
            block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], self.weights["blocks"])
            y_BTD = self.attention(block["attention"], self.norm(block["attention_norm"], x_BTD), layer)
            x_BTD = x_BTD + self.dropped(y_BTD, layer, ATTENTION_OUTPUT)
            y_BTD = self.mlp(block["mlp"], self.norm(block["mlp_norm"], x_BTD))
            x_BTD = x_BTD + self.dropped(y_BTD, layer, MLP_OUTPUT)
        return self.norm(shared["final_norm"], x_BTD) @ shared["table"][: self.config.model.vocab_size].T

    def loss(self, batch: dict) -> float:
        """Mean over the targets that are not ignored."""
        logits_BTV = self.logits(batch["tokens"])
        targets_BT = batch["targets"]
        highest_BT1 = logits_BTV.max(-1, keepdims=True)
        normalizer_BT = (highest_BT1 + np.log(np.exp(logits_BTV - highest_BT1).sum(-1, keepdims=True)))[..., 0]
        picked_BT = np.take_along_axis(logits_BTV, np.maximum(targets_BT, 0)[..., None], -1)[..., 0]
        return (normalizer_BT - picked_BT)[targets_BT != IGNORED].mean()


def make_config(mesh: tuple[int, int, int], rate: float) -> Config:
    config = tiny_config(mesh, num_layers=3, sequence_length=12, global_batch=4, microbatch=2, dropout=rate)
    return dataclasses.replace(config, seed=5)


def random_weights(program: Program) -> dict:
    """Weights in natural form, all of them random and large enough that every one matters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: rng.normal(0, 0.4, shape.shape).astype(np.float32), program.layout.natural_shapes.params
    )


def place(program: Program, weights: dict) -> dict:
    """The weights in their shards."""
    layout = program.layout
    staged = {"shared": weights["shared"], "blocks": jax.tree.map(layout.placement.to_stages, weights["blocks"])}
    return jax.device_put(staged, shardings(layout.mesh, layout.specs.params))


@cache
def expected_loss(rate: float) -> float:
    config = make_config((1, 1, 1), rate)
    return NumpyGPT2(config, random_weights(tiny_program(config)), rate).loss(random_batch(config, STEP))


def losses(program: Program, steps: tuple[int, ...]) -> list[float]:
    """Losses of the same weights and batch in several steps."""
    params = place(program, random_weights(program))
    batch = program.put_batch(random_batch(program.config, STEP), program.local_rows)
    run = loss_and_gradients(program).lower(params, batch, np.int32(0)).compile(QUICKLY)
    return [float(run(params, batch, np.int32(step))[0]) for step in steps]


@pytest.fixture(scope="module")
def split_program() -> Program:
    return tiny_program(make_config((2, 2, 2), 0.2))


def test_training_loss_is_numpy_s(split_program):
    """Dropout at its four sites included, split over eight devices; another step's masks give another loss."""
    loss, other = losses(split_program, (STEP, STEP + 1))
    assert loss == pytest.approx(expected_loss(0.2), rel=1e-5)
    assert abs(expected_loss(0.0) / loss - 1) > 1e-2 < abs(other / loss - 1)


def test_a_rate_of_zero_turns_all_dropout_off():
    """The loss is numpy's without dropout, the same to the bit in every step."""
    loss, other = losses(tiny_program(make_config((1, 1, 1), 0.0)), (0, STEP))
    assert loss == other == pytest.approx(expected_loss(0.0), rel=1e-5)


def test_evaluation_is_numpy_s_without_dropout(split_program):
    """The loss of the targets, whatever the model's dropout."""
    batch = random_batch(split_program.config, STEP)
    params = place(split_program, random_weights(split_program))
    found = scores(split_program)(params, split_program.put_batch(batch, split_program.local_rows))
    loss_BT, hit_BT = found["next_token"]
    counted_BT = batch["targets"] != IGNORED
    np.testing.assert_array_equal(np.asarray(hit_BT) == IGNORED, ~counted_BT)
    assert np.asarray(loss_BT)[counted_BT].mean() == pytest.approx(expected_loss(0.0), rel=1e-5)


def test_next_logits_are_numpy_s_and_causal(split_program):
    """Logits at a position, to the bit the same with other tokens after it; padded columns are never sampled."""
    config, weights = split_program.config, random_weights(split_program)
    tokens = random_batch(config, STEP)["tokens"]
    params = place(split_program, weights)

    def logits(tokens: np.ndarray) -> np.ndarray:
        batch = split_program.put_batch({"tokens": tokens, "targets": tokens}, split_program.local_rows)
        return np.asarray(next_logits(split_program)(params, batch, np.int32(7)))

    expected_BV = NumpyGPT2(config, weights, 0.0).logits(tokens)[:, 7]
    np.testing.assert_allclose(logits(tokens)[:, : config.model.vocab_size], expected_BV, rtol=1e-4, atol=1e-4)
    assert (logits(tokens)[:, config.model.vocab_size :] < -1e38).all()
    later, here = tokens.copy(), tokens.copy()
    later[:, 8:] = (later[:, 8:] + 1) % config.model.vocab_size
    here[:, 7] = (here[:, 7] + 1) % config.model.vocab_size
    np.testing.assert_array_equal(logits(later), logits(tokens))
    assert np.abs(logits(here) - logits(tokens)).max() > 0.1
