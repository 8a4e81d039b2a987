"""Sampling by the whole window gives the same text on every mesh."""

import functools

import pytest
from tiny import drawn_params, tiny_config, tiny_program

from megajax.generation.choice import Sampling
from megajax.generation.window import continue_in_windows

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
