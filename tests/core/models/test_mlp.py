"""LayerNorm against numpy, the parts of a layer that are not split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.core.models.mlp import gelu
from megajax.core.models.norms import LayerNorm

SIZE = 96


def layer_norm(scale_D: np.ndarray, bias_D: np.ndarray) -> LayerNorm:
    norm = LayerNorm(SIZE, 1e-5)
    norm.scale, norm.bias = nnx.Param(jnp.asarray(scale_D)), nnx.Param(jnp.asarray(bias_D))
    return norm


def reference(x_BTD: np.ndarray, scale_D: np.ndarray, bias_D: np.ndarray) -> np.ndarray:
    x_BTD = np.asarray(x_BTD).astype(np.float64)
    normal_BTD = (x_BTD - x_BTD.mean(-1, keepdims=True)) / np.sqrt(x_BTD.var(-1, keepdims=True) + 1e-5)
    return normal_BTD * scale_D + bias_D


@pytest.fixture(scope="module")
def weights() -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(2, SIZE)).astype(np.float32))


@pytest.mark.parametrize(("mean", "std"), [(0, 1), (100, 1), (0, 1e-3), (0, 1e-8), (-3, 1e4)])
def test_layer_norm_is_numpy_s(weights, mean, std):
    """Also for a mean that dwarfs the spread, and for a spread below that of epsilon, 1e-5."""
    x_BTD = np.random.default_rng(1).normal(mean, std, (2, 3, SIZE)).astype(np.float32)
    np.testing.assert_allclose(layer_norm(*weights)(x_BTD), reference(x_BTD, *weights), rtol=1e-4, atol=5e-5)


def test_bf16_statistics_are_taken_in_fp32(weights):
    """The result is rounded three times (normalised, scaled, shifted), the statistics are not."""
    x_BTD = np.random.default_rng(1).normal(8, 1, (2, 3, SIZE)).astype(jnp.bfloat16)
    narrow = [weight.astype(jnp.bfloat16) for weight in weights]
    actual = layer_norm(*narrow)(jnp.asarray(x_BTD))
    expected = reference(x_BTD, *(weight.astype(np.float64) for weight in narrow))
    assert actual.dtype == jnp.bfloat16
    largest = np.abs(expected - narrow[1].astype(np.float64)) + np.abs(narrow[1].astype(np.float64))
    assert (np.abs(np.asarray(actual).astype(np.float64) - expected) <= 3 * 2**-8 * largest + 1e-6).all()


def test_the_gradient_is_that_of_the_formula(weights):
    """Of the input and both weights, with the statistics computed again in the backward pass."""
    x_BTD, grad_BTD = np.random.default_rng(2).normal(2, 3, (2, 4, 5, SIZE)).astype(np.float32)

    def formula(x_BTD, scale_D, bias_D):
        normal_BTD = (x_BTD - x_BTD.mean(-1, keepdims=True)) / jnp.sqrt(x_BTD.var(-1, keepdims=True) + 1e-5)
        return normal_BTD * scale_D[None, None] + bias_D[None, None]

    actual = jax.vjp(lambda x, scale, bias: layer_norm(scale, bias)(x), x_BTD, *weights)[1](grad_BTD)
    for gradient, expected in zip(actual, jax.vjp(formula, x_BTD, *weights)[1](grad_BTD), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gelu_is_that_of_jax(dtype):
    """Value and derivative, which are written out, over all that is not 0 or linear."""
    x_BTF = jnp.linspace(-6, 6, 1001, dtype=dtype)[None, None]

    def slope(function):
        return jax.grad(lambda x: jnp.sum(function(x).astype(jnp.float32)))(x_BTF)

    def theirs(x):
        return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(dtype)

    rounding = {"float32": 1e-6, "bfloat16": 8e-3}[dtype]
    for ours, expected in ((gelu(x_BTF), theirs(x_BTF)), (slope(gelu), slope(theirs))):
        np.testing.assert_allclose(ours.astype(np.float32), expected.astype(np.float32), rtol=rounding, atol=rounding)
