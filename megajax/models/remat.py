"""What recomputation keeps of a layer, by the names of its activations (`parallel/sites.py`)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from megajax.private import FUSED_FORWARD

# Which experts tokens go to: always kept, since logits that are equal but for rounding could be told apart otherwise.
CHOICE = "expert_choice"
SQUARES = "query_key_squares"  # sums over all devices of a tensor group
# Names of what is expensive to compute again (a matrix product, attention, an all-reduce). The MLP's second product is
# not among them, since nothing in the backward pass needs its result.
EXPENSIVE = (
    *("query", "key", "value", "attention_received", "attention_heads", "attention_statistics", "attention_output"),
    *("mlp_gate", "mlp_up", "expert_rows", "expert_gate", "expert_up", CHOICE, SQUARES),
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
