"""The collectives: `f` and `g` are each other's transpose, stages hand over to their neighbours. Split MLP and
attention give the output and every gradient of the same block on one device, written plainly; also where the sequence
is split."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiny import full

from megajax.core.backend import CPU
from megajax.core.mesh import make_mesh, mesh_spec
from megajax.core.models.attention import Attention, attend_in_context
from megajax.core.models.attention_mask import CAUSAL
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.mlp import MLP
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import (
    broadcast_stage,
    complete,
    f,
    g,
    send_down,
    send_up,
    sum_over,
    vary,
    varying_axes,
    zeros_like_type,
)
from megajax.core.parallel.random import Dropout, NamedKey
from megajax.verify import named_leaves


def region(function, size: int, in_specs, out_specs, axis: str = "tensor"):
    """`function` in the `shard_map` region of a mesh of `size` devices along one axis."""
    sizes = {"data": 1, "pipe": 1, "tensor": 1} | {axis: size}
    mesh = make_mesh(**sizes, devices=jax.devices()[:size])
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_f_and_g_are_each_other_s_transpose(size):
    """`f` hands every device the same x, and adds up the devices' different gradients; `g` the other way round."""

    def both_passes(function):
        def run(x, grad):
            y, pullback = jax.vjp(function, x)
            return y, pullback(grad)[0]

        return run

    same, different, split, whole = random(3), random(size * 3), P("tensor"), P()
    copies, total = np.tile(same, size), different.reshape(size, 3).sum(0)
    y, grad_x = region(both_passes(f), size, (whole, split), (split, whole))(same, different)
    np.testing.assert_array_equal(y, copies)
    np.testing.assert_allclose(grad_x, total, rtol=1e-5)
    y, grad_x = region(both_passes(g), size, (split, whole), (whole, split))(different, same)
    np.testing.assert_allclose(y, total, rtol=1e-5)
    np.testing.assert_array_equal(grad_x, copies)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stages_hand_over_to_their_neighbours(size):
    """Activations go up and gradients down by one stage; the ends receive zeros, in a ring each other's."""
    stages = np.arange(1, size + 1, dtype=np.float32)

    def sent(ring: bool):
        function = lambda x: (send_up(x, ring=ring), send_down(x, ring=ring))  # noqa: E731
        return region(function, size, P("pipe"), P("pipe"), axis="pipe")(stages)

    up, down = sent(ring=False)
    np.testing.assert_array_equal(up, [0, *stages[:-1]])
    np.testing.assert_array_equal(down, [*stages[1:], 0])
    up, down = sent(ring=True)
    np.testing.assert_array_equal(up, np.roll(stages, 1))
    np.testing.assert_array_equal(down, np.roll(stages, -1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_stage_is_heard_by_all(size):
    """What one stage has reaches all of them exactly, whatever the others hold, NaN included."""
    x = np.full((size, 3), np.nan, np.float32)
    x[size - 1] = random(3)

    def function(x):
        return broadcast_stage(x[0], jax.lax.axis_index("pipe") == size - 1)

    np.testing.assert_array_equal(region(function, size, P("pipe"), P(), axis="pipe")(x), x[size - 1])


def test_local_sums_are_completed_over_what_their_spec_lacks():
    """A leaf is summed over an axis only where it varies over it and its spec does not name it."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "pipe", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    specs = {"split": P("tensor"), "both": P(("pipe", "tensor")), "whole": P(), "same": P()}

    def function(x):
        local = {"split": x, "both": x, "whole": x, "same": sum_over(x, ("data", "pipe", "tensor"))}
        total = complete(local, specs)
        assert varying_axes(total["split"]) == {"tensor"} and not varying_axes(total["whole"])
        assert varying_axes(total["both"]) == {"pipe", "tensor"}
        return total

    x = random(8).reshape(2, 2, 2)  # data, pipe, tensor
    run = jax.shard_map(function, mesh=mesh, in_specs=P(("data", "pipe", "tensor")), out_specs=specs)
    total = run(x.ravel())
    np.testing.assert_allclose(total["split"], x.sum((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(total["both"], x.sum(0).ravel(), rtol=1e-6)
    np.testing.assert_allclose(total["whole"], [x.sum()], rtol=1e-5)
    np.testing.assert_allclose(total["same"], [x.sum()], rtol=1e-5)


def test_gradients_of_varied_weights_stay_local():
    """What is declared varying has local gradients; `sum_over` completes them, once."""

    def function(weight, x):
        local = jax.grad(lambda weight: jnp.sum(weight * x))(vary(weight, ("data",)))
        assert varying_axes(local) == {"data"} and varying_axes(sum_over(local, ("data",))) == frozenset()
        return local[None], sum_over(local, ("data",)), sum_over(local, ())[None]

    x = random(4)
    run = region(function, 4, (P(), P("data")), (P("data"), P(), P("data")), axis="data")
    local, total, same = run(np.float32(2), x)
    np.testing.assert_allclose(local, x, rtol=1e-6)
    np.testing.assert_allclose(total, x.sum(), rtol=1e-5)
    np.testing.assert_array_equal(same, local)


def test_zeros_have_the_type_they_are_asked_for():
    """Shape, dtype and varying axes of the example, with leading dims in front; `vary` twice is `vary` once."""

    def function(x):
        zeros = zeros_like_type(x.astype(jnp.bfloat16), (5,))
        assert zeros.shape == (5, *x.shape) and zeros.dtype == jnp.bfloat16
        assert varying_axes(zeros) == {"tensor"} == varying_axes(vary(zeros, ("tensor",)))
        return zeros

    assert not region(function, 2, P("tensor"), P(None, "tensor"))(random(4)).any()


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
    x_BTD, grad_BTD = np.random.default_rng(1).normal(size=(2, BATCH, CONFIG.sequence_length, CONFIG.hidden_size))
    return x_BTD.astype(np.float32), grad_BTD.astype(np.float32)


@cache
def plain_result(block: str) -> dict[str, np.ndarray]:
    y_BTD, pullback = jax.vjp(jax.jit(PLAIN[block]), split(block)[2], inputs()[0])
    return {"output": y_BTD} | named_leaves(dict(zip(("weights", "input"), pullback(inputs()[1]), strict=True)))


OTHERS = [(1, False), (2, False), (8, False), (1, True), (8, True)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("size", "sequence"), [*(full(*case) for case in OTHERS), (2, True)])
def test_a_split_block_is_the_unsplit_one(block, size, sequence):
    """Output, gradient of the input and of every weight, duplicated biases included, on 1, 2 and 8 devices."""
    graph, specs, weights = split(block, sequence)
    activation = P(None, "tensor") if sequence else P()

    def run(weights, x_BTD):
        module = nnx.merge(graph, nnx.State(weights))
        context = Context(Dropout.off(), CAUSAL)
        return module(x_BTD, context, 0 if block == "mlp" else attend_in_context)[0]

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
