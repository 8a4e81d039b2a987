"""Configuration of LoRA: which products of a decoder's layers have adapters, and of which rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from megajax.core.models.config import ModelConfig
from megajax.core.models.registry import GATED
from megajax.core.options import AT_LEAST_ZERO
from megajax.core.traits import ADAPTERS, ShrinkRule

LORA_TARGETS: Mapping[str, tuple[str, ...]] = {  # words of `lora.targets` -> products of a layer
    "attention": ("query", "key", "value", "query_down", "key_value_down", "key_value", "output"),
    "mlp": ("gate", "up", "down"),
    "experts": ("expert_gate", "expert_up", "expert_down"),
    **{name: (name,) for name in ("query", "key", "value", "output", "gate", "up", "down")},
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: low-rank adapters, trained instead of a decoder's weights (Hu et al., arXiv 2106.09685)."""

    rank: Annotated[
        int,
        "rank of the LoRA adapters, which are trained instead of the weights; 0: train all weights",
        AT_LEAST_ZERO,
        ADAPTERS,
        ShrinkRule(most=3),
    ] = 0
    alpha: Annotated[float, "LoRA scale: adapters are multiplied by this / lora.rank", ADAPTERS] = 16.0
    targets: Annotated[
        tuple[str, ...],
        f"layers that get adapters, of {', '.join(LORA_TARGETS)} (gate: of {', '.join(GATED)})",
        ADAPTERS,
    ] = ("attention", "mlp")

    def products(self, model: ModelConfig) -> tuple[str, ...]:
        """The products of a layer that have adapters."""
        wanted = {name for word in self.targets for name in LORA_TARGETS[word]}
        attention = [name for name in LORA_TARGETS["attention"] if name in product_sizes(model)]
        there = [*attention, *LORA_TARGETS["experts" if model.num_experts else "mlp"]]
        none = () if model.gated else ("gate", "expert_gate")
        return tuple(name for name in there if name in wanted and name not in none)


def attention_sizes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Input and output size of each product of a layer's softmax attention, by name."""
    hidden, heads = model.hidden_size, model.num_heads
    queries, keys = heads * model.head_size, model.num_kv_heads * model.head_size
    output = {"output": (heads * model.value_head_size, hidden)}
    if not model.latent_size:
        gate = {} if model.attention_gate == "none" else {"attention_gate": (hidden, queries)}
        return {"query": (hidden, queries), "key": (hidden, keys), "value": (hidden, keys)} | gate | output
    of_query, latent, shared = model.query_latent_size, model.latent_size, model.rotary_size
    down = {"query_down": (hidden, of_query)} if of_query else {}
    down |= {"key_value_down": (hidden, latent + shared)}
    up = heads * (model.head_size - shared + model.value_head_size)
    return {"query": (of_query or hidden, queries)} | down | {"key_value": (latent, up)} | output


def linear_sizes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The same of linear attention."""
    hidden, size, latent = model.hidden_size, model.linear_key_size, model.linear_value_size
    heads, keys, values = model.linear_heads, model.linear_key_heads * size, model.linear_heads * latent
    sizes = {"query": (hidden, keys), "key": (hidden, keys), "value": (hidden, values), "write": (hidden, heads)}
    sizes |= {"decay": (hidden, heads), "attention_gate": (hidden, values), "output": (values, hidden)}
    if model.linear_decay == "channel":
        sizes |= {"decay_down": (hidden, latent), "gate_down": (hidden, latent)}
        sizes |= {"decay": (latent, heads * size), "attention_gate": (latent, values)}
    return sizes


def product_sizes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Input and output size of each product in a decoder layer, by name; the smaller of two kinds of layers."""
    hidden, inner = model.hidden_size, model.mlp_size
    columns = {"gate": inner, "up": inner, "expert_gate": model.expert_size, "expert_up": model.expert_size}
    kinds = [linear_sizes(model) if model.is_linear(kind) else attention_sizes(model) for kind in model.kinds]
    return (
        {name: min(sizes[name] for sizes in kinds if name in sizes) for name in {**kinds[0], **kinds[-1]}}
        | {name: (hidden, size) for name, size in columns.items()}
        | {"down": (inner, hidden), "expert_down": (model.expert_size, hidden)}
    )
