"""GPT-2: learned positions, a stack of pre-LayerNorm blocks, a final LayerNorm, and an output head tied to the
embedding.

The pieces are called one by one by whoever runs the layers (`embed`, then the blocks, then `loss` or `logits`), inside
the one `shard_map` region. Letters: B batch, T tokens, D model, V vocabulary, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from megajax.backend import CPU, Backend
from megajax.models.attention import Attend
from megajax.models.config import ModelConfig
from megajax.models.transformer import Block, LayerNorm
from megajax.parallel.layers import normal_param
from megajax.parallel.random import Dropout, NamedKey
from megajax.parallel.split import PAPER, Split
from megajax.parallel.vocabulary import IGNORED, cross_entropy, embedding_lookup, greedy_ids, output_logits

EMBEDDING_SITE = 0xFFFF_FFFF  # stands where a layer's index stands in the dropout of the layers


class GPT(nnx.Module):
    """The model; `blocks` holds all layers stacked along a leading dim `layers`."""

    def __init__(self, config: ModelConfig, key: NamedKey, split: Split = PAPER, backend: Backend = CPU):
        self.vocab_size, self.split, self.backend = config.vocab_size, split, backend
        self.table = normal_param(
            key / "table", (config.padded_vocab_size, config.hidden_size), config.init_std, ("vocabulary", "embed")
        )
        self.positions = normal_param(
            key / "positions", (config.sequence_length, config.hidden_size), config.init_std, ("position", "embed")
        )
        self.final_norm = LayerNorm(config.hidden_size)

        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(layer: Array) -> Block:
            return Block(config, key / "blocks" / layer, split, backend)

        self.blocks = stacked(jnp.arange(config.num_layers, dtype=jnp.int32))

    def embed(self, tokens_BT: Array, dropout: Dropout, positions_BT: Array | None = None) -> Array:
        """Token plus position embedding with dropout, shape [B, T, D]; of a split sequence this device's tokens.

        The positions are those in the sequence, or those given (see `blocked_attention`).
        """
        x_BTD = embedding_lookup(self.table[...], tokens_BT, self.split)
        if positions_BT is None:
            x_BTD += self.split.own(self.positions[...][: tokens_BT.shape[1]], 0)[None]
        else:
            x_BTD += jnp.take(self.positions[...], self.split.own(positions_BT), axis=0, mode="clip")
        return dropout.fold(EMBEDDING_SITE)(x_BTD, self.split.tokens(x_BTD))

    def logits(self, x_BTD: Array) -> Array:
        """This device's columns of the logits, [B, T, V / devices that the vocabulary is split over]."""
        return output_logits(self.final_norm(x_BTD), self.table[...], self.vocab_size, self.split, self.backend)

    def loss(self, x_BTD: Array, targets_BT: Array) -> Array:
        """Sum of the cross-entropy over the tokens whose target is not `IGNORED`, a scalar."""
        return jnp.sum(cross_entropy(self.logits(x_BTD), targets_BT, self.split.vocabulary))

    def scores(self, x_BTD: Array, targets_BT: Array) -> tuple[Array, Array]:
        """Cross-entropy of every target, and whether it is the most probable id: 1 or 0, int32. Both [B, T].

        Where the target is `IGNORED` they are 0 and `IGNORED`.
        """
        logits_BTV, axes = self.logits(x_BTD), self.split.vocabulary
        hit_BT = (greedy_ids(logits_BTV, axes) == targets_BT).astype(jnp.int32)
        return cross_entropy(logits_BTV, targets_BT, axes), jnp.where(targets_BT == IGNORED, IGNORED, hit_BT)


def abstract_gpt(config: ModelConfig, split: Split = PAPER, backend: Backend = CPU) -> GPT:
    """The model with shapes in place of arrays: nothing is allocated."""
    return nnx.eval_shape(lambda: GPT(config, NamedKey.from_seed(0), split, backend))


def count_parameters(config: ModelConfig) -> int:
    """Number of weights, the padded vocabulary included."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_gpt(config), nnx.Param)))


class GPTFunctions:
    """The model as pure functions of its weights, for whoever distributes the layers.

    Weights are nested dicts: `shared` (embedding, positions, final LayerNorm: used by the first and the last stage)
    and `blocks`.

    Attributes:
        shapes: `{"shared": …, "blocks": …}` of `ShapeDtypeStruct`, layers stacked `[L, …]`.
        logical_specs: the same tree with a `PartitionSpec` of logical dim names for every weight.
    """

    def __init__(self, config: ModelConfig, split: Split = PAPER, backend: Backend = CPU):
        self.config, self.split = config, split
        model = abstract_gpt(config, split, backend)
        shared_graph, self._blocks_graph, parts = _split(model)
        self._shared_graph = shared_graph
        self.shapes = nnx.to_pure_dict(parts)
        self.logical_specs = nnx.to_pure_dict(nnx.get_partition_spec(parts))

    def init(self, seed: int) -> dict:
        """Fresh weights, layers stacked `[L, …]`, each drawn from a key of its own name: the same on every mesh."""
        return nnx.to_pure_dict(_split(GPT(self.config, NamedKey.from_seed(seed)))[2])

    def embed(self, shared: dict, tokens_BT: Array, dropout: Dropout, positions_BT: Array | None = None) -> Array:
        """See `GPT.embed`."""
        return nnx.merge(self._shared_graph, nnx.State(shared)).embed(tokens_BT, dropout, positions_BT)

    def block(
        self, weights: dict, layer: Array, x_BTD: Array, dropout: Dropout, positions_BT: Array | None = None
    ) -> Array:
        """Layer number `layer`, whose `weights` have no leading dim."""
        return nnx.merge(self._blocks_graph, nnx.State(weights))(x_BTD, dropout.fold(layer), positions_BT)

    def attending_block(self, weights: dict, x_BTD: Array, attend: Attend) -> tuple[Array, Any]:
        """A layer without dropout around any form of attention (`Block.run`)."""
        return nnx.merge(self._blocks_graph, nnx.State(weights)).run(x_BTD, Dropout.off(), attend)

    def loss(self, shared: dict, x_BTD: Array, targets_BT: Array) -> Array:
        """See `GPT.loss`."""
        return nnx.merge(self._shared_graph, nnx.State(shared)).loss(x_BTD, targets_BT)

    def scores(self, shared: dict, x_BTD: Array, targets_BT: Array) -> tuple[Array, Array]:
        """See `GPT.scores`."""
        return nnx.merge(self._shared_graph, nnx.State(shared)).scores(x_BTD, targets_BT)

    def logits(self, shared: dict, x_BTD: Array) -> Array:
        """See `GPT.logits`."""
        return nnx.merge(self._shared_graph, nnx.State(shared)).logits(x_BTD)


def _split(model: GPT) -> tuple[nnx.GraphDef, nnx.GraphDef, nnx.State]:
    """Take the blocks out: graph of the rest, graph of the blocks, and the weights of both by name."""
    blocks = model.blocks
    del model.blocks
    shared_graph, shared = nnx.split(model, nnx.Param)
    blocks_graph, stacked = nnx.split(blocks, nnx.Param)
    return shared_graph, blocks_graph, nnx.State({"shared": shared, "blocks": stacked})
