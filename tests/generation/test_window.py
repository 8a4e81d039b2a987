"""Sampling by the whole window gives the same text on every mesh, and continues with what the model finds probable."""

import functools

import numpy as np
import pytest
from drawn import drawn_params
from tiny import tiny_config, tiny_program

from megajax.batch import IGNORED
from megajax.generation.choice import Sampling
from megajax.generation.window import continue_in_windows
from megajax.program.scoring import next_logits, scores

PROMPT = [5, 17, 99]


@functools.cache
def model(mesh: tuple[int, int, int]):
    program = tiny_program(tiny_config(mesh, global_batch=4, init_std=0.2))
    return program, drawn_params(program)


def draw(mesh, *, temperature: float = 1.0, seed: int = 3, ends: tuple[int, ...] = ()) -> list[int]:
    sampling = Sampling(temperature, seed=seed)
    return [*continue_in_windows(*model(mesh), PROMPT, num_tokens=20, sampling=sampling, ends=ends)]


@pytest.mark.parametrize("mesh", [(2, 2, 2), pytest.param((1, 4, 1), marks=pytest.mark.full)])
def test_every_mesh_draws_the_same_text(mesh):
    """Also beyond the window of 16 tokens, where the oldest tokens leave it."""
    assert draw(mesh) == draw((1, 1, 1)) and len(draw(mesh)) == 20


def test_the_seed_and_the_temperature_matter():
    assert draw((1, 1, 1), seed=4) != draw((1, 1, 1), seed=3)
    greedy = draw((1, 1, 1), temperature=0.0)
    assert greedy == draw((1, 1, 1), temperature=0.0, seed=9) != draw((1, 1, 1))


def test_it_stops_before_the_end_token():
    greedy = draw((1, 1, 1), temperature=0.0)
    assert draw((1, 1, 1), temperature=0.0, ends=(greedy[5], 1 << 20)) == greedy[: greedy.index(greedy[5])]


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_next_logits_are_those_of_the_loss(mesh):
    """For each row of several microbatches, log-softmax of the next logits equals minus the loss of that one target."""
    program, params = model(mesh)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 101, (4, 16), np.int32)
    position = 9
    targets = np.full_like(tokens, IGNORED)
    targets[:, position] = rng.integers(0, 101, 4)
    batch = program.put_batch({"tokens": tokens, "targets": targets}, program.local_rows)
    logits = np.asarray(next_logits(program)(params, batch, np.int32(position)), np.float64)[:, :101]
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -log_probability[np.arange(4), targets[:, position]].sum()
    loss_BT, _ = scores(program)(params, batch)["next_token"]
    assert float(np.asarray(loss_BT).sum()) == pytest.approx(expected, rel=1e-5)
