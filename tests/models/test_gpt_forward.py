"""The model's numbers, on one device and split over eight, against GPT-2 written plainly in numpy from the weights.

Letters: B batch, T and S tokens, D model, F feed-forward, V vocabulary.
"""

import dataclasses
from functools import cache

import numpy as np
import pytest
from plain import EMBEDDING, Plain, cross_entropy, place, random_weights
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.config import Config
from megajax.program.program import Program
from megajax.program.scoring import next_logits, scores
from megajax.program.synthetic import random_batch
from megajax.program.train_step import loss_and_gradients

STEP = 3
QUICKLY = {"xla_backend_optimization_level": 0}  # compile with little optimisation of the machine code


class NumpyGPT2(Plain):
    """GPT-2."""

    epsilon = 1e-5

    @staticmethod
    def activation(x_BTF: np.ndarray) -> np.ndarray:
        return x_BTF / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x_BTF + 0.044715 * x_BTF**3)))

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        shared = self.weights["shared"]
        x_BTD = self.dropped(shared["table"][tokens_BT] + shared["positions"][: tokens_BT.shape[1]], EMBEDDING)
        causal_1TS = np.tri(tokens_BT.shape[1], dtype=bool)[None]
        for layer in range(self.config.model.num_layers):
            block = self.block(layer)
            normal_BTD = self.norm(block["attention_norm"], x_BTD)
            x_BTD = x_BTD + self.attention(block["attention"], normal_BTD, causal_1TS, layer)
            x_BTD = x_BTD + self.mlp(block["mlp"], self.norm(block["mlp_norm"], x_BTD), layer)
        return self.norm(shared["final_norm"], x_BTD) @ shared["table"][: self.config.model.vocab_size].T

    def loss(self, batch: dict) -> float:
        """Mean over the targets that are not ignored."""
        losses_BT = cross_entropy(self.logits(batch["tokens"]), batch["targets"])
        return losses_BT[batch["targets"] != IGNORED].mean()


def make_config(mesh: tuple[int, int, int], rate: float) -> Config:
    config = tiny_config(mesh, num_layers=3, sequence_length=12, global_batch=4, microbatch=2, dropout=rate)
    return dataclasses.replace(config, seed=5)


@cache
def expected_loss(rate: float) -> float:
    config = make_config((1, 1, 1), rate)
    return NumpyGPT2(config, random_weights(tiny_program(config)), rate, STEP).loss(random_batch(config, STEP))


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

    expected_BV = NumpyGPT2(config, weights, 0.0, STEP).logits(tokens)[:, 7]
    np.testing.assert_allclose(logits(tokens)[:, : config.model.vocab_size], expected_BV, rtol=1e-4, atol=1e-4)
    assert (logits(tokens)[:, config.model.vocab_size :] < -1e38).all()
    later, here = tokens.copy(), tokens.copy()
    later[:, 8:] = (later[:, 8:] + 1) % config.model.vocab_size
    here[:, 7] = (here[:, 7] + 1) % config.model.vocab_size
    np.testing.assert_array_equal(logits(later), logits(tokens))
    assert np.abs(logits(here) - logits(tokens)).max() > 0.1
