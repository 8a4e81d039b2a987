"""A mixture of experts in place of a layer's MLP (Shazeer et al., arXiv 1701.06538): a router chooses the experts of
every token. Experts are sharded over the mesh axis `expert`, as are rows of the batch, and each expert's width over
`tensor`, like a dense MLP's. Tokens reach experts on other devices of an `expert` group in one of two ways:

- by capacity: an expert takes a fixed number of tokens of every *sequence*, the first choices of all tokens before any
  second one; other tokens skip the expert, and padding takes no place. All shapes are static: two all-to-alls around
  dense products. Counting by microbatch or device would make the result depend on the mesh.
- dropless: the group's tokens are gathered, a device sorts those of its experts into blocks (`models/grouped.py`),
  and the sums are reduce-scattered.

Letters: B batch, T tokens, D model, F feed-forward, E experts, K experts of a token, C places of an expert in a
sequence, S places of all of its experts.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from megajax.core.axes import EXPERT
from megajax.core.backend import Backend
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.grouped import (
    Blocks,
    GroupProducts,
    group_biased,
    group_input_gradient,
    group_product,
    group_weight_gradient,
    in_blocks,
)
from megajax.core.models.mlp import MLP, activated
from megajax.core.models.router import Router, Routing, attached
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import (
    CONTEXT,
    TENSOR,
    axis_index,
    axis_size,
    exchange,
    gather_shards,
    scatter_sum,
    vary,
    varying_axes,
)
from megajax.core.parallel.float8 import Copies, Float8Weight, products
from megajax.core.parallel.layers import Initializer, normal, param
from megajax.core.parallel.permutation import rearranged
from megajax.core.parallel.products import Factors, Pair, deferred
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named


class ExpertLinear(nnx.Module):
    """A product with a weight of its own for every expert, [E, in, out]."""

    frozen: bool = False
    scale: float = 1.0  # of an adapter
    copies: Copies | None = None
    stacked, contracted = 1, 1  # dims of the weight that stand for experts, and that go into the product

    def __init__(self, initial: Initializer, shape: tuple[int, ...], dims: tuple[str, ...], *, bias: bool):
        self.weight, self.by_rows = param(shape, dims, initial), dims[1] != "embed"
        output = "expert_output" if self.by_rows else dims[2]
        self.bias = param((shape[0], shape[2]), ("experts", output), jnp.zeros) if bias else None

    def freeze(self, scale: float, *adapter: Array) -> None:
        """Freeze the weights W; with an adapter (A and B of every expert), compute with `W + scale · A B`."""
        self.frozen, self.scale = True, scale
        if adapter:
            self.a, self.b = map(nnx.Param, adapter)

    def use_float8(self, copies: Copies) -> None:
        """Use float8 products with these copies of the weights."""
        self.copies = nnx.data(copies)

    def biased(self, y: Array, blocks: Blocks | None) -> Array:
        """The product `y` with the bias. By rows `y` is summed over `tensor` later, so one device adds it."""
        if self.bias is None:
            return y
        bias_EO = vary(self.bias[...], sorted(varying_axes(y)))
        if self.by_rows:
            bias_EO = jnp.where(axis_index(TENSOR) == 0, bias_EO, jnp.zeros((), bias_EO.dtype))
        return group_biased(y, bias_EO, blocks)

    @property
    def in_float8(self) -> GroupProducts | None:
        """Its products in 8 bits, where it multiplies so."""
        inner, outer = ((TENSOR,), ()) if self.by_rows else ((), (TENSOR,))
        return None if self.copies is None else GroupProducts(inner, outer, not self.frozen)

    @staticmethod
    def weight_gradients(factors: Pair, linears: "Sequence[ExpertLinear]") -> list[Array]:
        """The weights' gradients from the factors of `expert_products`."""
        given, grads = factors
        rows, blocks = given if isinstance(given, tuple) else (given, None)
        groups = linears[0].weight.shape[0]
        return [group_weight_gradient(rows, grad, groups, blocks) for grad in grads]


def expert_products(
    rows: Array, linears: Sequence[ExpertLinear], blocks: Blocks | None, name: str, factors: Factors
) -> list[Array]:
    """The outputs of several products of the same rows: [E, N, in], each expert's own, or, in blocks, [R, in]
    (`models/grouped.py`). With `factors`, the backward pass stores the factors of the weight gradients there under
    `name`: the rows with the blocks, and the outputs' gradients."""
    axes, in_float8 = sorted(varying_axes(rows)), linears[0].in_float8
    weights = [Float8Weight(vary(linear.weight[...], axes), vary(linear.copies, axes)) for linear in linears]
    beside = () if blocks is None else (blocks,)

    def multiply(rows: Array, weights: list[Float8Weight], *blocks: Blocks) -> list[Array]:
        if in_float8:
            return in_float8.forward(rows, weights, *blocks)
        return [group_product(rows, weight.array, *blocks) for weight in weights]

    def of_input(_: Array, grads: list[Array], weights: list[Float8Weight], *blocks: Blocks) -> Array:
        if in_float8:
            return in_float8.input_gradient(grads, weights, *blocks)
        return group_input_gradient(grads, [weight.array for weight in weights], *blocks)

    if factors is not None:
        outputs = deferred(name, multiply, rows, weights, factors, *beside, input_gradient=of_input)
    else:
        outputs = products(in_float8, rows, weights, *beside) if in_float8 else multiply(rows, weights, *beside)
    for place, linear in enumerate(linears):
        outputs[place] = linear.biased(outputs[place], blocks)
        if hasattr(linear, "a"):
            a, b = (vary(adapter[...], axes) for adapter in (linear.a, linear.b))
            inner = group_product(rows, a, *beside) * jnp.asarray(linear.scale, rows.dtype)
            outputs[place] += group_product(inner, b, *beside)
    return outputs


class Mixture(nnx.Module):
    """The experts with their router, and with `shared_expert_size` a shared expert of this width for all tokens."""

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
        chosen_BTK = self.boundary.enter(routing.chosen_BTK)
        if self.config.expert_capacity:
            y_BTD, dropped_BTK = self._by_capacity(entered_BTD, chosen_BTK, share_BTK, routing, context)
            dropped = jnp.sum(dropped_BTK, dtype=jnp.int32)
        else:
            y_BTD = self._dropless(entered_BTD, chosen_BTK, share_BTK, context)
            dropped = jnp.zeros((), jnp.int32)
        y_BTD = named(self.boundary.leave(y_BTD), "experts_output", self.boundary.split)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD, context, layer)[0]
        if context.loss_weight is not None:
            y_BTD = attached(y_BTD, routing.loss_B, context.loss_weight)
        return y_BTD, routing.figures | {"experts_dropped": dropped}

    def _experts(self, rows: Array, blocks: Blocks | None, context: Context) -> Array:
        """Run rows through this device's experts; the results must still be summed over `tensor`."""
        names = ("expert_up",) if self.gate is None else ("expert_gate", "expert_up")
        rows = checkpoint_name(rows, "expert_rows")
        inner = expert_products(rows, self.products["experts_input"], blocks, "experts_input", context.factors)
        inner = [checkpoint_name(y, name) for y, name in zip(inner, names, strict=True)]
        y = activated(inner, self.config, self.backend)
        return expert_products(y, [self.down], blocks, "experts_output", context.factors)[0]

    def _by_capacity(
        self, x_BTD: Array, chosen_BTK: Array, share_BTK: Array, routing: Routing, context: Context
    ) -> tuple[Array, Array]:
        """The weighted sum of the experts' outputs, and which of this device's choices do not fit, [B, T, K]."""
        config, boundary = self.config, self.boundary
        experts, parts = config.num_experts, axis_size(CONTEXT) if boundary.context != "none" else 1
        length = boundary.length_of(routing.chosen_BTK)
        capacity = capacity_of(config, length)
        places = -(-capacity // parts) * parts  # which the devices of a context group divide
        place_BTK = _places(boundary.of_all_tokens(routing.chosen_BTK), experts)  # of the whole sequence
        own_BTK = vary(boundary.context_tokens(place_BTK), sorted(varying_axes(x_BTD)))
        count = chosen_BTK.shape[-1]
        slot_N = self._slots(chosen_BTK, own_BTK, capacity, places // parts, parts).reshape(-1)
        rows = chosen_BTK.shape[0] * experts * places
        nobody_R = jnp.full_like(slot_N, slot_N.size, shape=(rows,))
        nobody_R = vary(nobody_R, sorted(varying_axes(slot_N)))
        choice_N = jnp.arange(slot_N.size, dtype=jnp.int32)
        source_R = nobody_R.at[slot_N].set(choice_N, mode="drop", unique_indices=False)

        sent_RD = rearranged(x_BTD.reshape(1, -1, x_BTD.shape[-1]), source_R[None], slot_N[None], count).squeeze(0)
        sent_NED = sent_RD.reshape(-1, self.up.weight.shape[0], sent_RD.shape[-1])
        if parts > 1:
            sent_NED = scatter_sum(sent_NED, 0, CONTEXT)
        rows_NED = exchange(sent_NED, 0, 0, EXPERT)
        out_NED = self._experts(rows_NED.swapaxes(0, 1), None, context).swapaxes(0, 1)
        back_NED = exchange(out_NED, 0, 0, EXPERT)
        if parts > 1:
            back_NED = gather_shards(back_NED, 0, CONTEXT)
        found = rearranged(back_NED.reshape(1, rows, -1), slot_N[None], source_R[None]).reshape(*chosen_BTK.shape, -1)
        dropped_BTK = (boundary.own_tokens(place_BTK) >= capacity) & (routing.chosen_BTK < experts)
        return _weighed(share_BTK, found), dropped_BTK

    def _slots(self, chosen_BTK: Array, place_BTK: Array, capacity: int, places: int, parts: int) -> Array:
        """The row of every choice among those that are sent; beyond the last one if it does not fit. Rows are sorted by
        what collectives divide, the device of the context group and the expert group, then by sequence, place and
        expert. So the rows that a device receives, [N, E, D] in memory, are operands of the experts' products as they
        are: XLA gives each expert's product a stride between its rows. Sorted by expert they would be transposed after
        every exchange."""
        own = self.up.weight.shape[0]
        part_BTK, inside_BTK = place_BTK // places, place_BTK % places
        device_BTK, expert_BTK = chosen_BTK // own, chosen_BTK % own
        batch, sequence_B11 = chosen_BTK.shape[0], jnp.arange(chosen_BTK.shape[0], dtype=jnp.int32)[:, None, None]
        slot_BTK = (part_BTK * axis_size(EXPERT) + device_BTK) * batch + sequence_B11
        slot_BTK = (slot_BTK * places + inside_BTK) * own + expert_BTK
        fits_BTK = (place_BTK < capacity) & (chosen_BTK < self.config.num_experts)
        return jnp.where(fits_BTK, slot_BTK, batch * parts * places * self.config.num_experts)

    def _dropless(self, x_BTD: Array, chosen_BTK: Array, share_BTK: Array, context: Context) -> Array:
        """The weighted sum of the experts' outputs."""
        x_BTD, chosen_BTK, share_BTK = (gather_shards(x, 0, EXPERT) for x in (x_BTD, chosen_BTK, share_BTK))
        own, number, count = self.up.weight.shape[0], chosen_BTK.size, chosen_BTK.shape[-1]
        local_N = chosen_BTK.reshape(number) - axis_index(EXPERT) * own
        local_N = jnp.where((local_N >= 0) & (local_N < own), local_N, own)  # those of other devices come last
        block, weight = self.backend.expert_block, self.up.weight
        at_once = self.backend.blocks_at_once(weight[0].size * weight.dtype.itemsize)
        blocks, place_N = in_blocks(local_N, own, block, at_once, by_kernel=self.backend.expert_kernel)
        nobody_R = jnp.full_like(place_N, number, shape=(blocks.group_MG.size * block,))
        nobody_R = vary(nobody_R, sorted(varying_axes(place_N)))
        source_R = nobody_R.at[place_N].set(jnp.arange(number, dtype=jnp.int32), mode="drop")
        rows_RD = rearranged(x_BTD.reshape(1, -1, x_BTD.shape[-1]), source_R[None], place_N[None], count).squeeze(0)
        out_RD = self._experts(rows_RD, blocks, context)
        found = rearranged(out_RD[None], place_N[None], source_R[None]).reshape(*chosen_BTK.shape, -1)
        return scatter_sum(_weighed(share_BTK, found), 0, EXPERT)


def capacity_of(model: ModelConfig, length: int) -> int:
    """How many tokens of a sequence an expert takes, rounded robustly: the product's last bits do not matter."""
    mean = length * model.experts_per_token / model.num_experts
    return min(length, math.ceil(round(model.expert_capacity * mean, 6)))


def _weighed(share_BTK: Array, found_BTKD: Array) -> Array:
    return jnp.einsum("btk,btkd->btd", share_BTK.astype(found_BTKD.dtype), found_BTKD)


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
