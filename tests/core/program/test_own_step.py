"""A step with a loss and an optimizer of the user's is that of one device on every mesh, exactly."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from field import SMALL, assert_exact
from jax import Array
from tiny import MIXTURE, full, tiny_config, user_error

from megajax.core.backend import CPU
from megajax.core.batch import BatchArray
from megajax.core.models.distillation import distillation
from megajax.core.models.own_loss import Batch, Logits, Loss
from megajax.core.optim.own import OwnOptimizer
from megajax.core.program.program import Program
from megajax.library.plain import PlainModel
from megajax.settings.config import Config


def weighted(logits: Logits, batch: Batch) -> dict[str, Array]:
    ids = jnp.stack([batch["targets"], batch["tokens"]], -1)
    chosen_BTK = logits.at_temperature(2.0).log_probabilities(ids)
    loss = logits.cross_entropy(batch["targets"]) - 0.1 * logits.entropy()
    return {"loss": batch["weight"] * loss + chosen_BTK[..., 0] * chosen_BTK[..., 1], "entropy": logits.entropy()}


def of_rows(logits: Logits, batch: Batch) -> Array:
    return jnp.square(logits.sum_over_tokens(logits.log_probabilities(batch["targets"])))


def whole(logits: Logits, batch: Batch) -> Array:
    return jax.nn.logsumexp(logits.whole(), axis=-1) + 0.1 * jnp.square(logits.logsumexp())


WEIGHTED = Loss(weighted, measures=("entropy",), arrays={"weight": BatchArray(("tokens",), dtype="float32")})
OF_ROWS = Loss(of_rows, per="row")
SPLIT = {"vocabulary": "split", "sequence_parallel": True}


def own(mesh: tuple[int, ...], loss: Loss | str | None, optimizer: Any, **words: Any) -> Config:
    config = tiny_config(mesh, optimizer={"name": "own"} if optimizer else None, **SMALL | words)
    if isinstance(loss, str):
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, loss=loss))
        loss = None
    return dataclasses.replace(config, own_loss=loss, own_optimizer=optimizer and OwnOptimizer(optimizer))


@pytest.mark.parametrize(
    ("mesh", "loss", "optimizer", "words"),
    [
        ((2, 2, 2), WEIGHTED, optax.lion, SPLIT | {"precision": "fp16", "num_layers": 2, "dropout": 0.0}),
        ((2, 2, 1, 2), OF_ROWS, optax.lamb(1e-3), SPLIT | {"num_layers": 2, "dropout": 0.0}),
        full((2, 1, 2, 2), "preferences", None, {"reset_attention": True}),
        full((2, 1, 2, 2), distillation(choices=3, temperature=2.0, share=0.5), None, {}),
        full((2, 2, 2), distillation(choices=3), optax.lion, {"zero": 3, **SPLIT}),
        full((2, 2, 2), "preferences", optax.lion, {"reset_attention": True, "zero": 3, **SPLIT}),
        full((1, 2, 2, 2), OF_ROWS, optax.adafactor(1e-3, min_dim_size_to_factor=4), {"zero": 3}),
        full((3, 1, 1), WEIGHTED, optax.lamb(1e-3), {"global_batch": 6}),
        full((2, 1, 2), WEIGHTED, optax.lamb(1e-3), MIXTURE | {"expert": 2}),
        full((2, 1, 2, 2), WEIGHTED, optax.inject_hyperparams(optax.lion)(learning_rate=1e-3), {"zero": 3}),
        full((2, 2, 2), Loss(whole), optax.MultiSteps(optax.adam(1e-3), 2), {"ema": 0.9, "precision": "bf16"}),
        full((2, 2, 1, 2), WEIGHTED, None, SPLIT),
        full((2, 1, 2, 2), OF_ROWS, optax.sgd(1e-2, momentum=0.9), {"schedule": "gpipe", "reset_attention": True}),
    ],
)
@pytest.mark.slow
def test_a_step_is_that_of_one_device(
    mesh: tuple[int, ...], loss: Loss | str | None, optimizer: Any, words: dict[str, Any]
) -> None:
    """Also one that clips otherwise, is a spike or is skipped, where that is worth its time."""
    step = assert_exact(own(mesh, loss, optimizer, **words), branches=loss is WEIGHTED, planned=False)
    if loss is WEIGHTED:
        assert {"loss/weighted", "entropy"} <= step.taken.metrics.keys()


def plain_loss(function: Any, ids: np.ndarray, weight: np.ndarray | None = None) -> float:
    config = tiny_config(num_layers=1, dropout=0.0)
    plain = PlainModel(dataclasses.replace(config, own_loss=function))
    batch = {"tokens": ids[:, :-1], "targets": np.where(np.arange(8) < 6, ids[:, 1:], -1)}
    return float(plain.loss(plain.init(), batch if weight is None else batch | {"weight": weight}))


def test_a_loss_is_the_mean_over_what_counts() -> None:
    """Of a plain computation in float64, of logits [B, T, V]."""
    config, rng = tiny_config(num_layers=1, dropout=0.0), np.random.default_rng(0)
    ids, weight = rng.integers(0, 101, (3, 9), np.int32), rng.uniform(size=(3, 8)).astype(np.float32)
    plain = PlainModel(config)
    z = np.asarray(plain(plain.init(), ids[:, :-1]), np.float64)

    def log_softmax(z: np.ndarray) -> np.ndarray:
        return z - np.log(np.exp(z).sum(-1, keepdims=True))

    def picked(log_p: np.ndarray, ids: np.ndarray) -> np.ndarray:
        return np.take_along_axis(log_p, ids[..., None].astype(np.int64), -1)[..., 0]

    log_p, cooler = log_softmax(z), log_softmax(z / 2)
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    wanted = weight * (-picked(log_p, ids[:, 1:]) - 0.1 * entropy)
    wanted += picked(cooler, ids[:, 1:]) * picked(cooler, ids[:, :-1])
    assert plain_loss(WEIGHTED, ids, weight) == pytest.approx(wanted[:, :6].mean(), rel=1e-5)
    rows = picked(log_p, ids[:, 1:])[:, :6].sum(-1) ** 2
    assert plain_loss(OF_ROWS, ids) == pytest.approx(rows.mean(), rel=1e-5)
    total = np.log(np.exp(z).sum(-1))[:, :6]
    assert plain_loss(Loss(whole), ids) == pytest.approx((total + 0.1 * total**2).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda logits, batch: logits.entropy().sum(), r"loss lambda has the shape \[\]; valid: \[B, T\], here"),
        (lambda logits, batch: {"less": logits.entropy()}, r"loss lambda returned less; valid: loss(\n|$)"),
        (lambda logits, batch: {"loss": logits.entropy(), "x": 1}, r"; valid: loss, or .*measures=\('x',\)"),
        (lambda logits, batch: None, r"loss lambda is None; valid: \[B, T\]"),
        (lambda logits, batch: batch["targets"], "of the type int32, which has no gradient; valid: floats"),
        (
            lambda logits, batch: batch["target"],
            r"'target' \(.*test_own_step.py:\d+\); valid: .*with targets, tokens",
        ),
        (lambda logits, batch: jnp.exp(logits), r"TypeError: .*Logits.*; valid: .*whole\(\) for an array"),
        (lambda logits, batch: logits.columns_BTV[..., 0], "was computed from this device's columns alone; valid"),
    ],
)
def test_what_is_no_loss_is_told_in_one_line(function: Any, problem: str) -> None:
    from megajax.core.program.train_step import train_step

    named = own((1, 1, 1), Loss(function, title="next_token"), None)
    assert "next_token is called like a language model's own; valid" in user_error(Program.abstract, named, CPU)
    program = Program.abstract(own((2, 1, 2), Loss(function), None), CPU)
    with pytest.raises(Exception, match=problem):
        train_step(program).trace(program.layout.shapes, program.batch_types)
    assert "valid: a function of logits and batch" in user_error(Loss, 3)
    for names in ("loss",), ("mfu",), ("of_rows",), ("x", "x"):
        assert "two figures called" in user_error(Loss, of_rows, measures=names)
    for names in "x", 3, ("a b",), ("a/b",), ("",), (5,), ("_x",), ("validation_x",):
        assert re.search("valid: (letters, digits|a tuple of names)", user_error(Loss, of_rows, measures=names))
