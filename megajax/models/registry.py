"""The families of models by name, `model.family`. No JAX here: a family is imported when it is asked for."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Entry:
    """What must be known of a family before it is imported.

    Attributes:
        module: has the family as `FAMILY` (`models/family.py`).
        samples: what it is trained on: "text", or "pairs" of segments.
        tokenizer: kind that is trained where none is given, "bpe" or "wordpiece".
        layer_orders: where a layer may have its LayerNorms, the first being the default: "pre", "post".
        heads: what it can predict, `model.head`.
    """

    module: str
    samples: Literal["text", "pairs"] = "text"
    tokenizer: Literal["bpe", "wordpiece"] = "bpe"
    layer_orders: tuple[str, ...] = ("pre",)
    heads: tuple[str, ...] = ("pretraining",)

    @property
    def continues_text(self) -> bool:
        """Whether it is a language model, which predicts the next token."""
        return self.samples == "text"


FAMILIES = {
    "gpt2": Entry("megajax.models.gpt2.family"),
    "bert": Entry(
        "megajax.models.bert.family",
        samples="pairs",
        tokenizer="wordpiece",
        layer_orders=("pre", "post"),
        heads=("pretraining", "classes", "span", "choice"),
    ),
}
