"""What recomputation saves in a layer, by the names of its activations (`parallel/sites.py`)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from megajax.core.private import FUSED_FORWARD

# The experts that tokens choose. Always saved: recomputing could break ties between nearly equal logits differently.
CHOICE = "expert_choice"
SQUARES = "query_key_squares"  # sums over all devices of a tensor group
LATENTS = "attention_latents"  # from which queries, keys and values are computed again
# Activations that are expensive to compute (a matrix product, attention, an all-reduce). The MLP's second product is
# not among them, because the backward pass does not need its result.
EXPENSIVE = (
    *("query", "key", "value", "attention_gate", "attention_received", "attention_heads", "attention_statistics"),
    *("attention_output", "mlp_gate", "mlp_up", "expert_rows", "expert_gate", "expert_up", "shared_expert"),
    *(CHOICE, SQUARES, LATENTS),
)


def save_expensive(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """The policy of selective recomputation, for `jax.checkpoint`."""
    named = jax.checkpoint_policies.save_only_these_names(*EXPENSIVE)
    return primitive.name.startswith(FUSED_FORWARD) or named(primitive, *arguments, **parameters)


POLICIES: Mapping[str, Callable[..., bool]] = {
    "selective": save_expensive,
    "layer": jax.checkpoint_policies.save_only_these_names(CHOICE),
}
"""Policies for `jax.checkpoint` by values of `train.remat`."""
