"""The programs of generation with a KV cache, on a mesh without a pipe: prefill of whole prompts, then one token per
row at a time. Rows are sharded over the axes for rows; the heads of caches, and the vocabulary, over `tensor`. Letters:
B batch, T tokens, S slots, H heads, K head size, D model, V vocabulary, N tokens per dispatch.
"""

import dataclasses
from collections.abc import Callable, Collection
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from megajax.core.axes import BATCH_AXES
from megajax.core.batch import IGNORED
from megajax.core.mesh import on_mesh
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.cache import Cache, decode_step, prefill, slot_positions
from megajax.core.models.context import CacheUse, Context
from megajax.core.models.staged import StagedModel, of_kind
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.collectives import TENSOR, gather_shards, sum_over, vary
from megajax.core.parallel.random import Dropout
from megajax.core.program.float8 import LayerCopies
from megajax.core.program.program import Program
from megajax.core.trees import Tree
from megajax.generation.choice import Sampling, choose, seen_tokens

State = dict[str, Any]

TOKENS_AT_ONCE = 8
ROWS = PartitionSpec(BATCH_AXES)  # sequences are not sharded, so `context` shards rows too
CACHE = PartitionSpec(BATCH_AXES, TENSOR)
STATE_SPECS = {
    "caches": CACHE,  # of every layer
    "token": ROWS,  # the last one chosen
    "length": ROWS,  # of the prompt
    "limit": ROWS,  # most tokens to choose
    "stopped": ROWS,  # no more are chosen
    "bits": ROWS,  # state of the noise
    "step": PartitionSpec(),  # tokens chosen so far; with a repetition penalty there is also `seen`
    "first_slot": PartitionSpec(),  # where the first chosen token is in the caches
}


class DecodingPrograms:
    """What runs on the devices.

    Attributes:
        specs: of the weights, layer by layer: arrays of their own, since of a stack every layer's weights would be
            copied for every token.
        state_specs: of what is carried from token to token.
    """

    def __init__(self, program: Program, sampling: Sampling, ends: Collection[int]):
        """A continuation ends before any of the ids in `ends`."""
        self._config, self._mesh = program.config.model, program.mesh
        assert program.config.mesh.pipe == 1 and program.config.optimizer.zero != 3, program.config
        self._sampling, self._ends = sampling, sorted(ends)
        self.state_specs = STATE_SPECS | ({"seen": ROWS} if sampling.penalizes else {})
        self._model = StagedModel(self._config.forward_only, F_AND_G, program.backend)
        self._adapters = program.layout.adapters
        specs = jax.tree.map(lambda weight: weight.spec, program.layout.weights)
        kinds, records = self._config.kinds, program.layout.weights["blocks"]
        self._copies = {
            kind: LayerCopies(self._config, of_kind(records, kind), program.operand_dtype, both=False) for kind in kinds
        }
        # The number, the kind, and the place in the stack of every layer.
        self._layers = sorted((n, kind, place) for kind, own in kinds.items() for place, n in enumerate(own))
        of_layers = [
            self._copies[kind].layer_specs(of_kind(specs["blocks"], kind), number) for number, kind, _ in self._layers
        ]
        self.specs = {"shared": specs["shared"], "layers": of_layers}

    def unstacked(self, params: Tree) -> Tree:
        """The program's weights, layer by layer."""
        params = params if self._adapters is None else self._adapters.merged(params)
        stack = jax.tree.map(lambda weight: weight.reshape(-1, *weight.shape[3:]), params["blocks"])
        layers = [
            self._copies[kind].with_copies(jax.tree.map(itemgetter(place), of_kind(stack, kind)), number)
            for number, kind, place in self._layers
        ]
        return {"shared": params["shared"], "layers": layers}

    def region(self, function: Callable, specs: Tree) -> Callable:
        """A function of the weights and of arrays with `specs`, which returns a state and tokens [B, N]."""
        in_specs, out_specs = on_mesh(self._mesh, ((self.specs, specs), (self.state_specs, PartitionSpec())))
        return jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)

    # The following methods run inside the region: arrays are this device's shards.

    def prefill(self, num_slots: int, weights: Tree, inputs: State) -> tuple[State, Array]:
        tokens_BT, length_B = inputs["tokens"], inputs["length"]
        place_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
        real_BT = (place_1T < length_B[:, None]) & (inputs["limit"] > 0)[:, None]
        context, x_BTD = self._embed(weights, {"tokens": tokens_BT}, real_BT, "new")
        x_BTD, caches = self._through_layers(weights, x_BTD, context, [prefill(num_slots)] * self._config.num_layers)
        state = {
            "caches": caches,
            "length": length_B,
            "limit": inputs["limit"],
            "stopped": inputs["limit"] == 0,
            "bits": inputs["bits"],
            "step": jnp.zeros((), jnp.int32),
            "first_slot": jnp.full((), tokens_BT.shape[1], jnp.int32),
        }
        if self._sampling.penalizes:
            state["seen"] = seen_tokens(tokens_BT, length_B, self._config.vocab_size)
        x_B1D = jnp.take_along_axis(x_BTD, (length_B - 1)[:, None, None], axis=1)
        state, tokens_B = self._choose(weights, x_B1D, state)
        return state, gather_shards(tokens_B[:, None], 0, BATCH_AXES, invariant=True)

    def decode(self, weights: Tree, state: State) -> tuple[State, Array]:
        """Choose tokens until all rows have stopped, at most `TOKENS_AT_ONCE`."""

        def goes_on(carry: tuple[Array, Array, Array, State]) -> Array:
            count, num_running, _, _ = carry
            return (count < TOKENS_AT_ONCE) & (num_running > 0)

        def go_on(carry: tuple[Array, Array, Array, State]) -> tuple[Array, Array, Array, State]:
            count, _, tokens_BN, state = carry
            state, token_B = self._choose(weights, *self._next(weights, state))
            tokens_BN = lax.dynamic_update_slice_in_dim(tokens_BN, token_B[:, None], count, axis=1)
            return count + 1, _running(state), tokens_BN, state

        nothing_BN = jnp.full((state["token"].shape[0], TOKENS_AT_ONCE), IGNORED, jnp.int32)
        carry = jnp.zeros((), jnp.int32), _running(state), vary(nothing_BN, BATCH_AXES), state
        _, _, tokens_BN, state = lax.while_loop(goes_on, go_on, carry)
        return state, gather_shards(tokens_BN, 0, BATCH_AXES, invariant=True)

    def _next(self, weights: Tree, state: State) -> tuple[Array, State]:
        """Run the last token of every row through the layers, [B, 1, D]."""
        before = state["step"] - 1
        slot, position_B1 = state["first_slot"] + before, (state["length"] + before)[:, None]
        tokens = {"tokens": state["token"][:, None], "positions": position_B1}
        context, x_B1D = self._embed(weights, tokens, ~state["stopped"][:, None], "extended")
        num_slots = next((cache.key_BHSK.shape[2] for cache in state["caches"] if isinstance(cache, Cache)), 1)
        context = dataclasses.replace(context, visible=AttentionMask.of_model(self._config, num_slots))
        position_BS = slot_positions(num_slots, state["length"], state["first_slot"])
        attends = [
            decode_step(cache, slot, position_B1, position_BS) if isinstance(cache, Cache) else cache
            for cache in state["caches"]
        ]
        x_B1D, caches = self._through_layers(weights, x_B1D, context, attends)
        return x_B1D, state | {"caches": caches}

    def _through_layers(
        self, weights: Tree, x_BTD: Array, context: Context, attends: list[Any]
    ) -> tuple[Array, list[Any]]:
        """The last layer's output, and every layer's cache or state."""
        caches, first = [], self._model.ends(weights["shared"]).first_blocks()
        layers = zip(self._layers, weights["layers"], strict=True)
        others = [self._model.layers[kind].block(of_layer) for (_, kind, _), of_layer in layers]
        numbered = [*enumerate(first, len(others)), *enumerate(others)]  # the layer indices used in training
        for (number, block), attend in zip(numbered, attends, strict=True):
            x_BTD, aux = block(x_BTD, context, number, attend)
            caches.append(aux["cache"])
        return x_BTD, caches

    def _embed(self, weights: Tree, batch: State, real_BT: Array, cache: CacheUse) -> tuple[Context, Array]:
        """The context of every layer for a batch, of which some tokens are `real`, and the first layer's input."""
        context = dataclasses.replace(self._model.context(batch, Dropout.off()), real_BT=real_BT, cache=cache)
        return context, self._model.ends(weights["shared"]).embedding(batch, context)

    def _choose(self, weights: Tree, x_B1D: Array, state: State) -> tuple[State, Array]:
        """The state with the next token of every row, and these tokens, `IGNORED` in rows that have stopped."""
        logits_B1V = self._model.ends(weights["shared"]).logits(x_B1D)
        logits_BV = gather_shards(logits_B1V[:, 0], 1, TENSOR, invariant=True)[:, : self._config.vocab_size]
        seen_BV = state.get("seen")
        token_B = choose(logits_BV, state["bits"], state["length"] + state["step"], self._sampling, seen_BV)
        stopped_B = state["stopped"]
        for end in self._ends:
            stopped_B |= token_B == end
        step = state["step"] + 1
        new = {"token": token_B, "step": step, "stopped": stopped_B | (step >= state["limit"])}
        if seen_BV is not None:
            new["seen"] = seen_BV.at[jnp.arange(len(token_B)), token_B].set(True)
        return state | new, jnp.where(stopped_B, IGNORED, token_B)


def _running(state: State) -> Array:
    """How many rows of the batch have not stopped."""
    return sum_over(jnp.sum(~state["stopped"], dtype=jnp.int32), BATCH_AXES)
