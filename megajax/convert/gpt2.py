"""GPT-2: `GPT2LMHeadModel` of transformers. Older files begin names without a prefix, or hold the
causal mask."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megajax.convert.byte_pair_files import read_byte_pair, write_byte_pair
from megajax.convert.exchange import Exchange, Lacks
from megajax.convert.settings import Fields
from megajax.convert.weights import Place, Places, norm
from megajax.data.tokenizer import Tokenizer
from megajax.models.config import ModelConfig

_SIZES = {  # theirs -> ours
    "n_layer": "model.num_layers",
    "n_embd": "model.hidden_size",
    "n_head": "model.num_heads",
    "n_positions": "model.sequence_length",
    "vocab_size": "model.vocab_size",
}
_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_ACTIVATIONS = {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"}  # theirs -> ours
_OURS = {  # what a model must be that the class can hold, beside its heads
    "norm": "layernorm",
    "positions": "learned",
    "bias": "all",
    "query_key_norm": False,
    "sliding_window": 0,
}
_FIXED = {  # what our model is; also the defaults of GPT2Config, so a field may be missing
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}


def _read_settings(fields: Fields, given: Mapping[str, Any]) -> dict[str, Any]:
    fields.check_all(_FIXED)
    fields.check("activation_function", *_ACTIVATIONS)
    fields.check("tie_word_embeddings", True, False)
    sizes = fields.sizes(_SIZES)
    fields.check_divides("n_head", "n_embd")
    if fields.get("n_inner") is not None:
        sizes["model.mlp_size"] = fields.value("n_inner", "model.mlp_size")
    return (
        {
            "model.family": "decoder",
            "model.activation": _ACTIVATIONS[fields.get("activation_function", "gelu_new")],
            "model.norm_epsilon": fields.value("layer_norm_epsilon", "model.norm_epsilon", 1e-5),
            "model.tied_embedding": fields.get("tie_word_embeddings", True),
        }
        | sizes
        | fields.dropout(_DROPOUT, given)
        | fields.init_std()
    )


def _lacks(model: ModelConfig) -> Lacks:
    lacks: Lacks = {name: value for name, value in _OURS.items() if getattr(model, name) != value}
    if model.activation not in _ACTIVATIONS.values():
        lacks["activation"] = "gelu-tanh"
    if model.num_kv_heads != model.num_heads:
        lacks["num_kv_heads"] = model.num_heads
    if model.hidden_size % model.num_heads:
        lacks["hidden_size"] = model.hidden_size // model.num_heads * model.num_heads or model.num_heads
    elif model.head_size * model.num_heads != model.hidden_size:
        lacks["head_size"] = model.hidden_size // model.num_heads
    return lacks


def _settings(model: ModelConfig, labels: Sequence[str], tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]]:
    special: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id"))
    if tokenizer:
        begin, *_ = *tokenizer.begin[-1:], tokenizer.end_of_text
        special = {"bos_token_id": begin, "eos_token_id": tokenizer.ends if tokenizer.ends[1:] else tokenizer.ends[0]}
    sizes = {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_positions": model.sequence_length,
        "vocab_size": model.vocab_size,
        "n_inner": None if model.mlp_size == 4 * model.hidden_size else model.mlp_size,
        "activation_function": next(name for name, ours in _ACTIVATIONS.items() if ours == model.activation),
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embedding,
    }
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **sizes, **_FIXED}
    config |= dict.fromkeys(_DROPOUT, model.dropout) | {"initializer_range": model.init_std, "use_cache": True}
    return {"config.json": config | special, "generation_config.json": {"_from_model_config": True, **special}}


_PREFIX = "transformer."
_LAYER = _PREFIX + "h.{layer}."


def _spelling(there: Collection[str]) -> Callable[[str], str]:
    """Without the prefix where no name has it, as GPT2Model saves them."""
    if any(name.startswith(_PREFIX) for name in there):
        return str
    return lambda name: name.removeprefix(_PREFIX)


def _product(ours: str, theirs: str, dims: str, third: int | None = None) -> dict[str, Place]:
    """Weight and bias of a `Conv1D`, whose weight is [in, out] as ours."""
    weight, bias = Place(f"{_LAYER}{theirs}.weight", dims, third), Place(f"{_LAYER}{theirs}.bias", dims[-1], third)
    return {f"{ours}/weight": weight, f"{ours}/bias": bias}


_SHARED = {
    "table": Place(f"{_PREFIX}wte.weight", "VD"),
    "positions": Place(f"{_PREFIX}wpe.weight", "TD"),
    **norm("final_norm", f"{_PREFIX}ln_f"),
}
_BLOCKS = {
    **norm("attention_norm", f"{_LAYER}ln_1"),
    **_product("attention/query", "attn.c_attn", "DJ", 0),
    **_product("attention/key", "attn.c_attn", "DJ", 1),
    **_product("attention/value", "attn.c_attn", "DJ", 2),
    **_product("attention/output", "attn.c_proj", "DD"),
    **norm("mlp_norm", f"{_LAYER}ln_2"),
    **_product("mlp/up", "mlp.c_fc", "DF"),
    **_product("mlp/down", "mlp.c_proj", "FD"),
}
_HEAD = "lm_head.weight"


def places(model: ModelConfig) -> Places:
    """Where the weights of a model are."""
    tied = model.tied_embedding
    return Places(
        shared=_SHARED if tied else {**_SHARED, "output": Place(_HEAD, "VD")},
        blocks=_BLOCKS,
        copies={_HEAD: f"{_PREFIX}wte.weight"} if tied else {},
        unused=(f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias"),
        spelling=_spelling,
    )


EXCHANGE = Exchange(
    family="decoder",
    model_types=("gpt2",),
    kind=lambda _: "a GPT-2",
    special_tokens="only one special token",
    layers="n_layer",
    read_settings=_read_settings,
    settings=_settings,
    architecture=lambda _: "GPT2LMHeadModel",
    lacks=_lacks,
    places=places,
    read_tokenizer=read_byte_pair,
    write_tokenizer=write_byte_pair,
)
