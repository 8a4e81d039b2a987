"""Layers of linear attention compute what those of transformers do: values, and the gradients of inputs and weights."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.backend import CPU
from megajax.core.mesh import make_mesh
from megajax.core.models.attention_mask import CAUSAL
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.delta import DeltaAttention
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.random import Dropout, NamedKey

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch", reason="the extra `peer` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

HIDDEN, LENGTH = 16, 70  # more than one chunk, and not a multiple of it
BEGINS = 21  # the second document, in our layer packed with the first
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 6, 5
Weights = dict[str, np.ndarray]
SIZES = {"linear_heads": HEADS, "linear_key_heads": KEY_HEADS, "linear_key_size": KEY, "linear_value_size": VALUE}


def by_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """[H · K, D] as [D, H, K]."""
    return weight.reshape(heads, -1, weight.shape[-1]).transpose(2, 0, 1)


def taps(weight: np.ndarray, key_heads: int, size: int) -> Weights:
    """One convolution of all channels as three."""
    parts = np.split(weight[:, 0].T, [key_heads * size, 2 * key_heads * size], 1)
    heads = {"query_taps": key_heads, "key_taps": key_heads, "value_taps": -1}
    value_heads = KEY_HEADS * 2 if key_heads == KEY_HEADS else key_heads
    return {
        name: part.reshape(len(part), value_heads if number < 0 else number, -1)
        for (name, number), part in zip(heads.items(), parts, strict=True)
    }


def qwen(w: Mapping[str, np.ndarray]) -> Weights:
    """Key head by key head, with the value heads that belong to it."""
    times = HEADS // KEY_HEADS
    mixed = w["in_proj_qkvz.weight"].reshape(KEY_HEADS, -1, HIDDEN)
    q, k, v, z = np.split(mixed, [KEY, 2 * KEY, 2 * KEY + times * VALUE], 1)
    b, a = np.split(w["in_proj_ba.weight"].reshape(KEY_HEADS, 2 * times, HIDDEN), 2, 1)
    named = {"query": by_heads(q, KEY_HEADS), "key": by_heads(k, KEY_HEADS)}
    named |= {"value": by_heads(v, HEADS), "attention_gate": by_heads(z, HEADS)}
    named |= {"write": b.reshape(HEADS, HIDDEN).T, "decay": a.reshape(HEADS, HIDDEN).T}
    return products(w, named) | {"norm/scale": w["norm.weight"]}


def olmo(w: Mapping[str, np.ndarray]) -> Weights:
    heads = {"q": ("query", KEY_HEADS), "k": ("key", KEY_HEADS), "v": ("value", HEADS), "g": ("attention_gate", HEADS)}
    named = {name: by_heads(w[f"{theirs}_proj.weight"], number) for theirs, (name, number) in heads.items()}
    named |= {"write": w["b_proj.weight"].T, "decay": w["a_proj.weight"].T}
    return products(w, named) | {"norm/scale": w["o_norm.weight"]}


def kimi(w: Mapping[str, np.ndarray]) -> Weights:
    names = {
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "g_b_proj": "attention_gate",
        "forget_gate.f_b_proj": "decay",
    }
    named = {ours: by_heads(w[f"{theirs}.weight"], HEADS) for theirs, ours in names.items()}
    named |= {"write": w["b_proj.weight"].T, "gate_down": w["g_a_proj.weight"].T}
    named |= {"decay_down": w["forget_gate.f_a_proj.weight"].T}
    found = {name.removeprefix("forget_gate."): weight for name, weight in w.items()}
    return products(found, named, HEADS) | {"norm/scale": w["o_norm.weight"]}


def products(w: Mapping[str, np.ndarray], named: Weights, key_heads: int = KEY_HEADS) -> Weights:
    """With the weights that all have."""
    output = w["out_proj.weight" if "out_proj.weight" in w else "o_proj.weight"]
    named["output"] = output.T.reshape(HEADS, -1, HIDDEN)
    size = KEY if key_heads == KEY_HEADS else VALUE
    bias = w["dt_bias"] if key_heads == KEY_HEADS else w["dt_bias"].reshape(HEADS, -1)
    others = {"decay_rate": w["A_log"].reshape(-1), "decay_bias": bias} | taps(w["conv1d.weight"], key_heads, size)
    return {f"{name}/weight": weight for name, weight in named.items()} | others


SHARED: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 4}
HEADS_OF = {"linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": HEADS}
HEADS_OF |= {"linear_key_head_dim": KEY, "linear_value_head_dim": VALUE}
CASES = {  # its class and configuration, our options, our weights
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextConfig", HEADS_OF, {"norm_epsilon": 1e-6}, qwen),
    "olmo_hybrid": (
        "OlmoHybridGatedDeltaNet",
        "OlmoHybridConfig",
        HEADS_OF,
        {"linear_write": 2.0, "linear_norm_epsilon": 1e-5, "norm_epsilon": 1e-6},
        olmo,
    ),
    "kimi_linear": (
        "KimiLinearDeltaAttention",
        "KimiLinearConfig",
        {"linear_num_heads": HEADS, "linear_head_dim": VALUE},
        {"linear_decay": "channel", "linear_gate": "sigmoid", "linear_key_heads": HEADS, "linear_key_size": VALUE}
        | {"norm_epsilon": 1e-5},
        kimi,
    ),
}


@pytest.mark.parametrize("family", CASES)
def test_a_layer_is_that_of_transformers(family: str) -> None:
    """Of two packed documents, theirs of one after the other."""
    kind, configuration, theirs, ours, convert = CASES[family]
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[kind])
    torch.manual_seed(0)
    layer = getattr(module, kind)(getattr(transformers, configuration)(**SHARED | theirs), 0)
    for weight in layer.parameters():
        scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.5
        weight.data = scale * torch.randn_like(weight) + (weight.ndim == 1)
    x, along = torch.randn(2, LENGTH, HIDDEN, requires_grad=True), torch.randn(2, LENGTH, HIDDEN)
    y = torch.cat([layer(document) for document in x.split([BEGINS, LENGTH - BEGINS], 1)], 1)
    (y * along).sum().backward()
    weights = convert({name: weight.detach().numpy() for name, weight in layer.named_parameters()})
    grads = convert({name: weight.grad.numpy() for name, weight in layer.named_parameters()})

    config = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_heads=2, sequence_length=LENGTH, vocab_size=9, **SIZES | ours
    )
    graph, state = nnx.split(nnx.eval_shape(lambda: DeltaAttention(config, NamedKey.from_seed(0), F_AND_G, CPU)))
    shapes = {"/".join(path): leaf.shape for path, leaf in flatten_dict(nnx.to_pure_dict(state)).items()}
    assert shapes == {name: weight.shape for name, weight in weights.items()}
    position_T = np.r_[:BEGINS, : LENGTH - BEGINS].astype(np.int32)
    context = Context(Dropout.off(), CAUSAL.in_documents(position_T[None]))

    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(jax.devices()[:1]), in_specs=PartitionSpec(), out_specs=PartitionSpec())
    def both(weights: Any, x_BTD: Array, along_BTD: Array) -> tuple:
        def run(weights: Any, x_BTD: Array) -> Array:
            return nnx.merge(graph, weights)(x_BTD, context, lambda: None)[0]

        y_BTD, pullback = jax.vjp(run, weights, x_BTD)
        return y_BTD, *pullback(along_BTD)

    tree = unflatten_dict({tuple(name.split("/")): weight for name, weight in weights.items()})
    found = both(tree, x.detach().numpy(), along.numpy())
    named = {"/".join(path): grad for path, grad in flatten_dict(found[1]).items()}
    pairs = {"output": (found[0], y.detach()), "input": (found[2], x.grad)}
    for name, (own, expected) in (pairs | {name: (named[name], grads[name]) for name in grads}).items():
        scale = np.abs(expected := np.asarray(expected)).max()
        np.testing.assert_allclose(np.asarray(own) / scale, expected / scale, atol=2e-5, err_msg=name)
