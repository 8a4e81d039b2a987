"""Layers of linear attention, alone and beside others: a step on a mesh is that of one device, exactly, with documents
that begin anywhere; so are scores, generation and checkpoints."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from field import SMALL, assert_exact
from tiny import LINEAR as BY_HEAD
from tiny import LLAMA, MIXTURE, tiny_config, tiny_program

from megajax.core.models.delta import _decays
from megajax.core.models.lora_config import LoraConfig
from megajax.core.program.scoring import scores
from megajax.core.program.train_step import loss_and_gradients
from megajax.data.synthetic import random_batch
from megajax.library.plain import PlainModel
from megajax.verify import named_leaves
from megajax.verify.beside import beside_training
from megajax.verify.run import drawn_weights

slow = partial(pytest.param, marks=pytest.mark.slow)
WORDS = LLAMA | SMALL | {"num_heads": 2, "num_kv_heads": 2, "sequence_length": 16, "vocab_size": 21, "dropout": 0.0}
WORDS |= {"rope_scaling": "none", "rope_factor": 1.0, "rope_original_length": 8192, "mlp_size": 8, "num_layers": 1}
BY_CHANNEL = BY_HEAD | {"linear_key_heads": 4, "linear_decay": "channel", "linear_gate": "sigmoid"}
FEW_KEYS = BY_HEAD | {"linear_key_heads": 1, "linear_chunk": 2}

# Periods of two layers and one; the last one is short where `num_layers` says so.
MUON = {"optimizer": {"name": "muon"}}
HYBRID = BY_HEAD | {"num_kv_heads": 1, "linear_layers": "2,1", "num_layers": 6, "dropout": 0.25}

ROWS = {
    "tensor": ((1, 1, 2), BY_HEAD | {"reset_attention": True}),
    "context": ((1, 1, 2, 1), BY_HEAD | {"reset_attention": True, "context_attention": "gather"}),
    "channels": ((1, 1, 2, 2), BY_CHANNEL | {"reset_attention": True, "sequence_parallel": True, "zero": 3}),
    "deferred": ((1, 2, 2), FEW_KEYS | {"num_layers": 2, "weight_gradients": "deferred", "sequence_parallel": True}),
    "heads": ((1, 1, 2, 1), FEW_KEYS | {"context_attention": "heads", "remat": "selective"}),
    "adapters": ((2, 1, 2), BY_CHANNEL | {"lora": LoraConfig(rank=2), "precision": "bf16"}),
}
BESIDE = {
    "one kind": ((1, 1, 2), BY_CHANNEL),
    "two kinds": ((2, 1, 2), HYBRID | {"num_layers": 5}),
    "stages": ((1, 2, 1), HYBRID | {"num_layers": 5}),
}
KINDS = {
    "1f1b": (
        (1, 2, 2),
        HYBRID
        | {"sequence_parallel": True, "remat": "stage", "freeze": ("embedding,layers.0-1,layers.4.attention",)}
        | {"layer_order": "pre-reordered"},
    ),
    "interleaved": (
        (1, 2, 1),
        HYBRID
        | {"linear_layers": "1,1", "num_layers": 8, "schedule": "interleaved", "chunks": 2}
        | {"weight_gradients": "deferred", "vocabulary": "split"},
    ),
    "zero": ((2, 2, 1), HYBRID | {"num_layers": 5, "zero": 3, "remat": "layer", "layers": "3,2"} | MUON),
    "documents": (
        (1, 1, 2, 1),
        HYBRID
        | {"num_layers": 3, "reset_attention": True, "context_attention": "gather", "sliding_window": 5}
        | {"window_layers": "0,1,1,1"},
    ),
    "overlaps": (
        (2, 2, 1),
        HYBRID
        | {"linear_layers": "1,1", "num_layers": 8, "schedule": "interleaved", "chunks": 2}
        | {"optimizer": {"overlap_reductions": "true", "overlap_gathers": "true"}},
    ),
    "overlaps, deferred": (
        (2, 2, 1),
        HYBRID | {"weight_gradients": "deferred", "optimizer": {"overlap_reductions": "true"}, "ema": 0.5},
    ),
    "adapters": ((1, 2, 1), HYBRID | {"lora": LoraConfig(rank=2), "weight_gradients": "deferred"}),
    "experts": (
        (1, 2, 1, 1),
        MIXTURE
        | HYBRID
        | {"num_layers": 7, "num_experts": 4, "expert": 2, "balance": "bias", "dense_layers": 1}
        | {"linear_layers": "3,1", "dropout": 0.0},
    ),
}

BY_DEFAULT = "tensor", "two kinds, 1f1b"
EVERY = {name: ({"global_batch": 4}, *row) for name, row in ROWS.items()}
EVERY |= {f"two kinds, {name}": ({"global_batch": 8}, *row) for name, row in KINDS.items()}


@pytest.mark.parametrize("name", [each if each in BY_DEFAULT else slow(each) for each in EVERY])
def test_a_step_is_that_of_one_device(name: str) -> None:
    batch, mesh, words = EVERY[name]
    assert_exact(tiny_config(mesh, **WORDS | batch | words), branches=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_scores_generation_and_checkpoints_are_those_of_one_device(name: str) -> None:
    """Generation from states, of prompts with unequal lengths, chooses what is most probable without."""
    mesh, words = BESIDE[name]
    found = [*beside_training(tiny_config(mesh, **WORDS | {"global_batch": 4} | words))]
    assert len(found) == 3 and all(finding.passed for finding in found), found


@pytest.mark.slow
def test_gradients_are_those_of_a_plain_computation() -> None:
    """Of layers of two kinds, one after the other, by JAX's own derivative; with documents."""
    words = {"num_layers": 3, "linear_layers": "1,1", "linear_chunk": 2, "sequence_length": 8, "dropout": 0.0}
    config = tiny_config(**WORDS | HYBRID | words | {"reset_attention": True, "global_batch": 2})
    program, plain, batch = tiny_program(config), PlainModel(config), random_batch(config, 0)
    weights = plain.init()
    loss, expected = jax.jit(jax.value_and_grad(plain.loss))(weights, batch)
    params, placed = program.layout.params_on_stages(weights), program.put_batch(batch, program.local_rows)
    found, gradients = loss_and_gradients(program)(params, placed, np.int32(0))
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    gradients = named_leaves(program.layout.canonical_weights(gradients))
    for name, gradient in named_leaves(expected).items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(gradients[name] / scale, gradient / scale, atol=1e-5, err_msg=name)


def test_documents_in_another_order_have_the_same_losses() -> None:
    """Each of them, wherever it is packed; with layers of two kinds, in fp32."""
    words = {"num_layers": 3, "dropout": 0.0, "reset_attention": True, "global_batch": 2, "init_std": 0.4}
    program, rng, found = tiny_program(tiny_config(**WORDS | HYBRID | words)), np.random.default_rng(0), []
    params = program.layout.params_on_stages(drawn_weights(program))
    documents = [np.vstack([rng.integers(0, 21, (2, size)), np.arange(size)]) for size in (7, 1, 8, 3, 13)]
    for rows in ([0, 1, 2], [3, 4]), ([4, 3], [2, 1, 0]):
        packed = np.stack([np.hstack([documents[number] for number in row]) for row in rows], 1).astype(np.int32)
        batch = program.put_batch(
            dict(zip(("tokens", "targets", "positions"), packed, strict=True)), program.local_rows
        )
        losses = np.ravel(scores(program)(params, batch)["next_token"][0])
        order = [*rows[0], *rows[1]]
        ends = np.cumsum([documents[number].shape[1] for number in order])[:-1]
        found.append(dict(zip(order, np.split(losses, ends), strict=True)))
    for number, losses in found[0].items():
        np.testing.assert_allclose(found[1][number], losses, rtol=1e-6)


def test_decays_of_half_precision_are_fp32() -> None:
    raw, rate = jnp.zeros((1, 1, 1, 1), jnp.bfloat16), jnp.zeros(1, jnp.bfloat16)
    assert jax.eval_shape(_decays, raw, rate, rate, jnp.ones((1, 1), jnp.int32)).dtype == jnp.float32
