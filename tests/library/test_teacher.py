"""Distillation, against a plain computation."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny import full, tiny_config

import megajax
from megajax.core.program.program import batch_form

CONFIG = tiny_config(num_layers=1, dropout=0.0)
IDS = np.random.default_rng(0).integers(0, 101, (2, 9), np.int32)


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize(("choices", "temperature", "share"), [full(101, 1.0, 1.0), (3, 2.0, 0.25)])
def test_a_student_learns_the_most_probable_ids_of_its_teacher(choices: int, temperature: float, share: float) -> None:
    student, plain = ({"choices": choices, "temperature": temperature}, megajax.PlainModel(CONFIG))
    weights = plain.init(1)
    of_teacher: Any = lambda batch: plain(weights, batch["tokens"])  # noqa: E731
    teacher: Any = SimpleNamespace(
        tokenizer=None, config=CONFIG, program=SimpleNamespace(form=batch_form(CONFIG)), logits=of_teacher
    )
    batches = megajax.with_teacher(iter([IDS[:1, :-1], IDS]), teacher, **student)
    batch = next(batches(1))
    assert batch["teacher_ids"].shape == (2, 8, choices)
    own = dataclasses.replace(CONFIG, own_loss=megajax.distillation(share=share, **student))
    loss = float(megajax.PlainModel(own).loss(plain.init(0), batch))

    z, mine = (np.asarray(plain(plain.init(seed), IDS[:, :-1]), np.float64) for seed in (1, 0))
    best = np.argsort(-z, axis=-1)[..., :choices]
    log_t = log_softmax(np.take_along_axis(z, best, -1) / temperature)
    log_s = np.take_along_axis(log_softmax(mine / temperature), best, -1)
    apart = (np.exp(log_t) * (log_t - log_s)).sum(-1)
    entropy = -np.take_along_axis(log_softmax(mine), IDS[:, 1:, None].astype(np.int64), -1)[..., 0]
    assert loss == pytest.approx((share * temperature**2 * apart + (1 - share) * entropy).mean(), rel=1e-5)
    assert loss > 0
