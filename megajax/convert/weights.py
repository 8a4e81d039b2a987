"""Our weights as the tensors of Hugging Face's GPT-2, and back.

Theirs have no dims of heads, and one tensor for every layer; their vocabulary is not padded, the head is tied. Letters:
V vocabulary, T positions, D model, Q query, key and value of all heads, F feed-forward, L layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from megajax.backend import CPU
from megajax.models.config import ModelConfig
from megajax.models.family import CutModel
from megajax.parallel.borders import F_AND_G

Tensor = npt.NDArray[np.float32]

# Ours -> theirs, without the prefix `transformer.`, and their dims.
_SHARED = {
    "table": ("wte.weight", "VD"),
    "positions": ("wpe.weight", "TD"),
    "final_norm/scale": ("ln_f.weight", "D"),
    "final_norm/bias": ("ln_f.bias", "D"),
}
_BLOCKS = {  # theirs below `h.LAYER.`
    "attention_norm/scale": ("ln_1.weight", "D"),
    "attention_norm/bias": ("ln_1.bias", "D"),
    "attention/query/weight": ("attn.c_attn.weight", "DQ"),
    "attention/query/bias": ("attn.c_attn.bias", "Q"),
    "attention/key/weight": ("attn.c_attn.weight", "DQ"),
    "attention/key/bias": ("attn.c_attn.bias", "Q"),
    "attention/value/weight": ("attn.c_attn.weight", "DQ"),
    "attention/value/bias": ("attn.c_attn.bias", "Q"),
    "attention/output/weight": ("attn.c_proj.weight", "DD"),
    "attention/output/bias": ("attn.c_proj.bias", "D"),
    "mlp_norm/scale": ("ln_2.weight", "D"),
    "mlp_norm/bias": ("ln_2.bias", "D"),
    "mlp/up/weight": ("mlp.c_fc.weight", "DF"),
    "mlp/up/bias": ("mlp.c_fc.bias", "F"),
    "mlp/down/weight": ("mlp.c_proj.weight", "FD"),
    "mlp/down/bias": ("mlp.c_proj.bias", "D"),
}
_THIRDS = ("attention/query", "attention/key", "attention/value")  # of the last dim of one of their tensors


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model in Hugging Face's form, by name without the prefix `transformer.`."""
    hidden = config.hidden_size
    sizes = {"V": config.vocab_size, "T": config.sequence_length, "D": hidden, "Q": 3 * hidden, "F": config.mlp_size}
    names = dict(_SHARED.values())
    for layer in range(config.num_layers):
        names |= {f"h.{layer}.{name}": dims for name, dims in _BLOCKS.values()}
    return {name: tuple(sizes[dim] for dim in dims) for name, dims in names.items()}


def from_tensors(read: Callable[[str], Tensor], config: ModelConfig) -> dict[str, Any]:
    """Our weights in natural form, layers stacked `[L, …]`, the padded rows of the vocabulary zero.

    Args:
        read: the tensor of a name in `tensor_shapes(config)`.
    """

    def weight(path: Any, ours: jax.ShapeDtypeStruct) -> Tensor:
        part, name = _name(path)
        whole = np.zeros(ours.shape, np.float32)
        if part == "blocks":
            for layer in range(config.num_layers):
                tensor = read(f"h.{layer}.{_BLOCKS[name][0]}")
                own = tensor if (third := _third(name)) is None else np.split(tensor, 3, axis=-1)[third]
                whole[layer] = own.reshape(ours.shape[1:])
        else:
            tensor = read(_SHARED[name][0])
            whole[: len(tensor)] = tensor
        return whole

    return jax.tree_util.tree_map_with_path(weight, CutModel(config, F_AND_G, CPU).shapes)


def to_tensors(weights: Mapping[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of Hugging Face's GPT-2, by name without the prefix `transformer.`, of natural weights."""
    tensors: dict[str, Tensor] = {}
    shapes = tensor_shapes(config)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        part, name = _name(path)
        whole = np.asarray(leaf, np.float32)
        if part == "blocks" and (third := _third(name)) is not None:
            for layer in range(config.num_layers):
                theirs = f"h.{layer}.{_BLOCKS[name][0]}"
                joint = tensors.setdefault(theirs, np.empty(shapes[theirs], np.float32))
                width = joint.shape[-1] // 3
                joint[..., third * width : (third + 1) * width] = whole[layer].reshape(*joint.shape[:-1], width)
        elif part == "blocks":
            tensors |= {f"h.{layer}.{_BLOCKS[name][0]}": whole[layer] for layer in range(config.num_layers)}
        else:
            tensors[_SHARED[name][0]] = whole
    return {
        name: np.ascontiguousarray(tensors[name][: shape[0]] if name == "wte.weight" else tensors[name]).reshape(shape)
        for name, shape in shapes.items()
    }


def _third(name: str) -> int | None:
    """Which third of their tensor one of our weights of a layer is; None: all of it."""
    place = name.rpartition("/")[0]
    return _THIRDS.index(place) if place in _THIRDS else None


def _name(path: Any) -> tuple[str, str]:
    """`shared` or `blocks`, and the weight's name below it."""
    part, *keys = (str(key.key) for key in path)
    return part, "/".join(keys)
