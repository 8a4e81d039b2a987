"""Split MLP and attention give the output and every gradient of the same block on one device, written plainly; also
where the sequence is split between them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from megajax.backend import CPU
from megajax.mesh import make_mesh, mesh_spec
from megajax.models.attention import Attention, attend_in_context
from megajax.models.attention_mask import CAUSAL
from megajax.models.config import ModelConfig
from megajax.models.context import Context
from megajax.models.mlp import MLP
from megajax.parallel.boundary import RegionBoundary
from megajax.parallel.random import Dropout, NamedKey
from megajax.verify import named_leaves

CONFIG = ModelConfig(num_layers=2, hidden_size=24, num_heads=8, sequence_length=16, vocab_size=64, init_std=0.3)
BATCH = 3
BLOCKS = {"mlp": MLP, "attention": Attention}


def plain_mlp(weights: dict, x_BTD: jax.Array) -> jax.Array:
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, weights["up"]["weight"]) + weights["up"]["bias"][None, None]
    cubic_BTF = up_BTF + 0.044715 * up_BTF**3
    gelu_BTF = 0.5 * up_BTF * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * cubic_BTF))
    return jnp.einsum("BTF,FD->BTD", gelu_BTF, weights["down"]["weight"]) + weights["down"]["bias"][None, None]


def plain_attention(weights: dict, x_BTD: jax.Array) -> jax.Array:
    q_BHTK, k_BHSK, v_BHSK = (
        jnp.einsum("BTD,DHK->BHTK", x_BTD, weights[part]["weight"]) + weights[part]["bias"][None, :, None, :]
        for part in ("query", "key", "value")
    )
    scores_BHTS = jnp.einsum("BHTK,BHSK->BHTS", q_BHTK, k_BHSK) / q_BHTK.shape[-1] ** 0.5
    causal_TS = jnp.tril(jnp.ones(scores_BHTS.shape[-2:], bool))
    probability_BHTS = jax.nn.softmax(jnp.where(causal_TS[None, None], scores_BHTS, -jnp.inf))
    out_BTHK = jnp.einsum("BHTS,BHSK->BTHK", probability_BHTS, v_BHSK)
    return jnp.einsum("BTHK,HKD->BTD", out_BTHK, weights["output"]["weight"]) + weights["output"]["bias"][None, None]


PLAIN = {"mlp": plain_mlp, "attention": plain_attention}


def split(block: str, sequence: bool = False) -> tuple:
    """Graph of a block, its weights' specs, and weights that are all random, biases included."""
    made = nnx.eval_shape(
        lambda: BLOCKS[block](CONFIG, NamedKey.from_seed(0), RegionBoundary(sequence_parallel=sequence), CPU)
    )
    graph, state = nnx.split(made)
    specs = jax.tree.map(mesh_spec, nnx.to_pure_dict(nnx.get_partition_spec(state)), is_leaf=lambda s: isinstance(s, P))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda w: rng.normal(0, 0.3, w.shape).astype(np.float32), nnx.to_pure_dict(state))
    return graph, specs, weights


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Input and gradient of the output."""
    x_BTD, grad_BTD = np.random.default_rng(1).normal(size=(2, BATCH, CONFIG.sequence_length, CONFIG.hidden_size))
    return x_BTD.astype(np.float32), grad_BTD.astype(np.float32)


@cache
def plain_result(block: str) -> dict[str, np.ndarray]:
    y_BTD, pullback = jax.vjp(jax.jit(PLAIN[block]), split(block)[2], inputs()[0])
    return {"output": y_BTD} | named_leaves(dict(zip(("weights", "input"), pullback(inputs()[1]), strict=True)))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("size", "sequence"), [(1, False), (2, False), (8, False), (1, True), (2, True), (8, True)])
def test_a_split_block_is_the_unsplit_one(block, size, sequence):
    """Output, gradient of the input and of every weight, duplicated biases included, on 1, 2 and 8 devices."""
    graph, specs, weights = split(block, sequence)
    activation = P(None, "tensor") if sequence else P()

    def run(weights, x_BTD):
        module = nnx.merge(graph, nnx.State(weights))
        context = Context(Dropout.off(), CAUSAL)
        return module(x_BTD, context) if block == "mlp" else module(x_BTD, context, attend_in_context)[0]

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(jax.devices()[:size], tensor=size),
        in_specs=(specs, activation, activation),
        out_specs=(activation, {"weights": specs, "input": activation}),
    )
    def split_result(weights, x_BTD, grad_BTD):
        y_BTD, pullback = jax.vjp(run, weights, x_BTD)
        return y_BTD, dict(zip(("weights", "input"), pullback(grad_BTD), strict=True))

    y_BTD, gradients = split_result(weights, *inputs())
    actual, expected = {"output": y_BTD} | named_leaves(gradients), plain_result(block)
    assert actual.keys() == expected.keys()
    for name in expected:
        # No bias of the keys changes the result: its gradient is rounding only, of the size of the other two.
        scale = np.abs(expected[name.replace("/key/bias", "/value/bias")]).max()
        np.testing.assert_allclose(actual[name], expected[name], atol=2e-6 * scale, rtol=1e-5, err_msg=name)
