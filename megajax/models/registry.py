"""The families of models by name, `model.family`. No JAX here: a family is imported when it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Entry:
    """What must be known of a family before it is imported.

    Attributes:
        module: has the family as `FAMILY` (`models/family.py`).
        samples: what it is trained on: "text", or "pairs" of segments.
        tokenizer: kind that is trained where none is given, "bpe" or "wordpiece".
        layer_orders: where a layer may have its LayerNorms, the first being the default: "pre", "post".
        heads: what it can predict, `model.head`.
        fixed: options of the model, fields of `ModelConfig`, that have one valid value, by name.
    """

    module: str
    samples: Literal["text", "pairs"] = "text"
    tokenizer: Literal["bpe", "wordpiece"] = "bpe"
    layer_orders: tuple[str, ...] = ("pre",)
    heads: tuple[str, ...] = ("pretraining",)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def continues_text(self) -> bool:
        """Whether it is a language model, which predicts the next token."""
        return self.samples == "text"


DECODER = "decoder"
FAMILIES = {
    DECODER: Entry("megajax.models.decoder.family"),
    "bert": Entry(
        "megajax.models.bert.family",
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
            "tied_embedding": True,
            "sliding_window": 0,
        },
    ),
}
EARLIER_NAMES = {"gpt2": DECODER}
"""Names that families had in older configurations, and may still be called by."""
