"""The angles of rotary positions against formulas in NumPy; in a model they are tested by `test_forward.py`, against
transformers by `convert/test_peer_rotary.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hugging_face import ROTARY, SMALL
from model_in_numpy import frequencies

from megajax.core.models.config import ModelConfig
from megajax.core.models.rotary import rotated, rotations

YARN = {"rope_scaling": "yarn", "rope_original_length": 4096}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {  # pairs and options
    "mistral": (64, {"rope_theta": 1e6}),
    "linear": (3, {"rope_scaling": "linear", "rope_factor": 2.5}),
    "llama 3.1": (64, {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_theta": 5e5}),
    "qwen 3": (64, YARN | {"rope_factor": 4.0, "rope_original_length": 32768, "rope_theta": 1e6}),
    "deepseek-v3": (32, YARN | {"rope_factor": 40.0, "rope_attention_factor": 1.0}),
    "gpt-oss": (32, YARN | {"rope_factor": 32.0, "rope_theta": 15e4, "rope_truncate": False}),
    "kimi k2": (32, YARN | {"rope_factor": 32.0, "rope_theta": 5e4, "rope_beta_fast": 1.0}),
    "one step": (4, YARN | {"rope_factor": 9.0, "rope_beta_fast": 1.0, "rope_truncate": False}),
    "all fast": (5, YARN | {"rope_factor": 3.0, "rope_original_length": 10**8}),
    "one pair": (1, YARN | {"rope_factor": 3.0, "rope_original_length": 9}),
}


@pytest.mark.parametrize("name", MODELS)
def test_rotations_by_formula(name: str) -> None:
    pairs, options = MODELS[name]
    model = ModelConfig(**SMALL | ROTARY | options)
    (rotation_P, factor), (expected_P, expected) = rotations(model, pairs), frequencies(model, pairs)
    np.testing.assert_allclose(rotation_P, expected_P, rtol=1e-12)
    assert factor == pytest.approx(expected, rel=1e-12)


def test_yarn_s_rotations_by_parts() -> None:
    """Fast pairs keep theirs, slow ones rotate as many times more slowly as the sequence is longer; values of Qwen 3,
    worked out by hand: from pair 23 on they fall, from pair 40 on they are all slower."""
    pairs, options = MODELS["qwen 3"]
    rotation_P, factor = rotations(ModelConfig(**SMALL | ROTARY | options), pairs)
    share_P = rotation_P / 1e6 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(share_P[:24], 1, rtol=1e-12)
    np.testing.assert_allclose(share_P[40:], 1 / 4, rtol=1e-12)
    assert (np.diff(share_P[23:41]) < 0).all() and factor == pytest.approx(1.13862943611, rel=1e-11)


def test_the_gradient_is_the_transpose() -> None:
    """Of queries at any positions, whose lengths grow by the factor."""
    model = ModelConfig(**SMALL | ROTARY | YARN | {"rope_factor": 8.0, "rope_original_length": 32})
    q_BTHK, y_BTHK = np.random.default_rng(0).normal(size=(2, 2, 5, 3, 6)).astype(np.float32)
    position_BT = np.array([[0, 1, 2, 3, 100], [7, 8, 9, 0, 1]], np.int32)
    rotated_BTHK, pullback = jax.vjp(lambda q_BTHK: rotated(q_BTHK, position_BT, model), jnp.asarray(q_BTHK))
    (grad_BTHK,) = pullback(jnp.asarray(y_BTHK))
    assert np.vdot(rotated_BTHK, y_BTHK) == pytest.approx(np.vdot(q_BTHK, grad_BTHK), rel=1e-5)
    lengths_BTH, expected_BTH = (np.linalg.norm(x_BTHK, axis=-1) for x_BTHK in (rotated_BTHK, q_BTHK))
    np.testing.assert_allclose(lengths_BTH, rotations(model, 3)[1] * expected_BTH, rtol=1e-5)
