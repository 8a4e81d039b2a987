"""Models, as configuration: the sizes of their weights."""

from collections import ChainMap
from dataclasses import dataclass
from typing import Annotated

from megajax.models.registry import DECODER, EARLIER_NAMES, FAMILIES
from megajax.options import OneOf, between
from megajax.traits import ENDS, WEIGHTS, ReadWith, Size, Small, Theirs, Through

WITH_EXPERTS = ReadWith("num_experts")
_SIZE = between(0, 1_000_000)
_EXPERTS = between(0, 10_000)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model's weights, the first fields of a `ModelConfig`."""

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
    dense_layers: Annotated[
        int,
        "the first layers, which have an MLP in the place of experts; they are computed with the embedding, by the "
        "first stage of a pipeline",
        between(0, 10_000),
        WEIGHTS,
        WITH_EXPERTS,
        Small(most=1),
    ] = 0
    experts_per_token: Annotated[
        int, "experts that a token passes", _EXPERTS, WEIGHTS, WITH_EXPERTS, Small(jointly=True)
    ] = 0
    expert_size: Annotated[
        int,
        "width of an expert's inner layer; 0: model.mlp-size",
        _SIZE,
        WEIGHTS,
        WITH_EXPERTS,
        Size("expert_mlp", split=True),
    ] = 0
    shared_expert_size: Annotated[
        int,
        "width of an MLP beside the experts, which every token passes; 0: none",
        _SIZE,
        WEIGHTS,
        WITH_EXPERTS,
        Size("mlp", split=True),
    ] = 0
