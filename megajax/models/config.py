"""Models, as configuration: what their layers compute, and what they predict."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from megajax.models.model_sizes import WITH_EXPERTS, ModelSizes
from megajax.models.registry import EARLIER_NAMES, FAMILIES
from megajax.options import AT_LEAST_ONE, AT_LEAST_ZERO, SHARE, above, between
from megajax.traits import COMPUTATION, ENDS, NOTHING, WEIGHTS, ReadWith, Small, Theirs, Through

_ROTARY = ReadWith("positions", ("rotary",))
_LLAMA3 = ReadWith("rope_scaling", ("llama3",), ignored=True)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSizes):
    """Architecture, the same on every mesh.

    Options that are left to others (0, or "auto") have their value as soon as there is such an object, so that
    `dataclasses.replace` keeps it.
    """

    expert_capacity: Annotated[
        float,
        "an expert takes at most this times the mean number of tokens of a sequence, others pass by the layer; 0: all "
        "(dropless). Evaluation and generation are dropless",
        between(0, 10_000),
        NOTHING,
        WITH_EXPERTS,
    ] = 0.0
    renormalize_shares: Annotated[
        bool,
        "the shares of a token's experts add up to 1, as of a softmax over the chosen ones alone",
        COMPUTATION,
        WITH_EXPERTS,
        Theirs(mixture="norm_topk_prob"),
    ] = True
    balance: Annotated[
        Literal["none", "loss", "bias"],
        "what evens out how many tokens the experts get: a loss, or a bias that is added where a token chooses",
        WEIGHTS,
        WITH_EXPERTS,
        Through("biases_routers", "whether routers have biases"),
    ] = "none"
    balance_coefficient: Annotated[
        float,
        "of the loss that balances experts",
        between(0, 1000),
        NOTHING,
        WITH_EXPERTS,
        Theirs(mixture="router_aux_loss_coef"),
    ] = 0.01
    balance_step: Annotated[
        float, "by which a step moves the biases that balance experts", between(0, 1), NOTHING, WITH_EXPERTS
    ] = 0.001
    router_z_loss: Annotated[
        float, "coefficient of a loss that keeps the router's logits small", between(0, 1000), NOTHING, WITH_EXPERTS
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
    attention: Annotated[
        Literal["auto", "blocks", "cudnn", "kernel"],
        "what computes attention on a GPU: XLA, in blocks of queries; cuDNN; or our own kernel for Hopper GPUs; auto: "
        "what training finds correct and fastest there when it starts (docs/gpu.md). On CPUs always blocks",
        NOTHING,
    ] = "auto"
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
    def num_blocks(self) -> int:
        """Layers that stages divide: all but the `dense_layers`."""
        return self.num_layers - self.dense_layers

    @property
    def biases_routers(self) -> bool:
        """Whether biases balance experts, which are weights."""
        return self.balance == "bias"

    @property
    def rotary(self) -> bool:
        """Whether positions turn queries and keys, and no weight depends on their number."""
        return self.positions == "rotary"
