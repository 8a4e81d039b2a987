"""Models, as configuration."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.models.registry import FAMILIES
from megajax.options import SHARE, OneOf, above, between


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture, the same on every mesh."""

    family: Annotated[str, "kind of model", OneOf(FAMILIES)] = "gpt2"
    num_layers: Annotated[int, "transformer layers", between(1, 10_000)]
    hidden_size: Annotated[int, "width of the residual stream", between(1, 1_000_000)]
    num_heads: Annotated[int, "attention heads; must divide the hidden size", between(1, 100_000)]
    sequence_length: Annotated[int, "tokens per sequence, and number of learned positions", between(1, 1_000_000)]
    vocab_size: Annotated[int, "tokens in the vocabulary, before padding", between(1, 100_000_000)]
    vocab_multiple: Annotated[
        int, "the vocabulary is padded to a multiple of this, on every mesh", between(1, 1_000_000)
    ] = 1024
    dropout: Annotated[
        float, "probability to drop: embedding, attention probabilities, both residual branches", SHARE
    ] = 0.1
    init_std: Annotated[float, "standard deviation of the initial weights", above(0, 100)] = 0.02
    layer_order: Annotated[
        Literal["pre", "post"],
        "LayerNorm before attention and MLP, inside the residual branch, or after the residual addition",
    ] = "pre"
    head: Annotated[
        Literal["pretraining", "classes", "span", "choice"],
        "what is predicted: pretraining's own; of a text the class, or a span in it; the right one of several texts",
    ] = "pretraining"
    num_classes: Annotated[
        int, "classes of the head classes, texts to choose from of the head choice", between(2, 10_000)
    ] = 2
    scan_layers: Annotated[
        Literal["auto", "true", "false"], "run the layers as one scan (compiles fast) or unrolled; auto: what is faster"
    ] = "auto"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width of the MLP's inner layer."""
        return 4 * self.hidden_size

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of the weights right before each residual addition: scaled by 1/sqrt(2 · layers)."""
        return self.init_std / (2 * self.num_layers) ** 0.5
