"""What tensors that are not those of a model probably are, by their names: for error messages."""

import re
from collections.abc import Collection
from dataclasses import replace

from megajax.convert.exchange import Exchange, Head
from megajax.convert.families import EXCHANGES
from megajax.core.models.config import ModelConfig

_SIGNS = (  # in the name of any tensor -> what there is
    (r"\.lora_|^base_model\.model\.", "a peft model whose adapters are not merged (merge_and_unload merges them)"),
    (
        r"_(blocks|scales)$|\.(qweight|qzeros|SCB|absmax|weight_scale|weight_scale_inv|weight_packed)$",
        "quantized weights",
    ),
    (r"(^|\.)(vision_|visual\.|image_|multi_modal_projector)", "a model of images and text"),
    (r"^v_head\.", "a model with the value head of TRL"),
    (r"^layers\.\d+\.(attention|feed_forward)\.|^tok_embeddings\.", "the own format of Meta or Mistral"),
    (r"^(embedding|decoder|language_model)\..*(word_embeddings|layers\.\d+\.self_attention\.)", "a Megatron-LM model"),
    (r"\.self_attn\.(kv_a_proj|q_a_proj|kv_b_proj)", "a DeepSeek, with latent attention"),
    (r"\.(qkv_proj|query_key_value|Wqkv)\.", "a class with fused query, key and value"),
    (r"\.shared_experts?\.", "a mixture with shared experts"),
    (r"\.block\.\d+\.layer\.\d+\.SelfAttention\.", "a T5"),
    (r"^score\.", "a model for classifying sequences"),
)


def likely_source(names: Collection[str], exchange: Exchange, model: ModelConfig) -> str:
    """The part of a sentence that says what tensors with these names look like, other than what the `exchange` of the
    `model` reads; empty if nothing is known."""
    for sign, kind in _SIGNS:
        if any(re.search(sign, name) for name in names):
            return f", which look like {kind}"
    there = {_in_general(name) for name in names}
    known = {"": _names(exchange, model)}
    for other in EXCHANGES:
        for head, own in other.heads.items():
            if not there <= _every_name(other, own):
                continue  # soon known, while the names of one model take a trace
            one = {"num_layers": 1, "num_experts": int("mlp/router/weight" in other.blocks)}
            lacks = other.lacks(model) | one | {"head": head}
            known[own.classes[0]] = _names(other, replace(model, **lacks))
    likely = [name for name in known if there and there <= known[name]]
    # One that has them all comes first, then this one.
    likely.sort(key=lambda name: (not all(_is_optional(each) for each in known[name] - there), bool(name)))
    if likely and not likely[0]:
        return ", which look like a part of this model, as after an incomplete download"
    return f", which look like a {likely[0]}" if likely else ""


def _is_optional(name: str) -> bool:
    return any(name in (*exchange.copies, *head.copies) for exchange in EXCHANGES for head in exchange.heads.values())


def _every_name(exchange: Exchange, head: Head) -> set[str]:
    """Like `_names`, of all models of a class together."""
    places = [*exchange.shared.values(), *head.shared.values(), *exchange.blocks.values()]
    names = {place.name.format(layer=0, expert=0) for place in places}
    return {_in_general(name) for name in (*names, *exchange.copies, *head.copies)}


def _names(exchange: Exchange, model: ModelConfig) -> set[str]:
    """All names of a model's tensors, with number 0 for every layer and expert."""
    places = exchange.places(model)
    return {_in_general(name) for name in (*places.shapes(model), *places.copies)}


def _in_general(name: str) -> str:
    return re.sub(r"\.\d+\.", ".0.", name)
