"""Model families, activations and norms by name. No JAX here: a family's module is imported when it is needed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class FamilyEntry:
    """What must be known about a family before it is imported."""

    module: str  # defines the family as `FAMILY` (`models/family.py`)
    samples: Literal["text", "pairs"] = "text"  # trained on text, or on pairs of segments
    tokenizer: Literal["bpe", "wordpiece"] = "bpe"  # kind to train if no tokenizer is given
    layer_orders: tuple[str, ...] = ("pre",)  # where a layer may have its norms; the first is the default
    heads: tuple[str, ...] = ("pretraining",)  # valid values of `model.head`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # options of `ModelConfig` with only one valid value
    only: Mapping[str, Any] = field(default_factory=dict)  # other options with only one valid value, by key
    generates: bool = True  # whether its layers can keep a cache of what they have seen
    own: Any = None  # what a user registered (`own_family.Family`), given to the module's `family`

    @property
    def continues_text(self) -> bool:
        """Whether it is a language model: tokens see only those before them, and predict the next one."""
        return self.samples == "text"


DECODER = "decoder"
FAMILIES = {
    DECODER: FamilyEntry(
        "megajax.core.models.decoder.model", layer_orders=("pre", "sandwich", "reordered", "pre-reordered")
    ),
    "bert": FamilyEntry(
        "megajax.core.models.bert.model",
        samples="pairs",
        tokenizer="wordpiece",
        layer_orders=("pre", "post"),
        heads=("pretraining", "classes", "span", "choice"),
        fixed={
            "norm": "layernorm",
            "norm_epsilon": 1e-12,
            "positions": "learned",
            "activation": "gelu",
            "bias": "all",
            "query_key_norm": False,
            "attention_sinks": False,
            "latent_size": 0,
            "linear_heads": 0,
            "tied_embedding": True,
            "scaled_embedding": False,
            "query_scalar": 0,
            "sliding_window": 0,
            "num_experts": 0,
            "prediction_modules": 0,
        },
    ),
}
EARLIER_NAMES = {"gpt2": DECODER}
"""Former names of families; older configurations still use them."""

GATED = ["swiglu", "geglu-tanh", "swiglu-clamped"]
"""Activations of MLPs with a gate matrix."""
ACTIVATIONS: dict[str, Any] = dict.fromkeys(("auto", "gelu", "gelu-tanh", *GATED))
"""By `activation`: the functions (`mlp.py` has ours)."""
SCORES: dict[str, Any] = {"plain": None}
"""By `scores`: functions of attention's scores, of queries' and keys' positions, and of heads."""
ATTENTION_GATES: dict[str, Any] = dict.fromkeys(("none", "sigmoid"))
"""By `attention_gate`: functions of what attention's heads return, and of their gates (`attention.py` has ours)."""
NORMS: dict[str, Any] = dict.fromkeys(("layernorm", "rmsnorm", "rmsnorm-1p"))
"""By `norm`: functions of the configuration that make one (`norms.py` has ours)."""
