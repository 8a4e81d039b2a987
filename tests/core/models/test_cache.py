"""A token at a time from a cache gives the logits that the whole sequence gives, at every position, on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiny import LATENT, QWEN3, drawn_params, full, tiny_config, tiny_program

from megajax.core.backend import CPU
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.cache import decode_step, prefill, slot_positions
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.collectives import complete
from megajax.core.parallel.random import Dropout

ROWS, PROMPT = 4, 5  # slots for the prompts
LENGTHS = np.array([1, 3, 5, 4], np.int32)  # of the prompts
LOGITS = P("data", None, "tensor")


def logits_of(program, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [rows, T, V] of the whole sequences, and of each row from the end of its prompt on, by a cache."""
    model = StagedModel(program.config.model, F_AND_G, CPU)
    num_layers, rest = program.config.model.num_layers, tokens.shape[1] - LENGTHS.max()
    num_slots = PROMPT + rest + 2

    def region(params, tokens_BT, length_B):
        shared = params["shared"]
        layers = [jax.tree.map(lambda w, n=n: w[0, 0, n], params["blocks"]) for n in range(num_layers)]
        ends = model.ends(shared)

        def embed(batch, cache="none"):
            context = dataclasses.replace(model.context(batch, Dropout.off()), cache=cache)
            return context, ends.embed(batch, context)

        context, x_BTD = embed({"tokens": tokens_BT})
        for number, layer in enumerate(layers):
            x_BTD, _ = model.block(layer)(x_BTD, context, number)
        whole_BTV = ends.logits(x_BTD)

        in_prompt = jnp.arange(PROMPT, dtype=jnp.int32)[None] < length_B[:, None]
        prompt_BT = jnp.where(in_prompt, tokens_BT[:, :PROMPT], 7)  # any token may pad
        context, x_BTD = embed({"tokens": prompt_BT}, "new")
        caches = []
        for number, layer in enumerate(layers):
            x_BTD, aux = model.block(layer)(x_BTD, context, number, prefill(num_slots))
            caches.append(aux["cache"])
        first_B1D = jnp.take_along_axis(x_BTD, (length_B - 1)[:, None, None], axis=1)

        def step(caches, number):
            position_B1, slot = (length_B + number)[:, None], PROMPT + number
            token_B1 = jnp.take_along_axis(tokens_BT, position_B1, axis=1)
            context, x_B1D = embed({"tokens": token_B1, "positions": position_B1}, "extended")
            context = dataclasses.replace(context, visible=AttentionMask.of_model(program.config.model, num_slots))
            positions = position_B1, slot_positions(num_slots, length_B, jnp.int32(PROMPT))
            filled = []
            for layer, weights, cache in zip(range(num_layers), layers, caches, strict=True):
                x_B1D, aux = model.block(weights)(x_B1D, context, layer, decode_step(cache, slot, *positions))
                filled.append(aux["cache"])
            return filled, ends.logits(x_B1D)[:, 0]

        steps_NBV = lax.scan(step, caches, jnp.arange(rest, dtype=jnp.int32))[1]
        cached_BNV = jnp.concatenate([ends.logits(first_B1D), steps_NBV.swapaxes(0, 1)], axis=1)
        return complete((whole_BTV, cached_BNV), (LOGITS, LOGITS))

    specs = program.layout.specs.params, P("data"), P("data")
    run = jax.shard_map(region, mesh=program.mesh, in_specs=specs, out_specs=LOGITS, check_vma=True)
    size = program.config.model.vocab_size
    whole, cached = jax.jit(run)(drawn_params(program), tokens, LENGTHS)
    return np.asarray(whole)[..., :size], np.asarray(cached)[..., :size]


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        full((1, 1, 1), {"num_layers": 3, "vocab_size": 67, "vocab_multiple": 1}),
        full((1, 1, 2), {"num_layers": 1, "hidden_size": 20, "num_heads": 2, "vocab_size": 129}),
        full((2, 1, 2), {"num_layers": 2, "sequence_length": 11}),
        ((1, 1, 4), {"num_layers": 2, **QWEN3}),
        full((1, 1, 2), {"num_layers": 2, "num_heads": 4, **LATENT}),
    ],
)
def test_every_position_has_the_logits_of_the_whole_sequence(mesh, sizes):
    """Rows whose prompts differ in length, in one batch; large weights, so that every key counts."""
    program = tiny_program(tiny_config(mesh, dropout=0.0, init_std=0.3, **sizes))
    config = program.config.model
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, config.sequence_length), np.int32)
    whole, cached = logits_of(program, tokens)
    assert np.abs(whole).max() > 1
    for row, length in enumerate(LENGTHS):
        expected = whole[row, length - 1 : length - 1 + cached.shape[1]]
        np.testing.assert_allclose(cached[row], expected, rtol=0, atol=1e-5 * np.abs(expected).max())
