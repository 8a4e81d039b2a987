"""GPT-2: transformers' `GPT2LMHeadModel`. Older files have names without a prefix, or contain the causal mask."""

from collections.abc import Callable, Collection

from megajax.convert.exchange import Exchange, Head
from megajax.convert.parts import dropout, plain_heads, words
from megajax.convert.weights import TensorPlace, norm

_PREFIX = "transformer."
_LAYER = _PREFIX + "h.{layer}."


def _spelling(there: Collection[str]) -> Callable[[str], str]:
    """Names lose the prefix if no tensor has it, as in files saved from GPT2Model."""
    if any(name.startswith(_PREFIX) for name in there):
        return str
    return lambda name: name.removeprefix(_PREFIX)


def _product(ours: str, theirs: str, dims: str, part: int = 0, parts: str = "") -> dict[str, TensorPlace]:
    """Weight and bias of a `Conv1D`, whose weight is [in, out] like ours."""
    names = {"weight": dims, "bias": dims[-1]}
    return {f"{ours}/{name}": TensorPlace(f"{_LAYER}{theirs}.{name}", d, part, parts) for name, d in names.items()}


EXCHANGE = Exchange(
    family="decoder",
    model_type="gpt2",
    dialect="gpt2",
    heads={"pretraining": Head(("GPT2LMHeadModel", "GPT2Model"), "a GPT-2")},
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "is_causal": True,
    },
    aliases={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    defaults={"mlp_size": None, "norm_epsilon": 1e-5, "tied_embedding": True},
    parts=(
        words(
            "activation",
            "activation_function",
            {"gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh", "gelu": "gelu"},
        ),
        plain_heads("n_head", "n_embd"),
        dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    shared={
        "table": TensorPlace(f"{_PREFIX}wte.weight", "VD"),
        "positions": TensorPlace(f"{_PREFIX}wpe.weight", "TD"),
        "output": TensorPlace("lm_head.weight", "VD"),
        **norm("final_norm", f"{_PREFIX}ln_f"),
    },
    blocks={
        **norm("attention_norm", f"{_LAYER}ln_1"),
        **_product("attention/query", "attn.c_attn", "DJ", 0, "QGG"),
        **_product("attention/key", "attn.c_attn", "DJ", 1, "QGG"),
        **_product("attention/value", "attn.c_attn", "DJ", 2, "QGG"),
        **_product("attention/output", "attn.c_proj", "DD"),
        **norm("mlp_norm", f"{_LAYER}ln_2"),
        **_product("mlp/up", "mlp.c_fc", "DF"),
        **_product("mlp/down", "mlp.c_proj", "FD"),
    },
    copies={"lm_head.weight": f"{_PREFIX}wte.weight"},
    unused=(f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias"),
    spelling=_spelling,
)
