"""The router of a mixture of experts: which experts each token chooses, with which weights, and load balancing.

Letters: B batch, T tokens, D model, E experts, K experts per token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.remat import CHOICE
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import vary_as
from megajax.core.parallel.layers import normal, param
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named
from megajax.core.precision import at_least_fp32
from megajax.core.trees import Tree

LOAD = "expert_load"  # how many tokens of the step chose each expert of each layer, int32 [L, E]
COUNTS = LOAD, "experts_dropped"  # the figures that are whole numbers

_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}  # over the last dim


class Routing(NamedTuple):
    """How a device's tokens are routed."""

    chosen_BTK: Array  # experts, int32, most probable first; the number of experts, so none of them, for padding
    share_BTK: Array  # each expert's weight in the token's output, at least fp32; 0 for padding
    loss_B: Array  # this device's part of the sequences' balancing losses, multiplied by their coefficients
    figures: dict[str, Array]  # see `FamilyModel`


class Router(nnx.Module):
    """Scores `softmax(X R + b)` or `sigmoid(X R + b)`, in at least fp32 and maybe without b, and the K largest, with
    groups those in the best groups; in a tie the lower index wins. Padding chooses no expert, and counts in no loss and
    no figure."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary):
        experts = config.num_experts
        self.weight = param((config.hidden_size, experts), ("embed", "features"), normal(key, config.init_std))
        self.logit_bias = param((experts,), ("features",), jnp.zeros) if config.bias == "all" else None
        self.bias = param((experts,), ("features",), jnp.zeros) if config.biases_routers else None
        self.boundary, self.config = boundary, config

    @jax.named_scope("router")
    def __call__(self, x_BTD: Array, context: Context, layer: Array | int) -> Routing:
        config, dtype = self.config, at_least_fp32(x_BTD.dtype)
        assert context.real_BT is not None, "a context of a model without experts"
        real_BT1 = self.boundary.own_tokens(context.real_BT)[..., None]
        real_B = jnp.maximum(jnp.sum(context.real_BT, axis=1), 1).astype(dtype)  # tokens of the whole sequence
        logits_BTE = scores(x_BTD, self.weight[...])
        if self.logit_bias is not None:
            logits_BTE = logits_BTE + self.logit_bias[...].astype(dtype)[None, None]
        logits_BTE = named(logits_BTE, "router_logits", self.boundary.split)
        share_BTE = _SCORES[config.router_scores](logits_BTE)
        chosen_BTK = jnp.where(real_BT1, self._chosen(lax.stop_gradient(share_BTE)), config.num_experts)
        chosen_BTK = checkpoint_name(chosen_BTK, CHOICE)
        share_BTK = jnp.take_along_axis(share_BTE, chosen_BTK, axis=-1, mode="fill", fill_value=0)
        if config.router_scores == "sigmoid":  # for the loss and figures
            share_BTE = share_BTE / jnp.sum(share_BTE, axis=-1, keepdims=True)
        share_BTE = jnp.where(real_BT1, share_BTE, jnp.zeros((), dtype))
        if config.renormalize_shares:
            total_BT1 = jnp.sum(share_BTK, axis=-1, keepdims=True)
            share_BTK = share_BTK / jnp.where(real_BT1, total_BT1, jnp.ones((), dtype))
        if config.share_scale != 1:
            share_BTK = share_BTK * jnp.asarray(config.share_scale, dtype)
        is_chosen_BTKE = jax.nn.one_hot(chosen_BTK, config.num_experts, dtype=jnp.int32)
        count_BE = jnp.sum(is_chosen_BTKE, axis=(1, 2), dtype=jnp.int32)
        balance_B = self._imbalance(share_BTE, count_BE, real_B)
        z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
        z_B = jnp.sum(jnp.where(real_BT1[..., 0], z_BT, jnp.zeros((), dtype)), axis=1) / real_B
        loss_B = jnp.asarray(config.balance_coefficient * (config.balance in ("loss", "both")), dtype) * balance_B
        loss_B = loss_B + jnp.asarray(config.router_z_loss, dtype) * z_B
        load_LE = jnp.zeros((config.num_blocks + config.num_predicting, config.num_experts), jnp.int32)
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
        if self.config.chosen_groups < self.config.expert_groups:
            share_BTE = self._in_best_groups(share_BTE)
        return lax.top_k(share_BTE, self.config.experts_per_token)[1].astype(jnp.int32)

    def _in_best_groups(self, share_BTE: Array) -> Array:
        """The scores of the experts in each token's best groups, and -inf for others (Liu et al., arXiv 2405.04434,
        section 2.2.2; with sigmoid arXiv 2412.19437)."""
        config, experts = self.config, share_BTE.shape[-1]
        share_BTGE = share_BTE.reshape(*share_BTE.shape[:2], config.expert_groups, -1)
        group_BTG = jnp.sum(lax.top_k(share_BTGE, 2 if config.router_scores == "sigmoid" else 1)[0], axis=-1)
        best_BTC = lax.top_k(group_BTG, config.chosen_groups)[1].astype(jnp.int32)
        group_111G = jnp.arange(config.expert_groups, dtype=jnp.int32)[None, None, None]
        chosen_BTG = jnp.any(best_BTC[..., None] == group_111G, axis=2)
        chosen_BTE = jnp.repeat(chosen_BTG, experts // config.expert_groups, axis=-1)
        return jnp.where(chosen_BTE, share_BTE, jnp.asarray(-jnp.inf, share_BTE.dtype))

    def _imbalance(self, share_BTE: Array, count_BE: Array, real_B: Array) -> Array:
        """This device's part of every sequence's `E Σ_e f_e p_e`, where f_e is the share of the sequence's choices that
        expert e has, and p_e its mean probability (Fedus et al., arXiv 2101.03961; per sequence: DeepSeek-AI, arXiv
        2412.19437). It is 1 if both are even."""
        often_BE = self.boundary.sum_over_tokens(count_BE).astype(share_BTE.dtype)
        scale = jnp.asarray(self.config.num_experts / self.config.experts_per_token, share_BTE.dtype)
        return scale * jnp.sum(often_BE * jnp.sum(share_BTE, axis=1), axis=-1) / jnp.square(real_B)


def scores(x_BTD: Array, weight_DE: Array) -> Array:
    """Their product in at least fp32, before any function of it."""
    dtype = at_least_fp32(x_BTD.dtype)
    return jnp.einsum("btd,de->bte", x_BTD.astype(dtype), weight_DE.astype(dtype), precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def attached(y_BTD: Array, loss_B: Array, weight: Array) -> Array:
    """Return `y`, whose backward pass also starts that of `loss` with the cotangent `weight`. So a layer can have its
    own loss without a second output that would pass through all layers and the pipeline."""
    return y_BTD


def _attach(y_BTD: Array, loss_B: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return y_BTD, (loss_B, weight)


def _detach(residuals: tuple[Array, Array], grad_BTD: Array) -> tuple[Array, Array, Array]:
    loss_B, weight = residuals
    grad_B = vary_as(jnp.broadcast_to(weight.astype(loss_B.dtype), loss_B.shape), loss_B)
    return grad_BTD, grad_B, jnp.zeros_like(weight)


attached.defvjp(_attach, _detach)


def expert_metrics(figures: dict[str, Array], config: ModelConfig, sequences: Array) -> dict[str, Array]:
    """Metrics of a step's experts, from the layers' figures summed over `sequences` sequences (not only padding):
    the largest load of an expert divided by the mean of its layer, the share of choices that were dropped, the router's
    mean entropy in nats, the mean balancing loss (1: even), and `LOAD`."""
    load_LE = figures[LOAD]
    load = load_LE.astype(jnp.float32)
    choices, entropy = jnp.maximum(jnp.sum(load), 1.0), figures["router_entropy"]
    means = jnp.mean(load, axis=1, keepdims=True)
    found = {
        "largest_load": jnp.max(load / jnp.maximum(means, 1.0)),
        "dropped": figures["experts_dropped"].astype(jnp.float32) / choices,
        "router_entropy": entropy * config.experts_per_token / choices.astype(entropy.dtype),
        "balance_loss": figures["balance_loss"] / (sequences * load_LE.shape[0]).astype(entropy.dtype),
    }
    return {f"experts/{name}": value for name, value in found.items()} | {LOAD: load_LE}


def balances_router(path: Sequence[str]) -> bool:
    """Whether the weight at a path is a router's balancing bias."""
    return tuple(path[-2:]) == ("router", "bias")


def is_wide(path: Sequence[str]) -> bool:
    """Whether layers compute with the weight at a path as it is stored: with the router's balancing bias, whose steps
    are smaller than half precision resolves, and with linear attention's decays, which add up over all tokens."""
    return balances_router(path) or path[-1] in ("decay_rate", "decay_bias")


def in_compute_dtype(weights: Tree, dtype: DTypeLike) -> Tree:
    """Weights as layers compute with them: in `dtype`, except those that `is_wide` names."""

    def cast(path: Any, weight: Array) -> Array:
        return weight if is_wide([key.key for key in path]) else weight.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)


def bias_step(load: Array, step: float, dtype: DTypeLike) -> Array:
    """What a step adds to router biases, given the experts' load over the global batch, [..., E]: experts chosen less
    often than average become easier to choose (DeepSeek-AI, arXiv 2412.19437). Loads are integers, so the result is
    the same on any mesh."""
    total, experts = jnp.sum(load, axis=-1, keepdims=True, dtype=load.dtype), load.shape[-1]
    # `total - experts * load` would overflow int32 with a batch of 16 million tokens.
    below, above = load < -(-total // experts), load > total // experts
    return jnp.asarray(step, dtype) * (below.astype(dtype) - above.astype(dtype))
