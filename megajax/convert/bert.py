"""BERT: `MegatronBertFor…` of transformers where a layer's LayerNorms come first, `BertFor…` where they follow the
additions; `bert_heads.py` has the heads. The output product of pretraining is tied."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megajax.convert.bert_heads import HEADS
from megajax.convert.exchange import Exchange
from megajax.convert.settings import Fields
from megajax.convert.weights import Place, Places, linear, norm
from megajax.convert.wordpiece_files import read_wordpiece, special_ids, write_wordpiece
from megajax.data.tokenizer import Tokenizer
from megajax.models.bert.model import TOKEN_TYPES
from megajax.models.config import ModelConfig

_ORDERS = {"megatron-bert": "pre", "bert": "post"}  # their `model_type` -> our layer order
_PREFIXES = {"pre": "Megatron", "post": ""}  # of a class's name
_SIZES = {  # theirs -> ours
    "num_hidden_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "num_attention_heads": "model.num_heads",
    "max_position_embeddings": "model.sequence_length",
    "vocab_size": "model.vocab_size",
}
_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_FIXED = {  # what our model is; also the defaults of both configurations, so a field may be missing
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "type_vocab_size": TOKEN_TYPES,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def _read_settings(fields: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
    order = _ORDERS[fields.get("model_type")]
    known = {_PREFIXES[order] + name: head for head in HEADS.values() for name in head.classes}
    named = fields.get("architectures")
    if named is not None:
        fields.check("architectures", *([name] for name in known))
    head = known[named[0]] if named else HEADS["pretraining"]
    fields.check_all(_FIXED)
    sizes = fields.sizes(_SIZES)
    fields.check_divides("num_attention_heads", "hidden_size")
    if fields.get("intermediate_size") != 4 * sizes["model.hidden_size"]:
        valid = f"{4 * sizes['model.hidden_size']} (4 x hidden_size)"
        raise fields.refusal("intermediate_size", fields.get("intermediate_size"), valid)
    model = {"model.family": "bert", "model.layer_order": order}
    return model | head.read(fields) | sizes | fields.dropout(_DROPOUT, given) | fields.init_std()


def _settings(model: ModelConfig, labels: Sequence[str], tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    kind = next(name for name, order in _ORDERS.items() if order == model.layer_order)
    sizes = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "intermediate_size": model.mlp_size,
    }
    config = {"architectures": [_architecture(model)], "model_type": kind, **sizes, **_FIXED}
    config |= dict.fromkeys(_DROPOUT, model.dropout) | {"initializer_range": model.init_std}
    config |= HEADS[model.head].settings(model, labels)
    padding = special_ids(tokenizer).get("[PAD]") if tokenizer else None
    return {"config.json": config | {"pad_token_id": padding}}


def _architecture(model: ModelConfig) -> str:
    return _PREFIXES[model.layer_order] + HEADS[model.head].classes[0]


_LAYER = "bert.encoder.layer.{layer}."

_SHARED = {
    "table": Place("bert.embeddings.word_embeddings.weight", "VD"),
    "positions": Place("bert.embeddings.position_embeddings.weight", "TD"),
    "token_types": Place("bert.embeddings.token_type_embeddings.weight", "SD"),
}
_BLOCKS = {
    **linear("attention/query", f"{_LAYER}attention.self.query", "DD"),
    **linear("attention/key", f"{_LAYER}attention.self.key", "DD"),
    **linear("attention/value", f"{_LAYER}attention.self.value", "DD"),
    **linear("attention/output", f"{_LAYER}attention.output.dense", "DD"),
    **linear("mlp/up", f"{_LAYER}intermediate.dense", "FD"),
    **linear("mlp/down", f"{_LAYER}output.dense", "DF"),
}
_NORMS = {  # of an order: the one outside the layers, that of the attention, that of the MLP
    "pre": ("bert.encoder.ln", f"{_LAYER}attention.ln", f"{_LAYER}ln"),
    "post": ("bert.embeddings.LayerNorm", f"{_LAYER}attention.output.LayerNorm", f"{_LAYER}output.LayerNorm"),
}


def _spelling(there: Collection[str]) -> Callable[[str], str]:
    """By the names that TensorFlow gave a LayerNorm's weights, which the first BERTs still have, where only those are
    there."""

    def spelled(name: str) -> str:
        older = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return older if name not in there and older in there else name

    return spelled


def places(model: ModelConfig) -> Places:
    """Where the weights of a model are."""
    head = HEADS[model.head]
    outside, attention, mlp = _NORMS[model.layer_order]
    return Places(
        shared={**_SHARED, **norm("norm", outside), **head.shared},
        blocks=_BLOCKS | norm("attention_norm", attention) | norm("mlp_norm", mlp),
        copies=head.copies,
        unused=("bert.embeddings.position_ids", *head.unused),
        fresh=head.fresh,
        spelling=_spelling,
    )


EXCHANGE = Exchange(
    family="bert",
    model_types=tuple(_ORDERS),
    kind=lambda model: HEADS[model.head].kind,
    special_tokens="BERT's five special tokens",
    layers="num_hidden_layers",
    read_settings=_read_settings,
    settings=_settings,
    architecture=_architecture,
    places=places,
    read_tokenizer=read_wordpiece,
    write_tokenizer=write_wordpiece,
)
