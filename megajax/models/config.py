"""Models, as configuration."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from megajax.models.registry import DECODER, EARLIER_NAMES, FAMILIES
from megajax.options import AT_LEAST_ONE, AT_LEAST_ZERO, SHARE, OneOf, above, between
from megajax.traits import ADAPTERS, COMPUTATION, ENDS, NOTHING, WEIGHTS, ReadWith, Size, Small, Theirs, Through

_SIZE = between(0, 1_000_000)
_ROTARY = ReadWith("positions", ("rotary",))
_EXPERTS = between(0, 10_000)
_WITH_EXPERTS = ReadWith("num_experts")
_LLAMA3 = ReadWith("rope_scaling", ("llama3",), ignored=True)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture, the same on every mesh.

    Options that are left to others (0, or "auto") have their value as soon as there is such an object, so that
    `dataclasses.replace` keeps it.
    """

    family: Annotated[str, "kind of model", OneOf(ChainMap(FAMILIES, EARLIER_NAMES)), WEIGHTS] = DECODER
    num_layers: Annotated[
        int,
        "transformer layers",
        between(1, 10_000),
        WEIGHTS,
        Size("layers"),
        Theirs("num_hidden_layers", gpt2="n_layer"),
    ]
    hidden_size: Annotated[
        int,
        "width of the residual stream",
        between(1, 1_000_000),
        WEIGHTS,
        Size("embed"),
        Theirs("hidden_size", gpt2="n_embd"),
    ]
    num_heads: Annotated[
        int,
        "attention heads",
        between(1, 100_000),
        WEIGHTS,
        Size("heads", split=True),
        Theirs("num_attention_heads", gpt2="n_head"),
    ]
    num_kv_heads: Annotated[
        int,
        "heads of keys and values, each for as many heads of queries; 0: as many as these",
        between(0, 100_000),
        WEIGHTS,
        Size("kv_heads", split=True, repeated=True),
        Theirs(llama="num_key_value_heads"),
    ] = 0
    head_size: Annotated[
        int,
        "width of an attention head; 0: model.hidden-size / model.num-heads",
        _SIZE,
        WEIGHTS,
        Size("head_size"),
        Theirs(llama="head_dim"),
    ] = 0
    mlp_size: Annotated[
        int,
        "width of the MLP's inner layer; 0: 4 x model.hidden-size",
        between(0, 10_000_000),
        WEIGHTS,
        Size("mlp", split=True),
        Theirs("intermediate_size", gpt2="n_inner"),
    ] = 0
    sequence_length: Annotated[
        int,
        "tokens per sequence, and number of learned positions",
        between(1, 1_000_000),
        ENDS,
        Size("position"),
        Theirs("max_position_embeddings", gpt2="n_positions"),
    ]
    vocab_size: Annotated[
        int,
        "tokens in the vocabulary, before padding",
        between(1, 100_000_000),
        WEIGHTS,
        Small(jointly=True),
        Theirs("vocab_size"),
    ]
    vocab_multiple: Annotated[
        int,
        "the vocabulary is padded to a multiple of this, on every mesh",
        between(1, 1_000_000),
        WEIGHTS,
        Size("vocabulary", split=True),
        Through("padded_vocab_size", "the padded vocabulary"),
    ] = 1024
    num_experts: Annotated[
        int,
        "experts in the place of each layer's MLP, of which every token passes some; 0: an MLP",
        _EXPERTS,
        WEIGHTS,
        Size("experts"),
    ] = 0
    experts_per_token: Annotated[
        int, "experts that a token passes", _EXPERTS, WEIGHTS, _WITH_EXPERTS, Small(jointly=True)
    ] = 0
    expert_size: Annotated[
        int,
        "width of an expert's inner layer; 0: model.mlp-size",
        _SIZE,
        WEIGHTS,
        _WITH_EXPERTS,
        Size("expert_mlp", split=True),
    ] = 0
    shared_expert_size: Annotated[
        int,
        "width of an MLP beside the experts, which every token passes; 0: none",
        _SIZE,
        WEIGHTS,
        _WITH_EXPERTS,
        Size("mlp", split=True),
    ] = 0
    expert_capacity: Annotated[
        float,
        "an expert takes at most this times the mean number of tokens of a sequence, others pass by the layer; 0: all "
        "(dropless). Evaluation and generation are dropless",
        between(0, 10_000),
        NOTHING,
        _WITH_EXPERTS,
    ] = 0.0
    renormalize_shares: Annotated[
        bool,
        "the shares of a token's experts add up to 1, as of a softmax over the chosen ones alone",
        COMPUTATION,
        _WITH_EXPERTS,
        Theirs(mixture="norm_topk_prob"),
    ] = True
    balance: Annotated[
        Literal["none", "loss", "bias"],
        "what evens out how many tokens the experts get: a loss, or a bias that is added where a token chooses",
        WEIGHTS,
        _WITH_EXPERTS,
        Through("biases_routers", "whether routers have biases"),
    ] = "none"
    balance_coefficient: Annotated[
        float,
        "of the loss that balances experts",
        between(0, 1000),
        NOTHING,
        _WITH_EXPERTS,
        Theirs(mixture="router_aux_loss_coef"),
    ] = 0.01
    balance_step: Annotated[
        float, "by which a step moves the biases that balance experts", between(0, 1), NOTHING, _WITH_EXPERTS
    ] = 0.001
    router_z_loss: Annotated[
        float, "coefficient of a loss that keeps the router's logits small", between(0, 1000), NOTHING, _WITH_EXPERTS
    ] = 0.0
    norm: Annotated[Literal["layernorm", "rmsnorm"], "normalization of the layers' inputs", WEIGHTS] = "layernorm"
    norm_epsilon: Annotated[
        float,
        "is added to the variance; 0: 1e-5, of BERT 1e-12",
        between(0, 1),
        WEIGHTS,
        Theirs("rms_norm_eps", gpt2="layer_norm_epsilon", bert=""),
    ] = 0
    positions: Annotated[
        Literal["learned", "rotary"],
        "an embedding for each, or queries and keys turned by angles that grow with them",
        WEIGHTS,
    ] = "learned"
    rope_theta: Annotated[float, "base of the rotary angles", between(1, 1e12), COMPUTATION, _ROTARY] = 10_000.0
    rope_scaling: Annotated[
        Literal["none", "linear", "llama3"],
        "slower rotary angles, for sequences longer than those trained on",
        COMPUTATION,
        _ROTARY,
    ] = "none"
    rope_factor: Annotated[
        float,
        "how much slower rotary angles grow that are scaled",
        between(1, 1e6),
        COMPUTATION,
        ReadWith("rope_scaling", ("linear", "llama3")),
    ] = 1.0
    rope_low_frequency: Annotated[
        float,
        "llama3 scales angles that turn less often than this in model.rope-original-length tokens",
        above(0, 1e6),
        COMPUTATION,
        _LLAMA3,
    ] = 1.0
    rope_high_frequency: Annotated[
        float,
        "llama3 does not scale angles that turn more often, and those in between in part",
        above(0, 1e6),
        COMPUTATION,
        _LLAMA3,
    ] = 4.0
    rope_original_length: Annotated[
        int, "tokens per sequence that llama3 scales from", AT_LEAST_ONE, COMPUTATION, _LLAMA3, Small(tokens=True)
    ] = 8192
    activation: Annotated[
        Literal["auto", "gelu", "gelu-tanh", "swiglu"],
        "of the MLP; swiglu has a gate, a third matrix; auto: gelu-tanh, of BERT gelu",
        WEIGHTS,
    ] = "auto"
    bias: Annotated[
        Literal["none", "all", "query-key-value"], "which matrix products have one; all: LayerNorms, too", WEIGHTS
    ] = "all"
    query_key_norm: Annotated[bool, "an RMSNorm on queries and keys", WEIGHTS] = False
    query_key_norm_over: Annotated[
        Literal["head", "width"],
        "what an RMSNorm on queries and keys is over: every head alone, with a scale that all share, or all together",
        WEIGHTS,
        ReadWith("query_key_norm"),
    ] = "head"
    tied_embedding: Annotated[
        bool, "the output product is with the embedding table", WEIGHTS, Theirs("tie_word_embeddings", bert="")
    ] = True
    sliding_window: Annotated[
        int,
        "a token sees this many tokens, itself included; 0: all before it",
        AT_LEAST_ZERO,
        COMPUTATION,
        Small(tokens=True),
    ] = 0
    dropout: Annotated[
        float, "probability to drop: embedding, attention probabilities, both residual branches", SHARE, NOTHING
    ] = 0.1
    context_attention: Annotated[
        Literal["auto", "heads", "gather"],
        "how the devices of mesh.context attend to each other's tokens: each to all of them with some of the heads, or "
        "with the keys and values of all gathered; auto: heads where cuDNN can "
        "compute them, otherwise what sends less (docs/context.md)",
        NOTHING,
    ] = "auto"
    init_std: Annotated[
        float, "standard deviation of the initial weights", above(0, 100), NOTHING, Theirs("initializer_range")
    ] = 0.02
    layer_order: Annotated[
        Literal["pre", "post"],
        "LayerNorm before attention and MLP, inside the residual branch, or after the residual addition",
        WEIGHTS,
    ] = "pre"
    head: Annotated[
        Literal["pretraining", "classes", "span", "choice"],
        "what is predicted: pretraining's own; of a text the class, or a span in it; the right one of several texts",
        ENDS,
    ] = "pretraining"
    num_classes: Annotated[
        int,
        "classes of the head classes, texts to choose from of the head choice",
        between(2, 10_000),
        ENDS,
        Small(most=5),
    ] = 2
    scan_layers: Annotated[
        Literal["auto", "true", "false"],
        "run the layers as one scan (compiles fast) or unrolled; auto: what is faster",
        NOTHING,
    ] = "auto"

    def __post_init__(self) -> None:
        family, heads = EARLIER_NAMES.get(self.family, self.family), self.num_heads
        fixed = FAMILIES[family].fixed if family in FAMILIES else {}
        divisible = heads > 0 and self.hidden_size % heads == 0
        left_to_others = {
            "family": family,
            "num_kv_heads": self.num_kv_heads or heads,
            "head_size": self.head_size or (self.hidden_size // heads if divisible else 0),
            "mlp_size": self.mlp_size or 4 * self.hidden_size,
            "expert_size": self.expert_size or (self.mlp_size or 4 * self.hidden_size) * (self.num_experts > 0),
            "norm_epsilon": self.norm_epsilon or fixed.get("norm_epsilon", 1e-5),
            "activation": fixed.get("activation", "gelu-tanh") if self.activation == "auto" else self.activation,
        }
        for name, value in left_to_others.items():
            object.__setattr__(self, name, value)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of the weights right before each residual addition: scaled by 1/sqrt(2 · layers)."""
        return self.init_std / (2 * self.num_layers) ** 0.5

    def window_in(self, length: int) -> int | None:
        """How many tokens a token of a sequence sees; None: all before it, as in a window that is as long."""
        return self.sliding_window if 0 < self.sliding_window < length else None

    @property
    def forward_only(self) -> "ModelConfig":
        """For evaluation and generation, in which no token passes by the experts that it chose."""
        return replace(self, expert_capacity=0.0)

    @property
    def biases_routers(self) -> bool:
        """Whether biases balance experts, which are weights."""
        return self.balance == "bias"

    @property
    def rotary(self) -> bool:
        """Whether positions turn queries and keys, and no weight depends on their number."""
        return self.positions == "rotary"


LORA_TARGETS: Mapping[str, tuple[str, ...]] = {  # words of `lora.targets` -> products of a layer
    "attention": ("query", "key", "value", "output"),
    "mlp": ("gate", "up", "down"),
    **{name: (name,) for name in ("query", "key", "value", "output", "gate", "up", "down")},
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of low rank that are trained in place of a decoder's weights (Hu et al., arXiv 2106.09685)."""

    rank: Annotated[
        int,
        "LoRA: rank of the adapters that are trained in place of the weights; 0: all weights",
        AT_LEAST_ZERO,
        ADAPTERS,
        Small(most=3),
    ] = 0
    alpha: Annotated[float, "the product of an adapter's two matrices is added times this / lora.rank", ADAPTERS] = 16.0
    targets: Annotated[
        tuple[str, ...], f"products that have adapters, of {', '.join(LORA_TARGETS)} (gate: of swiglu)", ADAPTERS
    ] = ("attention", "mlp")

    def products(self, model: ModelConfig) -> tuple[str, ...]:
        """The products of a layer that have adapters."""
        wanted = {name for word in self.targets for name in LORA_TARGETS[word]}
        there = [*LORA_TARGETS["attention"], *(() if model.num_experts else LORA_TARGETS["mlp"])]
        return tuple(name for name in there if name in wanted and (name != "gate" or model.activation == "swiglu"))


def product_sizes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """What goes into each product of a decoder's layer and what comes out, by name."""
    hidden, inner = model.hidden_size, model.mlp_size
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    columns = {"query": queries, "key": keys, "value": keys, "gate": inner, "up": inner}
    return {name: (hidden, size) for name, size in columns.items()} | {
        "output": (queries, hidden),
        "down": (inner, hidden),
    }
