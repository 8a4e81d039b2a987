"""The router of a mixture of experts: which experts every token chooses, with which shares, and how they are balanced.

Letters: B batch, T tokens, D model, E experts, K experts of a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from megajax.models.config import ModelConfig
from megajax.models.context import Context
from megajax.models.remat import CHOICE
from megajax.parallel.boundary import RegionBoundary
from megajax.parallel.collectives import vary, varying_axes
from megajax.parallel.layers import normal, param
from megajax.parallel.random import NamedKey
from megajax.parallel.sites import named
from megajax.precision import at_least_fp32

ROUTER_BIAS = ("blocks", "mlp", "router", "bias")  # its path in the weights
LOAD = "expert_load"  # of every layer and expert, how many tokens of the step chose it, int32 [L, E]


class Routing(NamedTuple):
    """Where the tokens of a device go."""

    chosen_BTK: Array  # experts, int32, the most probable first
    share_BTK: Array  # of each in the token's output, at least fp32
    loss_B: Array  # this device's part of the balancing losses of its sequences, with their coefficients
    figures: dict[str, Array]  # of its tokens; see `Model`


class Router(nnx.Module):
    """`softmax(X R)`, in at least fp32, and the K largest: of equal ones those of the lower index."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary):
        experts = config.num_experts
        self.weight = param((config.hidden_size, experts), ("embed", "features"), normal(key, config.init_std))
        self.bias = param((experts,), ("features",), jnp.zeros) if config.balance == "bias" else None
        self.boundary, self.config = boundary, config

    @jax.named_scope("router")
    def __call__(self, x_BTD: Array, context: Context, layer: Array | int) -> Routing:
        config, dtype = self.config, at_least_fp32(x_BTD.dtype)
        weight_DE = self.weight[...].astype(dtype)
        logits_BTE = jnp.einsum("btd,de->bte", x_BTD.astype(dtype), weight_DE, precision=lax.Precision.HIGHEST)
        logits_BTE = named(logits_BTE, "router_logits", self.boundary.split)
        share_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        chosen_BTK = checkpoint_name(self._chosen(lax.stop_gradient(share_BTE)), CHOICE)
        share_BTK = jnp.take_along_axis(share_BTE, chosen_BTK, axis=-1)
        if config.renormalize_shares:
            share_BTK = share_BTK / jnp.sum(share_BTK, axis=-1, keepdims=True)
        count_BE = jnp.sum(
            jax.nn.one_hot(chosen_BTK, config.num_experts, dtype=jnp.int32), axis=(1, 2), dtype=jnp.int32
        )
        balance_B = self._imbalance(share_BTE, count_BE)
        z_B = jnp.mean(jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)), axis=1)
        z_B = z_B * jnp.asarray(x_BTD.shape[1] / self.boundary.length_of(x_BTD), dtype)
        loss_B = jnp.asarray(config.balance_coefficient * (config.balance == "loss"), dtype) * balance_B
        loss_B = loss_B + jnp.asarray(config.router_z_loss, dtype) * z_B
        load_LE = jnp.zeros((config.num_blocks, config.num_experts), jnp.int32)
        entropy = -jnp.sum(share_BTE * jnp.log(jnp.maximum(share_BTE, jnp.finfo(dtype).tiny)))
        figures = {
            LOAD: load_LE.at[layer].set(jnp.sum(count_BE, axis=0, dtype=jnp.int32)),
            "router_entropy": entropy,
            "balance_loss": jnp.sum(balance_B),
        }
        return Routing(chosen_BTK, share_BTK, loss_B, jax.tree.map(lax.stop_gradient, figures))

    def _chosen(self, share_BTE: Array) -> Array:
        if self.bias is not None:
            share_BTE = share_BTE + lax.stop_gradient(self.bias[...].astype(share_BTE.dtype))[None, None]
        return lax.top_k(share_BTE, self.config.experts_per_token)[1].astype(jnp.int32)

    def _imbalance(self, share_BTE: Array, count_BE: Array) -> Array:
        """This device's part of every sequence's `E Σ_e f_e p_e`: the share of choices that expert e has, of all tokens
        of the sequence, times its mean probability (Fedus et al., arXiv 2101.03961; of a sequence: DeepSeek-AI, arXiv
        2412.19437). It is 1 where both are even."""
        length, config = self.boundary.length_of(share_BTE), self.config
        often_BE = self.boundary.sum_over_tokens(count_BE).astype(share_BTE.dtype)
        scale = config.num_experts / (config.experts_per_token * length * length)
        return jnp.sum(often_BE * jnp.sum(share_BTE, axis=1), axis=-1) * jnp.asarray(scale, share_BTE.dtype)


@jax.custom_vjp
def attached(y_BTD: Array, loss_B: Array, weight: Array) -> Array:
    """`y`; its gradient is also that of `weight` times the sum of `loss`: so a layer has a loss of its own, without a
    second output that would pass through all layers and the pipeline."""
    return y_BTD


def _attach(y_BTD: Array, loss_B: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return y_BTD, (loss_B, weight)


def _detach(kept: tuple[Array, Array], grad_BTD: Array) -> tuple[Array, Array, Array]:
    loss_B, weight = kept
    grad_B = vary(jnp.broadcast_to(weight.astype(loss_B.dtype), loss_B.shape), sorted(varying_axes(loss_B)))
    return grad_BTD, grad_B, jnp.zeros_like(weight)


attached.defvjp(_attach, _detach)


def expert_metrics(figures: dict[str, Array], config: ModelConfig, sequences: int) -> dict[str, Array]:
    """What a step over so many sequences says of its experts, from the sums of their layers' figures: the largest load
    of an expert over the mean of its layer, the share of choices that did not fit, of the router the mean entropy in
    nats, the mean balancing loss (1: even), and `LOAD`."""
    load_LE = figures[LOAD]
    load = load_LE.astype(jnp.float32)
    choices, entropy = jnp.sum(load), figures["router_entropy"]
    means = jnp.mean(load, axis=1, keepdims=True)
    found = {
        "largest_load": jnp.max(load / jnp.maximum(means, 1.0)),
        "dropped": figures["experts_dropped"].astype(jnp.float32) / choices,
        "router_entropy": entropy * config.experts_per_token / choices.astype(entropy.dtype),
        "balance_loss": figures["balance_loss"] / (sequences * config.num_blocks),
    }
    return {f"experts/{name}": value for name, value in found.items()} | {LOAD: load_LE}


def bias_step(load: Array, step: float, dtype: DTypeLike) -> Array:
    """What a step adds to the biases of routers whose experts had this load, [..., E], over the global batch: those
    that were chosen less often than the mean will be chosen more easily (DeepSeek-AI, arXiv 2412.19437). Loads are
    whole numbers, so that it is the same on any mesh."""
    total, experts = jnp.sum(load, axis=-1, keepdims=True, dtype=load.dtype), load.shape[-1]
    # Not `total - experts * load`, which a batch of 16 million tokens takes out of 32 bits.
    below, above = load < -(-total // experts), load > total // experts
    return jnp.asarray(step, dtype) * (below.astype(dtype) - above.astype(dtype))
