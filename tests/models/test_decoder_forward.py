"""Decoders' numbers, GPT-2's and those of other words, on one device and split over eight, against a model written
plainly in numpy from the weights; and documents that share a sequence beside each of them alone.

Letters: B batch, T tokens, V vocabulary.
"""

import dataclasses

import jax
import numpy as np
import pytest
from plain import Decoder
from tiny import drawn_params, full, tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.config import Config
from megajax.program.program import Program
from megajax.program.scoring import next_logits, scores
from megajax.program.synthetic import random_batch
from megajax.program.train_step import loss_and_gradients
from megajax.verify import named_leaves
from megajax.verify.run import drawn_weights

STEP = 3

LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "bias": "none"}
WORDS = {
    "gpt-2": {},
    "llama 3.1": LLAMA
    | {"num_kv_heads": 4, "head_size": 6, "mlp_size": 40, "tied_embedding": False, "rope_scaling": "llama3"}
    | {"rope_factor": 8.0, "rope_original_length": 64, "rope_theta": 50.0},
    "qwen 3 with a window": LLAMA
    | {"num_kv_heads": 2, "head_size": 10, "query_key_norm": True, "norm_epsilon": 0.1, "sliding_window": 4},
    "qwen 2 of one head of keys": LLAMA
    | {"num_kv_heads": 1, "head_size": 4, "bias": "query-key-value", "rope_scaling": "linear", "rope_factor": 3.0},
    "gpt-2 without biases": {"bias": "none", "num_kv_heads": 4, "norm": "layernorm", "sliding_window": 5},
    "layernorm with swiglu": {"activation": "swiglu", "positions": "rotary", "head_size": 4, "query_key_norm": True},
}
DEFAULT = [("gpt-2", False), ("llama 3.1", True), ("qwen 3 with a window", True)]
OTHERS = [(name, documents) for name in WORDS for documents in (True, False) if (name, documents) not in DEFAULT]


def make_config(mesh: tuple[int, int, int], rate: float, **options) -> Config:
    size = {"num_layers": 3, "sequence_length": 12, "global_batch": 4, "microbatch": 2, "dropout": rate}
    size["init_std"] = 0.4  # so that every weight matters
    return dataclasses.replace(tiny_config(mesh, **size | options), seed=5)


def losses(program: Program, *steps: int) -> list[float]:
    params = drawn_params(program)
    batch = program.put_batch(random_batch(program.config, STEP), program.local_rows)
    run = loss_and_gradients(program)
    return [float(run(params, batch, np.int32(step))[0]) for step in steps]


def expected_loss(program: Program, rate: float, **others) -> float:
    """The loss of numpy's model, or of one with other words."""
    config = dataclasses.replace(program.config, model=dataclasses.replace(program.config.model, **others))
    return Decoder(config, drawn_weights(program), rate, STEP).loss(random_batch(program.config, STEP))


@pytest.fixture(scope="module")
def gpt2() -> Program:
    """Three layers on two stages."""
    return tiny_program(make_config((2, 2, 2), 0.2))


@pytest.mark.parametrize(("name", "documents"), [*DEFAULT, *(full(*case) for case in OTHERS)])
def test_training_loss_is_numpy_s(gpt2: Program, name: str, documents: bool) -> None:
    """Dropout at its four sites included, whose masks are others in another step; the others on four devices of a
    tensor group, twice as many as one of them has heads of keys."""
    if (name, documents) == DEFAULT[0]:
        program = gpt2
    else:
        program = tiny_program(make_config((2, 1, 4), 0.2, num_layers=2, reset_attention=documents, **WORDS[name]))
    loss, other = losses(program, STEP, STEP + 1)
    assert loss == pytest.approx(expected_loss(program, 0.2), rel=1e-5)
    assert abs(expected_loss(program, 0.0) / loss - 1) > 1e-4 < abs(other / loss - 1)
    others = {"rope_theta": 2.0} if program.config.model.rotary else {"sliding_window": 3}
    assert abs(expected_loss(program, 0.2, **others) / loss - 1) > 1e-4


def test_a_rate_of_zero_turns_all_dropout_off() -> None:
    """The loss is numpy's without dropout, the same to the bit in every step."""
    program = tiny_program(make_config((1, 1, 1), 0.0))
    loss, other = losses(program, 0, STEP)
    assert loss == other == pytest.approx(expected_loss(program, 0.0), rel=1e-5)


def test_evaluation_is_numpy_s_without_dropout(gpt2: Program) -> None:
    """The loss of the targets, whatever the model's dropout."""
    batch = random_batch(gpt2.config, STEP)
    found = scores(gpt2)(drawn_params(gpt2), gpt2.put_batch(batch, gpt2.local_rows))
    loss_BT, hit_BT = found["next_token"]
    counted_BT = batch["targets"] != IGNORED
    np.testing.assert_array_equal(np.asarray(hit_BT) == IGNORED, ~counted_BT)
    assert np.asarray(loss_BT)[counted_BT].mean() == pytest.approx(expected_loss(gpt2, 0.0), rel=1e-5)


def test_next_logits_are_numpy_s_and_causal(gpt2: Program) -> None:
    """Logits at a position, to the bit the same with other tokens after it; padded columns are never sampled."""
    config = gpt2.config
    tokens = random_batch(config, STEP)["tokens"]
    params = drawn_params(gpt2)

    def logits(tokens: np.ndarray) -> np.ndarray:
        batch = gpt2.put_batch({"tokens": tokens, "targets": tokens}, gpt2.local_rows)
        return np.asarray(next_logits(gpt2)(params, batch, np.int32(7)))

    expected_BV = Decoder(config, drawn_weights(gpt2), 0.0, STEP).logits({"tokens": tokens})[:, 7]
    np.testing.assert_allclose(logits(tokens)[:, : config.model.vocab_size], expected_BV, rtol=1e-4, atol=1e-4)
    assert (logits(tokens)[:, config.model.vocab_size :] < -1e38).all()
    later, here = tokens.copy(), tokens.copy()
    later[:, 8:] = (later[:, 8:] + 1) % config.model.vocab_size
    here[:, 7] = (here[:, 7] + 1) % config.model.vocab_size
    np.testing.assert_array_equal(logits(later), logits(tokens))
    assert np.abs(logits(here) - logits(tokens)).max() > 0.1


LENGTH, VOCABULARY = 16, 101
ROWS = [[5, 1, 7, 3], [16], [2, 13, 1], [1, 8, 7]]  # lengths of the documents of every sequence
DOCUMENTS = [(row, sum(lengths[:n]), length) for row, lengths in enumerate(ROWS) for n, length in enumerate(lengths)]
TOKENS, TARGETS = np.random.default_rng(0).integers(0, VOCABULARY, (2, len(ROWS), LENGTH), np.int32)


def joined() -> dict[str, np.ndarray]:
    """Documents that share sequences, and where in its document every token stands."""
    positions = np.array([[place for length in lengths for place in range(length)] for lengths in ROWS], np.int32)
    return {"tokens": TOKENS, "targets": TARGETS, "positions": positions}


def alone() -> dict[str, np.ndarray]:
    """The same documents, each at the start of a sequence of its own, and a sequence without any."""
    tokens = np.full((len(DOCUMENTS) + 1, LENGTH), 7, np.int32)
    targets = np.full_like(tokens, IGNORED)
    for number, (row, start, length) in enumerate(DOCUMENTS):
        tokens[number, :length] = TOKENS[row, start : start + length]
        targets[number, :length] = TARGETS[row, start : start + length]
    return {"tokens": tokens, "targets": targets}


def test_loss_and_gradients_are_those_of_each_document_alone():
    """Of all weights, the learned positions included; on a mesh: `test_parity.py`."""
    found = []
    for batch in joined(), alone():
        options = {"num_layers": 2, "init_std": 0.3, "reset_attention": "positions" in batch}
        program = tiny_program(tiny_config(global_batch=len(batch["tokens"]), dropout=0.0, **options))
        batch = program.put_batch(batch, program.local_rows)
        loss, gradients = jax.device_get(loss_and_gradients(program)(drawn_params(program), batch, np.int32(0)))
        found.append((float(loss), named_leaves(gradients)))
    (loss, gradients), (expected_loss, expected) = found
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert expected["shared/positions"].any(axis=1).all()
    for name, leaf in expected.items():
        tolerance = 1e-5 * np.abs(leaf).max() + 1e-7
        np.testing.assert_allclose(gradients[name], leaf, rtol=1e-4, atol=tolerance, err_msg=name)
