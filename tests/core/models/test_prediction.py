"""Multi-token prediction, against a plain computation.

Letters: B batch, T and S tokens, D model, H heads, K head size, F feed-forward, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny import drawn_params, tiny_config, tiny_program

from megajax.core.batch import IGNORED
from megajax.core.program.train_step import loss_and_gradients
from megajax.data.synthetic import random_batch
from megajax.verify.run import drawn_weights

Tree = Any
COEFFICIENT, MODULES = 0.5, 2
SIZE = {"num_layers": 1, "num_heads": 2, "sequence_length": 8, "global_batch": 2, "microbatch": 2, "dropout": 0.0}
WORDS = {"norm": "rmsnorm", "bias": "none", "precision": "fp64", "reset_attention": True, "scaled_embedding": True}


def norm(weights: Tree, x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * weights["scale"][None, None]


def layer(weights: Tree, x_BTD: jax.Array, document_BT: np.ndarray) -> jax.Array:
    y_BTD = norm(weights["attention_norm"], x_BTD)
    q, k, v = (
        jnp.einsum("btd,dhk->bhtk", y_BTD, weights["attention"][name]["weight"]) for name in ("query", "key", "value")
    )
    seen_BTS = (document_BT[:, :, None] == document_BT[:, None]) & np.tri(x_BTD.shape[1], dtype=bool)
    scores_BHTS = jnp.where(seen_BTS[:, None], q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5, -jnp.inf)
    y_BHTK = jax.nn.softmax(scores_BHTS) @ v
    x_BTD = x_BTD + jnp.einsum("bhtk,hkd->btd", y_BHTK, weights["attention"]["output"]["weight"])
    inner_BTF = jax.nn.gelu(norm(weights["mlp_norm"], x_BTD) @ weights["mlp"]["up"]["weight"])
    return x_BTD + inner_BTF @ weights["mlp"]["down"]["weight"]


def losses(weights: Tree, batch: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """What is minimized, and the mean over the targets of the next token. A row of module k is k tokens shorter, and
    its tokens are in the document of the first or of the last of the k + 1 that it knows."""
    shared, document_BT = weights["shared"], np.cumsum(batch["positions"] == 0, axis=1)
    embedded_BTD = shared["table"][batch["tokens"]] * shared["table"].shape[1] ** 0.5
    x_BTD = embedded_BTD + shared["positions"][batch["positions"]]
    x_BTD = layer(jax.tree.map(lambda leaf: leaf[0], weights["blocks"]), x_BTD, document_BT)
    x_BTD, means = norm(shared["final_norm"], x_BTD), []
    for number in range(MODULES + 1):
        last, first = document_BT[:, number:], document_BT[:, : document_BT.shape[1] - number]
        if number:
            own = jax.tree.map(lambda leaf, n=number: leaf[n - 1], shared["prediction"])
            pair = norm(own["embedding_norm"], embedded_BTD[:, number:]), norm(own["hidden_norm"], x_BTD[:, :-1])
            x_BTD = layer(own["block"], jnp.concatenate(pair, -1) @ own["projection"]["weight"], first)
            x_BTD = norm(own["final_norm"], x_BTD)
        log_p_BTV = jax.nn.log_softmax(x_BTD @ shared["table"][:101].T)
        targets_BT = np.where(first == last, batch["targets"][:, number:], IGNORED)
        row, token = np.nonzero(targets_BT != IGNORED)
        means.append(-jnp.mean(log_p_BTV[row, token, targets_BT[row, token]]))
    return means[0] + COEFFICIENT * sum(means[1:]) / MODULES, means[0]


def test_loss_and_gradients() -> None:
    """The loss is that of the next token alone, the gradients those of all."""
    config = tiny_config(prediction_modules=MODULES, prediction_coefficient=COEFFICIENT, **SIZE | WORDS)
    with jax.enable_x64(True):
        program = tiny_program(config)
        batch, weights = random_batch(config, 0), drawn_weights(program)
        expected, next_token = jax.jit(jax.grad(lambda weights: losses(weights, batch), has_aux=True))(weights)
        placed = program.put_batch(batch, program.local_rows)
        loss, found = loss_and_gradients(program)(drawn_params(program, weights), placed, np.int32(0))
        found = {"shared": found["shared"], "blocks": jax.tree.map(lambda leaf: leaf[0, 0], found["blocks"])}
        np.testing.assert_allclose(loss, next_token, rtol=1e-12)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), found, expected)
