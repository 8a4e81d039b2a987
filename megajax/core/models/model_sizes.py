"""Configuration of models: the sizes of their weights."""

from collections import ChainMap
from dataclasses import dataclass
from typing import Annotated

from megajax.core.models.registry import DECODER, EARLIER_NAMES, FAMILIES
from megajax.core.options import OneOf, between
from megajax.core.traits import ENDS, WEIGHTS, HuggingFaceName, OnlyWith, ShrinkRule, Size, Through

WITH_EXPERTS = OnlyWith("num_experts")
_SIZE = between(0, 1_000_000)
_EXPERTS = between(0, 10_000)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model's weights, as the first fields of a `ModelConfig`."""

    family: Annotated[str, "kind of model", OneOf(ChainMap(FAMILIES, EARLIER_NAMES)), WEIGHTS] = DECODER
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
        between(1, 1_000_000),
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
    num_experts: Annotated[
        int,
        "experts per layer (mixture of experts instead of an MLP); 0: a plain MLP",
        _EXPERTS,
        WEIGHTS,
        Size("experts"),
    ] = 0
    dense_layers: Annotated[
        int,
        "number of first layers with a dense MLP instead of experts; the first pipeline stage "
        "computes them with the embedding",
        between(0, 10_000),
        WEIGHTS,
        WITH_EXPERTS,
        ShrinkRule(most=2),
    ] = 0
    experts_per_token: Annotated[
        int, "experts that each token is routed to", _EXPERTS, WEIGHTS, WITH_EXPERTS, ShrinkRule(jointly=True)
    ] = 0
    expert_size: Annotated[
        int,
        "width of each expert; 0: model.mlp-size",
        _SIZE,
        WEIGHTS,
        WITH_EXPERTS,
        Size("expert_mlp", split=True),
    ] = 0
    shared_expert_size: Annotated[
        int,
        "width of a shared expert that every token passes; 0: none",
        _SIZE,
        WEIGHTS,
        WITH_EXPERTS,
        Size("mlp", split=True),
    ] = 0
