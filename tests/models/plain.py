"""A transformer's parts with dropout in float64, unsplit and unblocked, written plainly in numpy from the weights; and
weights for it.

Letters: B batch, T and S tokens, D model, H heads, K head size, F feed-forward, V vocabulary, C classes, L layers.
"""

from collections.abc import Callable

import jax
import numpy as np

from megajax.batch import IGNORED
from megajax.config import Config
from megajax.mesh import shardings
from megajax.parallel.random import RandomBits
from megajax.program.program import Program

EMBEDDING, ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = 0xFFFF_FFFF, 0, 1, 2  # what the masks are drawn for


@jax.jit
def hash_of(*coordinates) -> jax.Array:
    state = RandomBits.from_seed(coordinates[0])
    for index in coordinates[1:-1]:
        state = state.fold(index)
    return state.last(coordinates[-1])


class Plain:
    """What the families have in common.

    Args:
        config: of the model.
        weights: in canonical form.
        rate: of dropout.
        step: that the masks are drawn for.
    """

    epsilon: float
    activation: Callable[[np.ndarray], np.ndarray]

    def __init__(self, config: Config, weights: dict, rate: float, step: int):
        self.config, self.rate, self.step = config, rate, step
        self.weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)

    def block(self, layer: int) -> dict:
        """Weights of one layer."""
        return jax.tree.map(lambda leaf: leaf[layer], self.weights["blocks"])

    def dropped(self, x: np.ndarray, *site: int) -> np.ndarray:
        """`x` [B, …] times the mask of (seed, step, sample, *site, its other coordinates)."""
        if self.rate == 0:
            return x
        sample, *others = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in x.shape), indexing="ij", sparse=True)
        bits = hash_of(np.uint32(self.config.seed), self.step, sample, *(np.uint32(index) for index in site), *others)
        return x * (np.asarray(bits) >= round(self.rate * 2**32)) / (1 - self.rate)

    def norm(self, weights: dict, x_BTD: np.ndarray) -> np.ndarray:
        variance_BT1 = x_BTD.var(-1, keepdims=True)
        normal_BTD = (x_BTD - x_BTD.mean(-1, keepdims=True)) / np.sqrt(variance_BT1 + self.epsilon)
        return normal_BTD * weights["scale"] + weights["bias"]

    def attention(self, weights: dict, x_BTD: np.ndarray, seen_BTS: np.ndarray, layer: int) -> np.ndarray:
        q_BTHK, k_BSHK, v_BSHK = (
            np.einsum("BTD,DHK->BTHK", x_BTD, weights[part]["weight"]) + weights[part]["bias"]
            for part in ("query", "key", "value")
        )
        scores_BHTS = np.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / np.sqrt(q_BTHK.shape[-1])
        scores_BHTS = np.where(seen_BTS[:, None], scores_BHTS, -np.inf)
        exp_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
        probability_BHTS = self.dropped(exp_BHTS / exp_BHTS.sum(-1, keepdims=True), layer, ATTENTION_WEIGHTS)
        y_BTHK = np.einsum("BHTS,BSHK->BTHK", probability_BHTS, v_BSHK)
        y_BTD = np.einsum("BTHK,HKD->BTD", y_BTHK, weights["output"]["weight"]) + weights["output"]["bias"]
        return self.dropped(y_BTD, layer, ATTENTION_OUTPUT)

    def mlp(self, weights: dict, x_BTD: np.ndarray, layer: int) -> np.ndarray:
        x_BTF = self.activation(linear(weights["up"], x_BTD))
        return self.dropped(linear(weights["down"], x_BTF), layer, MLP_OUTPUT)


def linear(weights: dict, x: np.ndarray) -> np.ndarray:
    return x @ weights["weight"] + weights["bias"]


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of every target, the last dim of the logits being the classes; 0 where it is ignored."""
    highest = logits.max(-1, keepdims=True)
    normalizer = (highest + np.log(np.exp(logits - highest).sum(-1, keepdims=True)))[..., 0]
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets == IGNORED, 0.0, normalizer - picked)


def random_weights(program: Program) -> dict:
    """Weights in canonical form, all of them random and large enough that every one matters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: rng.normal(0, 0.4, shape.shape).astype(np.float32), program.layout.canonical_shapes.params
    )


def place(program: Program, weights: dict) -> dict:
    """The weights in their shards."""
    layout = program.layout
    pipelined = {"shared": weights["shared"], "blocks": jax.tree.map(layout.placement.to_stages, weights["blocks"])}
    return jax.device_put(pipelined, shardings(layout.mesh, layout.specs.params))
