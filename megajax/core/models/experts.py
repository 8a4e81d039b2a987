"""A mixture of experts in place of a layer's MLP (Shazeer et al., arXiv 1701.06538): a router chooses the experts of
every token. Experts are sharded over the mesh axis `expert`, as are rows of the batch, and each expert's width over
`tensor`, like a dense MLP's. Tokens reach experts on other devices of an `expert` group in one of two ways:

- by capacity: an expert takes a fixed number of tokens of every *sequence*, the first choices of all tokens before any
  second one; other tokens skip the expert, and padding takes no place. All shapes are static: two all-to-alls around
  dense products. Counting by microbatch or device would make the result depend on the mesh.
- dropless: the group's tokens are gathered, a device sorts those of its experts into blocks (`models/grouped.py`),
  and the sums are reduce-scattered.

A choice is an expert that a token is sent to. Letters: B batch, T tokens, D model, E experts, K choices of a token,
N all choices, or rows of an expert, R rows of all experts.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.core.axes import EXPERT
from megajax.core.backend import Backend
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.grouped import Blocks, GroupRule, group_biased, in_blocks, multiplied_by_group
from megajax.core.models.mlp import MLP, activated
from megajax.core.models.router import Router, Routing, attached, scores
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import (
    CONTEXT,
    TENSOR,
    axis_index,
    axis_size,
    exchange,
    gather_shards,
    scatter_sum,
    vary_as,
)
from megajax.core.parallel.layers import Initializer, ProductLayer, multiply, normal, param
from megajax.core.parallel.permutation import rearranged
from megajax.core.parallel.products import Factors, deferred
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named


class ExpertLinear(ProductLayer):
    """A product with a weight of its own for every expert, [E, in, out]."""

    stacked, contracted = 1, 1
    multiply_scaled = staticmethod(multiplied_by_group)

    def __init__(self, initial: Initializer, shape: tuple[int, ...], dims: tuple[str, ...], *, bias: bool):
        self.weight, self.by_rows = param(shape, dims, initial), dims[1] != "embed"
        self.contracted_axes, self.output_axes = ((TENSOR,), ()) if self.by_rows else ((), (TENSOR,))
        output = "expert_output" if self.by_rows else dims[2]
        self.bias = param((shape[0], shape[2]), ("experts", output), jnp.zeros) if bias else None

    def rule(self, contracted: int, *, together: bool = False) -> GroupRule:
        return GroupRule(self.weight.shape[0], together)

    def completed(self, y: Array, x: Array, *blocks: Blocks) -> Array:
        """The product `y` of `x` with the bias, and with what an adapter adds. By rows these are summed over `tensor`
        later, so one device adds the bias."""
        if self.bias is not None:
            bias_EO = vary_as(self.bias[...], y)
            if self.by_rows:
                bias_EO = jnp.where(axis_index(TENSOR) == 0, bias_EO, jnp.zeros((), bias_EO.dtype))
            y = group_biased(y, bias_EO, *blocks)
        return super().completed(y, x, *blocks)


@dataclass(frozen=True)
class Dispatch:
    """How tokens get to the rows that experts take, and the experts' outputs back to tokens."""

    row_BTK: Array  # the row of each choice, int32; R if it has none
    choice_R: Array  # the choice in each row, int32; N if there is none
    blocks: Blocks | None = None  # of rows [R, D]; without, rows are [E, N, D]

    @classmethod
    def of(cls, row_BTK: Array, rows: int, **others: Any) -> Self:
        """With the row of each choice among so many `rows`."""
        nobody_R = vary_as(jnp.full_like(row_BTK, row_BTK.size, shape=(rows,)), row_BTK)
        choice_N = jnp.arange(row_BTK.size, dtype=jnp.int32)
        return cls(row_BTK, nobody_R.at[row_BTK.reshape(-1)].set(choice_N, mode="drop"), **others)

    def send(self, x_BTD: Array) -> Array:
        """The rows that this device's experts take."""
        x_1ND, row_1N = x_BTD.reshape(1, -1, x_BTD.shape[-1]), self.row_BTK.reshape(1, -1)
        return rearranged(x_1ND, self.choice_R[None], row_1N, self.row_BTK.shape[-1]).squeeze(0)

    def combine(self, out: Array, share_BTK: Array) -> Array:
        """The sum of every token's rows, weighted by its shares."""
        out_1RD, row_1N = out.reshape(1, -1, out.shape[-1]), self.row_BTK.reshape(1, -1)
        chosen_BTKD = rearranged(out_1RD, row_1N, self.choice_R[None]).reshape(*self.row_BTK.shape, -1)
        return jnp.einsum("btk,btkd->btd", share_BTK.astype(chosen_BTKD.dtype), chosen_BTKD)


@dataclass(frozen=True)
class DispatchByCapacity(Dispatch):
    """Every device sends the rows of its tokens to the devices that have their experts."""

    experts: int = 1  # of a device
    shared: bool = False  # by a context group: each device has some rows of all of its tokens

    def send(self, x_BTD: Array) -> Array:
        rows_NED = super().send(x_BTD).reshape(-1, self.experts, x_BTD.shape[-1])
        if self.shared:
            rows_NED = scatter_sum(rows_NED, 0, CONTEXT)
        return exchange(rows_NED, 0, 0, EXPERT).swapaxes(0, 1)

    def combine(self, out: Array, share_BTK: Array) -> Array:
        back_NED = exchange(out.swapaxes(0, 1), 0, 0, EXPERT)
        if self.shared:
            back_NED = gather_shards(back_NED, 0, CONTEXT)
        return super().combine(back_NED, share_BTK)


class DroplessDispatch(Dispatch):
    """Every device has the tokens of its expert group, and takes the rows of its experts."""

    def send(self, x_BTD: Array) -> Array:
        return super().send(gather_shards(x_BTD, 0, EXPERT))

    def combine(self, out: Array, share_BTK: Array) -> Array:
        return scatter_sum(super().combine(out, gather_shards(share_BTK, 0, EXPERT)), 0, EXPERT)


class Mixture(nnx.Module):
    """The experts with their router, and with `shared_expert_size` a shared expert of this width for all tokens, whose
    output may have a gate: a number for each token, computed like the router's scores."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        experts, hidden, width = config.num_experts, config.hidden_size, config.expert_size
        bias = config.bias == "all"

        def by_columns(name: str) -> ExpertLinear:
            shape, dims = (experts, hidden, width), ("experts", "embed", "expert_mlp")
            return ExpertLinear(normal(key / "experts" / name, config.init_std), shape, dims, bias=bias)

        self.router = Router(config, key / "router", boundary)
        self.gate = by_columns("gate") if config.gated else None
        self.up = by_columns("up")
        residual, shape = normal(key / "experts" / "down", config.residual_init_std), (experts, width, hidden)
        self.down = ExpertLinear(residual, shape, ("experts", "expert_mlp", "embed"), bias=bias)
        width = config.shared_expert_size
        self.shared = MLP(config, key / "shared", boundary, backend, width) if width else None
        gate = normal(key / "shared_expert_gate", config.init_std)
        self.shared_expert_gate = param((hidden, 1), ("embed", "features"), gate) if config.shared_expert_gate else None
        self.config, self.boundary, self.backend = config, boundary, backend

    @property
    def products(self) -> dict[str, tuple]:
        """Its products with weights, by the names of their factors (`parallel/products.py`)."""
        first = (self.up,) if self.gate is None else (self.gate, self.up)
        shared = {} if self.shared is None else self.shared.products
        return {"experts_input": first, "experts_output": (self.down,)} | shared

    @jax.named_scope("experts")
    def __call__(self, x_BTD: Array, context: Context, layer: Array | int) -> tuple[Array, dict[str, Any]]:
        routing = self.router(x_BTD, context, layer)
        entered_BTD, share_BTK = self.boundary.enter(x_BTD), self.boundary.enter(routing.share_BTK)
        dispatch, dropped = (self._by_capacity if self.config.expert_capacity else self._dropless)(routing)
        out = self._experts(dispatch.send(entered_BTD), dispatch.blocks, context)
        y_BTD = dispatch.combine(out, share_BTK)
        y_BTD = named(self.boundary.leave(y_BTD), "experts_output", self.boundary.split)
        if self.shared is not None:
            y_BTD = y_BTD + self._gated(self.shared(x_BTD, context, layer)[0], x_BTD)
        if context.loss_weight is not None:
            y_BTD = attached(y_BTD, routing.loss_B, context.loss_weight)
        return y_BTD, routing.figures | {"experts_dropped": dropped}

    def _gated(self, shared_BTD: Array, x_BTD: Array) -> Array:
        """The shared expert's output with its gate."""
        if self.shared_expert_gate is None:
            return shared_BTD
        shared_BTD = checkpoint_name(shared_BTD, "shared_expert")
        logits_BT1 = scores(x_BTD, self.shared_expert_gate[...])
        logits_BT1 = named(logits_BT1, "shared_expert_gate", self.boundary.split)
        return shared_BTD * jax.nn.sigmoid(logits_BT1).astype(shared_BTD.dtype)

    def _experts(self, rows: Array, blocks: Blocks | None, context: Context) -> Array:
        """Run rows through this device's experts; the results must still be summed over `tensor`."""
        names = ("expert_up",) if self.gate is None else ("expert_gate", "expert_up")
        rows = checkpoint_name(rows, "expert_rows")
        inner = self._multiplied("experts_input", rows, blocks, context.factors)
        inner = [checkpoint_name(y, name) for y, name in zip(inner, names, strict=True)]
        y = activated(inner, self.config, self.backend, scaled=self.up.copies is not None)
        return self._multiplied("experts_output", y, blocks, context.factors)[0]

    def _multiplied(self, name: str, rows: Array, blocks: Blocks | None, factors: Factors) -> list[Array]:
        given = (rows,) if blocks is None else (rows, blocks)
        return deferred(name, given, multiply(self.products[name], *given, defers=factors is not None), factors)

    def _by_capacity(self, routing: Routing) -> tuple[Dispatch, Array]:
        """Where tokens go, and how many of this device's choices do not fit."""
        boundary, experts, own = self.boundary, self.config.num_experts, self.up.weight.shape[0]
        parts = axis_size(CONTEXT) if boundary.context != "none" else 1
        capacity = capacity_of(self.config, boundary.length_of(routing.chosen_BTK))
        places = -(-capacity // parts)  # of an expert's, which the devices of a context group divide
        place_BTK = _places(boundary.of_all_tokens(routing.chosen_BTK), experts)  # of the whole sequence
        dropped_BTK = (boundary.own_tokens(place_BTK) >= capacity) & (routing.chosen_BTK < experts)
        chosen_BTK = boundary.enter(routing.chosen_BTK)
        place_BTK = vary_as(boundary.context_tokens(place_BTK), chosen_BTK)

        # Rows are sorted by what collectives divide, the device of the context group and the expert group, then by
        # sequence, place and expert. So the rows that a device receives, [N, E, D] in memory, are operands of the
        # experts' products as they are: XLA gives each expert's product a stride between its rows. Sorted by expert
        # they would be transposed after every exchange.
        batch, sequence_B11 = chosen_BTK.shape[0], jnp.arange(chosen_BTK.shape[0], dtype=jnp.int32)[:, None, None]
        row_BTK = (place_BTK // places * axis_size(EXPERT) + chosen_BTK // own) * batch + sequence_B11
        row_BTK = (row_BTK * places + place_BTK % places) * own + chosen_BTK % own
        rows, fits_BTK = batch * parts * places * experts, (place_BTK < capacity) & (chosen_BTK < experts)
        row_BTK = jnp.where(fits_BTK, row_BTK, rows)
        dispatch = DispatchByCapacity.of(row_BTK, rows, experts=own, shared=parts > 1)
        return dispatch, jnp.sum(dropped_BTK, dtype=jnp.int32)

    def _dropless(self, routing: Routing) -> tuple[Dispatch, Array]:
        """Where tokens go; all choices fit."""
        chosen_BTK = gather_shards(self.boundary.enter(routing.chosen_BTK), 0, EXPERT)
        weight, own, block = self.up.weight, self.up.weight.shape[0], self.backend.expert_block
        local_BTK = chosen_BTK - axis_index(EXPERT) * own
        local_BTK = jnp.where((local_BTK >= 0) & (local_BTK < own), local_BTK, own)  # those of other devices come last
        at_once = self.backend.blocks_at_once(weight[0].size * weight.dtype.itemsize)
        blocks, row_N = in_blocks(local_BTK.reshape(-1), own, block, at_once, by_kernel=self.backend.expert_kernel)
        dispatch = DroplessDispatch.of(row_N.reshape(chosen_BTK.shape), blocks.group_MG.size * block, blocks=blocks)
        return dispatch, jnp.zeros((), jnp.int32)


def capacity_of(model: ModelConfig, length: int) -> int:
    """How many tokens of a sequence an expert takes, rounded robustly: the product's last bits do not matter."""
    mean = length * model.experts_per_token / model.num_experts
    return min(length, math.ceil(round(model.expert_capacity * mean, 6)))


def _places(chosen_BTK: Array, experts: int) -> Array:
    """The place of every choice among those of the same expert in its sequence, int32, at least 0: the first choices of
    all tokens come first. Those of no expert follow all others, so they take no place."""
    batch, tokens, count = chosen_BTK.shape
    choice_BN = chosen_BTK.swapaxes(1, 2).reshape(batch, count * tokens)
    order_BN = jnp.argsort(choice_BN, axis=1, stable=True)
    rank_BN = jnp.argsort(order_BN, axis=1).astype(jnp.int32)
    size_BE = jnp.sum(jax.nn.one_hot(choice_BN, experts, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    begin_BE = jnp.cumsum(size_BE, axis=1, dtype=jnp.int32) - size_BE
    place_BN = rank_BN - jnp.take_along_axis(begin_BE, choice_BN, axis=1, mode="clip")
    return place_BN.reshape(batch, count, tokens).swapaxes(1, 2)
