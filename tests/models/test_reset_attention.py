"""Attention reset at documents: documents that share a sequence are computed as if each stood alone."""

import jax
import numpy as np
import pytest
from tiny import drawn_params, tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.program.train_step import loss_and_gradients
from megajax.verify import named_leaves

LENGTH, VOCABULARY = 16, 101
ROWS = [[5, 1, 7, 3], [16], [2, 13, 1], [1, 8, 7]]  # lengths of the documents of every sequence
DOCUMENTS = [(row, sum(lengths[:n]), length) for row, lengths in enumerate(ROWS) for n, length in enumerate(lengths)]
TOKENS, TARGETS = np.random.default_rng(0).integers(0, VOCABULARY, (2, len(ROWS), LENGTH), np.int32)
QUICKLY = {"xla_backend_optimization_level": 0}  # compile with little optimisation of the machine code


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
        params = drawn_params(program)
        batch = program.put_batch(batch, program.local_rows)
        run = loss_and_gradients(program).lower(params, batch, np.int32(0)).compile(QUICKLY)
        loss, gradients = jax.device_get(run(params, batch, np.int32(0)))
        found.append((float(loss), named_leaves(gradients)))
    (loss, gradients), (expected_loss, expected) = found
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert expected["shared/positions"].any(axis=1).all()
    for name, leaf in expected.items():
        tolerance = 1e-5 * np.abs(leaf).max() + 1e-7
        np.testing.assert_allclose(gradients[name], leaf, rtol=1e-4, atol=tolerance, err_msg=name)
