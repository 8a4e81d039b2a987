"""Configuration of models: the sizes of their weights, what their layers compute, and what they predict."""

import re
from collections import ChainMap
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Annotated, Literal

from megajax.core.models.registry import (
    ACTIVATIONS,
    ATTENTION_GATES,
    DECODER,
    EARLIER_NAMES,
    FAMILIES,
    GATED,
    NORMS,
    SCORES,
)
from megajax.core.models.turns import are_turns, in_each_layer
from megajax.core.options import AT_LEAST_ONE, AT_LEAST_ZERO, SHARE, OneOf, Range, above, between
from megajax.core.traits import (
    COMPUTATION,
    ENDS,
    NOTHING,
    WEIGHTS,
    HuggingFaceName,
    OnlyWith,
    ShrinkRule,
    Size,
    Through,
)

_WITH_EXPERTS = OnlyWith("num_experts")
_SIZE = between(0, 1_000_000)
_EXPERTS = between(0, 10_000)
_ROTARY = OnlyWith("positions", ("rotary",))
_LATENT = OnlyWith("latent_size")
LINEAR, SOFTMAX = KINDS = "linear", "softmax"
"""Kinds of layers, in the order in which a period has them; as in the paths of weights."""
_LINEAR = OnlyWith("linear_heads")
_LLAMA3 = OnlyWith("rope_scaling", ("llama3",), ignored=True)
_YARN = OnlyWith("rope_scaling", ("yarn",), ignored=True)
_CLAMPED = OnlyWith("activation", ("swiglu-clamped",), ignored=True)


def _is_pair(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,6},[0-9]{1,6}", text) is not None


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes of a model, the layers that all families have, and what it predicts."""

    family: Annotated[
        str,
        "kind of model; plugins may add others (docs/own-model.md)",
        OneOf(ChainMap(FAMILIES, EARLIER_NAMES)),
        WEIGHTS,
    ] = DECODER
    num_layers: Annotated[
        int,
        "transformer layers",
        between(1, 10_000),
        WEIGHTS,
        Size("layers"),
        HuggingFaceName("num_hidden_layers", gpt2="n_layer"),
    ]
    hidden_size: Annotated[
        int,
        "width of the residual stream",
        between(1, 1_000_000),
        WEIGHTS,
        Size("embed"),
        HuggingFaceName("hidden_size", gpt2="n_embd"),
    ]
    num_heads: Annotated[
        int,
        "attention heads",
        between(1, 100_000),
        WEIGHTS,
        Size("heads", split=True),
        HuggingFaceName("num_attention_heads", gpt2="n_head"),
    ]
    num_kv_heads: Annotated[
        int,
        "key and value heads (grouped-query attention); 0: as many as query heads",
        between(0, 100_000),
        WEIGHTS,
        Size("kv_heads", split=True, repeated=True),
        HuggingFaceName(llama="num_key_value_heads"),
    ] = 0
    head_size: Annotated[
        int,
        "size of an attention head; 0: model.hidden-size / model.num-heads",
        _SIZE,
        WEIGHTS,
        Size("head_size"),
        HuggingFaceName(llama="head_dim"),
    ] = 0
    mlp_size: Annotated[
        int,
        "width of the MLP; 0: 4 x model.hidden-size",
        between(0, 10_000_000),
        WEIGHTS,
        Size("mlp", split=True),
        HuggingFaceName("intermediate_size", gpt2="n_inner"),
    ] = 0
    sequence_length: Annotated[
        int,
        "tokens per sequence; also the number of learned positions",
        between(1, 10_000_000),
        ENDS,
        Size("position"),
        HuggingFaceName("max_position_embeddings", gpt2="n_positions"),
    ]
    vocab_size: Annotated[
        int,
        "tokens in the vocabulary, before padding",
        between(1, 100_000_000),
        WEIGHTS,
        ShrinkRule(jointly=True),
        HuggingFaceName("vocab_size"),
    ]
    vocab_multiple: Annotated[
        int,
        "pad the vocabulary to a multiple of this, on every mesh",
        between(1, 1_000_000),
        WEIGHTS,
        Size("vocabulary", split=True),
        Through("padded_vocab_size", "the padded vocabulary"),
    ] = 1024
    prediction_modules: Annotated[
        int,
        "modules that predict further tokens after the next one, each with a layer of its own (multi-token prediction, "
        "as in DeepSeek-V3); evaluation and generation leave them out",
        between(0, 100),
        WEIGHTS,
        ShrinkRule(most=2),
    ] = 0
    prediction_coefficient: Annotated[
        float,
        "coefficient of the mean of these modules' losses; 0: they are neither computed nor trained",
        between(0, 1000),
        NOTHING,
        OnlyWith("prediction_modules", ignored=True),
    ] = 0.3
    norm: Annotated[
        str, "normalization layer; rmsnorm-1p: RMSNorm whose scale is 1 plus a weight", OneOf(NORMS), WEIGHTS
    ] = "layernorm"
    norm_epsilon: Annotated[
        float,
        "added to the variance in norms; 0: 1e-5, or 1e-12 for BERT",
        between(0, 1),
        WEIGHTS,
        HuggingFaceName("rms_norm_eps", gpt2="layer_norm_epsilon", bert=""),
    ] = 0
    positions: Annotated[
        Literal["learned", "rotary", "none"],
        "learned position embeddings, rotary embeddings of queries and keys, or neither",
        WEIGHTS,
    ] = "learned"
    activation: Annotated[
        str,
        f"activation function of the MLP; {', '.join(GATED)} add a gate matrix; auto: gelu-tanh, or gelu for BERT",
        OneOf(ACTIVATIONS),
        WEIGHTS,
    ] = "auto"
    swiglu_alpha: Annotated[
        float, "swiglu-clamped: factor of the gate in its sigmoid", above(0, 1000), COMPUTATION, _CLAMPED
    ] = 1.702
    swiglu_limit: Annotated[
        float,
        "swiglu-clamped: the gate is at most this, and what it multiplies is between minus this and this",
        above(0, 1e6),
        COMPUTATION,
        _CLAMPED,
    ] = 7.0
    bias: Annotated[
        Literal["none", "all", "query-key-value"],
        "which linear layers have biases; all: experts, routers and LayerNorms as well",
        WEIGHTS,
    ] = "all"
    query_key_norm: Annotated[bool, "apply RMSNorm to queries and keys", WEIGHTS] = False
    query_key_norm_over: Annotated[
        Literal["head", "width"],
        "normalize queries and keys over each head, with one shared scale, or over all heads together",
        WEIGHTS,
        OnlyWith("query_key_norm"),
    ] = "head"
    attention_sinks: Annotated[
        bool, "each head has a learned logit that takes part in the softmax of its scores but has no value", WEIGHTS
    ] = False
    tied_embedding: Annotated[
        bool, "share the embedding table with the output head", WEIGHTS, HuggingFaceName("tie_word_embeddings", bert="")
    ] = True
    scaled_embedding: Annotated[bool, "multiply the embedding by the square root of model.hidden-size", COMPUTATION] = (
        False
    )
    query_scalar: Annotated[
        int,
        "attention scores are divided by the square root of this; 0: of model.head-size",
        _SIZE,
        COMPUTATION,
        ShrinkRule(most=12),
    ] = 0
    dropout: Annotated[
        float, "dropout probability for embeddings, attention probabilities and both residual branches", SHARE, NOTHING
    ] = 0.1
    scores: Annotated[
        str,
        "what becomes of attention's scores before the softmax, by names that --plugins registered (docs/own.md)",
        OneOf(SCORES),
        COMPUTATION,
    ] = "plain"
    attention_gate: Annotated[
        str,
        "what multiplies attention's heads before the output projection, from a product of the layer's input: sigmoid, "
        "its sigmoid; or a name that --plugins registered (docs/own.md)",
        OneOf(ATTENTION_GATES),
        WEIGHTS,
    ] = "none"
    attention: Annotated[
        Literal["auto", "blocks", "cudnn", "kernel"],
        "what computes attention on a GPU: XLA, in blocks of queries; cuDNN; or our own kernel for Hopper GPUs; auto: "
        "cuDNN where it can, else our kernel, else blocks (docs/gpu.md). On CPUs always blocks",
        NOTHING,
    ] = "auto"
    context_attention: Annotated[
        Literal["auto", "heads", "gather"],
        "how context-parallel attention communicates: heads exchanges heads for tokens "
        "(all-to-all), gather all-gathers keys and values; auto: heads where cuDNN can compute "
        "attention, otherwise whichever sends less (docs/context.md)",
        NOTHING,
    ] = "auto"
    bf16_layers: Annotated[
        str,
        "with --precision fp8: how many of the first and of the last layers compute as in bf16, FIRST,LAST",
        Range(_is_pair, "two numbers of layers, such as 1,2"),
        NOTHING,
        ShrinkRule(jointly=True),
    ] = "0,0"
    init_std: Annotated[
        float, "standard deviation of the initial weights", above(0, 100), NOTHING, HuggingFaceName("initializer_range")
    ] = 0.02
    layer_order: Annotated[
        Literal["pre", "post", "sandwich", "reordered", "pre-reordered"],
        "norms before attention and MLP (pre), after the residual addition (post), both before attention and MLP and "
        "after them (sandwich), only after them, before the addition (reordered), or so except in layers of linear "
        "attention, which have them before (pre-reordered)",
        WEIGHTS,
    ] = "pre"
    head: Annotated[
        Literal["pretraining", "classes", "span", "choice"],
        "output head: the pretraining objective, a class of the text, a span in it, or a choice between several texts",
        ENDS,
    ] = "pretraining"
    num_classes: Annotated[
        int,
        "number of classes, or of texts to choose from with head choice",
        between(2, 10_000),
        ENDS,
        ShrinkRule(most=5),
    ] = 2
    scan_layers: Annotated[
        Literal["auto", "true", "false"],
        "run the layers as a scan (compiles faster) or unrolled; auto: whichever runs faster",
        NOTHING,
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the MLP, as Mixtral, DeepSeek-V3 and GPT-OSS have it."""

    num_experts: Annotated[
        int,
        "experts per layer (mixture of experts instead of an MLP); 0: a plain MLP",
        _EXPERTS,
        WEIGHTS,
        Size("experts"),
    ] = 0
    experts_per_token: Annotated[
        int, "experts that each token is routed to", _EXPERTS, WEIGHTS, _WITH_EXPERTS, ShrinkRule(jointly=True)
    ] = 0
    expert_size: Annotated[
        int, "width of each expert; 0: model.mlp-size", _SIZE, WEIGHTS, _WITH_EXPERTS, Size("expert_mlp", split=True)
    ] = 0
    shared_expert_size: Annotated[
        int,
        "width of a shared expert that every token passes; 0: none",
        _SIZE,
        WEIGHTS,
        _WITH_EXPERTS,
        Size("mlp", split=True),
    ] = 0
    shared_expert_gate: Annotated[
        bool,
        "multiply the shared expert's output by a gate for each token: the sigmoid of a product of the layer's input",
        WEIGHTS,
        OnlyWith("shared_expert_size"),
    ] = False
    dense_layers: Annotated[
        int,
        "number of first layers with a dense MLP instead of experts; the first pipeline stage "
        "computes them with the embedding",
        between(0, 10_000),
        WEIGHTS,
        _WITH_EXPERTS,
        ShrinkRule(most=2),
    ] = 0
    expert_capacity: Annotated[
        float,
        "capacity factor: an expert takes at most this many times the mean number of tokens of each sequence, and the "
        "rest skip the layer; 0: no limit (dropless). Evaluation and generation are always dropless",
        between(0, 10_000),
        NOTHING,
        _WITH_EXPERTS,
    ] = 0.0
    renormalize_shares: Annotated[
        bool,
        "normalize the weights of each token's chosen experts to sum to 1",
        COMPUTATION,
        _WITH_EXPERTS,
        HuggingFaceName(mixture="norm_topk_prob"),
    ] = True
    router_scores: Annotated[
        Literal["softmax", "sigmoid"],
        "scores of experts: probabilities that sum to 1 over all experts, or each by itself",
        COMPUTATION,
        _WITH_EXPERTS,
    ] = "softmax"
    expert_groups: Annotated[
        int,
        "number of equal groups of experts; each token chooses its experts in the model.chosen-groups best ones, by "
        "the best score of a group's experts, or with sigmoid by the sum of its two best",
        COMPUTATION,
        _WITH_EXPERTS,
        ShrinkRule(jointly=True),
    ] = 1
    chosen_groups: Annotated[
        int, "groups in which a token chooses its experts", COMPUTATION, _WITH_EXPERTS, ShrinkRule(jointly=True)
    ] = 1
    share_scale: Annotated[
        float, "factor of the weights of each token's chosen experts", between(0, 1000), COMPUTATION, _WITH_EXPERTS
    ] = 1.0
    balance: Annotated[
        Literal["none", "loss", "bias", "both"],
        "how to balance the load of the experts: an auxiliary loss, a bias added to the "
        "router's scores when choosing experts, or both",
        WEIGHTS,
        _WITH_EXPERTS,
        Through("biases_routers", "whether routers have biases"),
    ] = "none"
    balance_coefficient: Annotated[
        float,
        "coefficient of the load-balancing loss",
        between(0, 1000),
        NOTHING,
        _WITH_EXPERTS,
        HuggingFaceName(mixture="router_aux_loss_coef"),
    ] = 0.01
    balance_step: Annotated[
        float, "amount by which each step moves the load-balancing biases", between(0, 1), NOTHING, _WITH_EXPERTS
    ] = 0.001
    router_z_loss: Annotated[
        float, "coefficient of a loss that keeps the router's logits small", between(0, 1000), NOTHING, _WITH_EXPERTS
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Keys and values of all heads computed from one latent, as in DeepSeek-V3."""

    latent_size: Annotated[
        int,
        "size of the latent from which the keys and values of all heads are computed (latent attention, as in "
        "DeepSeek-V3); 0: none",
        _SIZE,
        WEIGHTS,
        Size("latent"),
    ] = 0
    query_latent_size: Annotated[
        int,
        "size of the latent from which queries are computed; 0: queries are computed from the layer's input",
        _SIZE,
        WEIGHTS,
        Size("query_latent"),
        _LATENT,
    ] = 0
    rotary_size: Annotated[
        int,
        "features of model.head-size that positions rotate, the first ones; in latent attention the last ones, which "
        "all heads share in keys, also without positions; 0: all",
        _SIZE,
        WEIGHTS,
        ShrinkRule(jointly=True),
        OnlyWith("positions", ("rotary", "none")),
    ] = 0
    value_size: Annotated[
        int, "size of a head's values; 0: model.head-size", _SIZE, WEIGHTS, ShrinkRule(jointly=True), _LATENT
    ] = 0


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Angles by which rotary positions turn queries and keys."""

    rope_theta: Annotated[float, "base of the rotary angles", between(1, 1e12), COMPUTATION, _ROTARY] = 10_000.0
    rope_scaling: Annotated[
        Literal["none", "linear", "llama3", "yarn"],
        "scaling of the rotary angles, for sequences longer than the model was trained on",
        COMPUTATION,
        _ROTARY,
    ] = "none"
    rope_factor: Annotated[
        float,
        "factor by which scaled rotary angles grow more slowly",
        between(1, 1e6),
        COMPUTATION,
        OnlyWith("rope_scaling", ("linear", "llama3", "yarn")),
    ] = 1.0
    rope_low_frequency: Annotated[
        float,
        "llama3: fully scale angles with fewer rotations than this in model.rope-original-length tokens",
        above(0, 1e6),
        COMPUTATION,
        _LLAMA3,
    ] = 1.0
    rope_high_frequency: Annotated[
        float,
        "llama3: do not scale angles with more rotations than this; interpolate in between",
        above(0, 1e6),
        COMPUTATION,
        _LLAMA3,
    ] = 4.0
    rope_original_length: Annotated[
        int,
        "llama3 and yarn: sequence length before scaling",
        AT_LEAST_ONE,
        COMPUTATION,
        OnlyWith("rope_scaling", ("llama3", "yarn"), ignored=True),
        ShrinkRule(tokens=True),
    ] = 8192
    rope_beta_slow: Annotated[
        float,
        "yarn: fully scale angles with fewer rotations than this in model.rope-original-length tokens",
        above(0, 1e6),
        COMPUTATION,
        _YARN,
    ] = 1.0
    rope_beta_fast: Annotated[
        float,
        "yarn: do not scale angles with more rotations than this; interpolate in between",
        above(0, 1e6),
        COMPUTATION,
        _YARN,
    ] = 32.0
    rope_truncate: Annotated[
        bool, "yarn: round the indices of the first and the last interpolated angle outwards", COMPUTATION, _YARN
    ] = True
    rope_attention_factor: Annotated[
        float,
        "yarn: queries and keys are multiplied by this; 0: 0.1 ln(model.rope-factor) + 1",
        between(0, 1000),
        COMPUTATION,
        _YARN,
    ] = 0.0
    rope_score_scale: Annotated[
        float,
        "yarn: attention's scores are multiplied by (0.1 x this x ln(model.rope-factor) + 1)^2, as by DeepSeek's "
        "mscale_all_dim",
        between(0, 1000),
        COMPUTATION,
        _YARN,
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """Layers whose tokens attend only to the last ones before them."""

    sliding_window: Annotated[
        int,
        "attention window in tokens, the token itself included; 0: all earlier tokens",
        AT_LEAST_ZERO,
        COMPUTATION,
        ShrinkRule(tokens=True),
    ] = 0
    window_layers: Annotated[
        str,
        "which layers have the window: all, or how many have it, how many do not, how many have it, …, repeated to the "
        "last layer; 5,1: every sixth layer has none",
        COMPUTATION,
        Range(are_turns, "all, or numbers of layers such as 5,1"),
        OnlyWith("sliding_window"),
        ShrinkRule(jointly=True),
    ] = "all"
    window_rope_theta: Annotated[
        float,
        "base of the rotary angles in layers with the window, which are then not scaled; 0: the angles of other layers",
        Range(lambda theta: theta == 0 or 1 <= theta <= 1e12, "0, or 1 to 1e+12"),
        COMPUTATION,
        OnlyWith("sliding_window"),
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Layers whose attention is linear in the sequence's length, by the gated delta rule, as in Qwen3-Next."""

    linear_heads: Annotated[
        int,
        "value heads of linear attention (the gated delta rule, as in Qwen3-Next and Kimi Linear); 0: none",
        between(0, 100_000),
        WEIGHTS,
        Size("linear_heads", split=True),
    ] = 0
    linear_layers: Annotated[
        str,
        "which layers have linear attention: all, or how many have it, how many do not, how many have it, …, repeated "
        "to the last layer; 3,1: all but every fourth",
        WEIGHTS,
        Range(are_turns, "all, or numbers of layers such as 3,1"),
        _LINEAR,
        ShrinkRule(jointly=True),
    ] = "all"
    linear_key_heads: Annotated[
        int,
        "heads of queries and keys, each for several heads of values; 0: model.linear-heads",
        between(0, 100_000),
        WEIGHTS,
        _LINEAR,
        Size("linear_key_heads", split=True, repeated=True),
    ] = 0
    linear_key_size: Annotated[
        int,
        "size of a query and of a key in linear attention; 0: model.head-size",
        _SIZE,
        WEIGHTS,
        _LINEAR,
        Size("linear_key_size"),
    ] = 0
    linear_value_size: Annotated[
        int,
        "size of a value in linear attention; 0: model.linear-key-size",
        _SIZE,
        WEIGHTS,
        _LINEAR,
        Size("linear_value_size"),
    ] = 0
    linear_decay: Annotated[
        Literal["head", "channel"],
        "what of a linear attention's state decays alike: a head (gated DeltaNet), or each channel of a key, whose "
        "decays, like the gates, come from a latent of model.linear-value-size then (Kimi Delta Attention)",
        WEIGHTS,
        _LINEAR,
    ] = "head"
    linear_gate: Annotated[
        Literal["silu", "sigmoid"],
        "function of the gates that multiply linear attention's normalized heads",
        COMPUTATION,
        _LINEAR,
    ] = "silu"
    linear_write: Annotated[
        float,
        "the most that linear attention corrects of a value in its state: 1, or 2 for eigenvalues down to -1",
        between(0, 2),
        COMPUTATION,
        _LINEAR,
    ] = 1.0
    linear_convolution: Annotated[
        int,
        "tokens that the convolutions of linear attention's queries, keys and values see, the token itself included",
        between(1, 100),
        WEIGHTS,
        _LINEAR,
        ShrinkRule(most=3),
    ] = 4
    linear_norm_epsilon: Annotated[
        float, "model.norm-epsilon of linear attention's heads; 0: the same", between(0, 1), COMPUTATION, _LINEAR
    ] = 0
    linear_chunk: Annotated[
        int,
        "tokens that linear attention processes by matrix products at a time; it computes every four chunks again in "
        "the backward pass",
        Range(lambda size: size in {1 << n for n in range(13)}, "a power of two, up to 4096"),
        NOTHING,
        _LINEAR,
        ShrinkRule(most=4),
    ] = 64


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LinearAttention, Window, Rope, LatentAttention, Experts, Transformer):
    """Model architecture, the same on every mesh. Its options are those of its groups, in one table of a preset.

    Options that default to the value of others (0, or "auto") are resolved when the object is made, so that
    `dataclasses.replace` keeps them.
    """

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
            "linear_key_heads": self.linear_key_heads or self.linear_heads,
            "norm_epsilon": self.norm_epsilon or fixed.get("norm_epsilon", 1e-5),
            "activation": fixed.get("activation", "gelu-tanh") if self.activation == "auto" else self.activation,
        }
        if self.linear_heads:
            key_size = self.linear_key_size or left_to_others["head_size"]
            left_to_others |= {"linear_key_size": key_size, "linear_value_size": self.linear_value_size or key_size}
            left_to_others["linear_norm_epsilon"] = self.linear_norm_epsilon or left_to_others["norm_epsilon"]
        for name, value in left_to_others.items():
            object.__setattr__(self, name, value)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def whole_heads(self, tensor: int) -> set[str]:
        """Dims of key heads that are too few for a tensor group of this size, so every device has all of them."""
        numbers = {"kv_heads": self.num_kv_heads, "linear_key_heads": self.linear_key_heads}
        return {dim for dim, number in numbers.items() if number % tensor}

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of the weights right before each residual addition: scaled by 1/sqrt(2 · layers)."""
        return self.init_std / (2 * self.num_layers) ** 0.5

    @property
    def value_head_size(self) -> int:
        """Size of a head's values."""
        return self.value_size or self.head_size

    @property
    def forward_only(self) -> "ModelConfig":
        """The model for evaluation and generation, which are dropless, so no token skips an expert that it chose, and
        which predict only the next token."""
        return replace(self, expert_capacity=0.0, prediction_coefficient=0.0)

    @property
    def num_predicting(self) -> int:
        """Prediction modules that are computed. Their layers have the numbers after those that stages divide."""
        return self.prediction_modules if self.prediction_coefficient else 0

    @property
    def num_blocks(self) -> int:
        """Layers that are divided over stages: all except the `dense_layers`."""
        return self.num_layers - self.dense_layers

    @property
    def high_precision_ends(self) -> tuple[int, int]:
        """How many of the first and of the last layers that stages divide are in `bf16_layers`. The dense ones before
        them, part of the embedding, are always among those that compute as with bf16."""
        first, last = map(int, self.bf16_layers.split(","))
        return max(0, first - self.dense_layers), last

    @property
    def biases_routers(self) -> bool:
        """Whether routers have balancing biases, which are weights."""
        return self.balance in ("bias", "both")

    @property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer has the window, by the layers' numbers: first those that stages divide, then those of
        prediction modules, which come after the last one, then the `dense_layers` before the first one."""
        in_order = self._windowed(self.num_layers + self.num_predicting)
        return in_order[self.dense_layers :] + in_order[: self.dense_layers]

    @property
    def windowed_in_order(self) -> tuple[bool, ...]:
        """Whether each layer has the window, from the first to the last."""
        return self._windowed(self.num_layers)

    def _windowed(self, number: int) -> tuple[bool, ...]:
        return in_each_layer(self.window_layers, number) if self.sliding_window else (False,) * number

    @property
    def linear(self) -> tuple[bool, ...]:
        """Whether each layer has linear attention, from the first to the last; those of prediction modules have not."""
        number = self.num_layers
        return in_each_layer(self.linear_layers, number) if self.linear_heads else (False,) * number

    @cached_property
    def kinds(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the layers of each kind that stages divide. If all are of one kind, it has no name."""
        linear = self.linear[self.dense_layers :]
        if len({*linear}) == 1:
            return {"": tuple(range(self.num_blocks))}
        return {kind: tuple(n for n, each in enumerate(linear) if each == (kind == LINEAR)) for kind in KINDS}

    def is_linear(self, kind: str) -> bool:
        """Whether layers of a kind have linear attention."""
        return kind == LINEAR if kind else self.linear[-1]

    @cached_property
    def periods(self) -> dict[str, tuple[int, ...]]:
        """How many layers of each kind every period has: first those of linear attention, then the others. If all are
        of one kind, every layer is a period."""
        if "" in self.kinds:
            return {"": (1,) * self.num_blocks}
        runs = [(linear, len([*run])) for linear, run in groupby(self.linear[self.dense_layers :])]
        runs = [(True, 0)] * (not runs[0][0]) + runs + [(False, 0)] * runs[-1][0]
        return {kind: tuple(length for _, length in runs[place::2]) for place, kind in enumerate(KINDS)}

    @cached_property
    def layers_of_periods(self) -> tuple[int, ...]:
        """How many layers every period has."""
        return tuple(map(sum, zip(*self.periods.values(), strict=True)))

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate matrix."""
        return self.activation in GATED

    @property
    def rotary(self) -> bool:
        """Whether positions rotate queries and keys, so that no weight depends on their number."""
        return self.positions == "rotary"
