"""Our weights as the tensors of Hugging Face's format, and back, by a table of where each of them is.

Theirs have no dims of heads, and one tensor for every layer; their vocabulary is not padded. Tensors and weights are
read and made one by one. Letters: V vocabulary, T positions, S segments (token types), C classes, D model, Q queries of
all heads, G keys or values of all their heads, J queries, keys and values jointly, K head size, F feed-forward, L
layers; a digit is that many.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from megajax.backend import CPU
from megajax.models.config import ModelConfig
from megajax.models.family import CutModel
from megajax.parallel.boundary import F_AND_G

Tensor = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Place:
    """Where one of our weights is.

    Attributes:
        name: of their tensor; a layer's has `{layer}` in it.
        dims: theirs, in letters and digits.
        third: which third of the last dim; None: all of it.
        turned: theirs is [out, in], as a `Linear` of PyTorch has it, ours [in, out].
    """

    name: str
    dims: str
    third: int | None = None
    turned: bool = False


def linear(ours: str, theirs: str, dims: str) -> dict[str, Place]:
    """Weight and bias of a `Linear` of PyTorch; `dims` [out, in]."""
    return {
        f"{ours}/weight": Place(f"{theirs}.weight", dims, turned=True),
        f"{ours}/bias": Place(f"{theirs}.bias", dims[0]),
    }


def norm(ours: str, theirs: str) -> dict[str, Place]:
    """Scale and bias of a LayerNorm."""
    return {f"{ours}/scale": Place(f"{theirs}.weight", "D"), f"{ours}/bias": Place(f"{theirs}.bias", "D")}


@dataclass(frozen=True)
class Places:
    """Where all weights of a model are, by our names.

    Attributes:
        shared: those of the ends.
        blocks: those of every layer.
        copies: names of further tensors that may be there, and of those whose copies they are.
        unused: names of those that may be there and are not read; a layer's have `{layer}` in them.
        spelling: names of the tensors that are there -> name -> what the tensor is called there.
        fresh: those that may be missing and then are drawn anew: the beginnings of our names, and what they are in
            messages.
    """

    shared: Mapping[str, Place]
    blocks: Mapping[str, Place]
    copies: Mapping[str, str]
    unused: Collection[str]
    spelling: Callable[[Collection[str]], Callable[[str], str]]
    fresh: Mapping[str, str] = field(default_factory=dict)

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model by name, without copies and what is not read."""
        queries, keys = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))
        sizes = {"V": config.vocab_size, "T": config.sequence_length, "D": config.hidden_size, "F": config.mlp_size}
        sizes |= {"Q": queries, "G": keys, "J": queries + 2 * keys, "K": config.head_size}
        sizes |= {"S": 2, "C": config.num_classes}
        dims = {place.name: place.dims for place in self.shared.values()}
        for layer in range(config.num_layers):
            dims |= {place.name.format(layer=layer): place.dims for place in self.blocks.values()}
        return {
            name: tuple(sizes[dim] if dim in sizes else int(dim) for dim in letters) for name, letters in dims.items()
        }

    def of(self, path: Any) -> Place:
        """Of the weight at a path in the tree of weights."""
        part, name = named(path)
        return (self.blocks if part == "blocks" else self.shared)[name]

    def names_unused(self, config: ModelConfig) -> set[str]:
        """Names of the tensors that may be there and are not read."""
        return {name.format(layer=layer) for name in self.unused for layer in range(config.num_layers)}

    def may_be_fresh(self) -> dict[str, dict[str, str]]:
        """The weights that may be missing, and the tensors that they are in, by what messages call them."""
        return {
            head: {ours: place.name for ours, place in self.shared.items() if ours.startswith(beginning)}
            for beginning, head in self.fresh.items()
        }


def weight_of(
    places: Places, read: Callable[[str], Tensor], config: ModelConfig, path: Any, shape: tuple[int, ...]
) -> Tensor:
    """One of our weights in canonical form, layers stacked `[L, …]`, the padded rows of the vocabulary zero.

    Args:
        places: of the model.
        read: the tensor of a name in `places.shapes(config)`.
        config: the model.
        path: of the weight in the tree of weights.
        shape: of the weight.
    """
    part, name = named(path)
    whole = np.zeros(shape, np.float32)
    if part == "blocks":
        place = places.blocks[name]
        for layer in range(config.num_layers):
            whole[layer] = _ours(place, read(place.name.format(layer=layer))).reshape(shape[1:])
    else:
        own = _ours(places.shared[name], read(places.shared[name].name))
        whole[: len(own)] = own
    return whole


def tensors_of(
    places: Places, config: ModelConfig, read: Callable[[list[Any]], list[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """All tensors with their names, of canonical weights; those of one weight, or of several that share tensors, are
    made before the next weights are read.

    Args:
        places: of the model.
        config: the model.
        read: the weights of some paths in the tree of weights.
    """
    shapes = places.shapes(config)
    sharing: dict[str, list[tuple[Any, Place]]] = {}
    for path in weight_paths(config):
        place = places.of(path)
        sharing.setdefault(place.name, []).append((path, place))
    for name, members in sharing.items():
        stacked = named(members[0][0])[0] == "blocks"
        names = [name.format(layer=layer) for layer in range(config.num_layers)] if stacked else [name]
        places_of, weights = [place for _, place in members], read([path for path, _ in members])
        yield from _tensors_in(places_of, [(own, shapes[own]) for own in names], weights, stacked)
        del weights  # before the next are read


def _tensors_in(
    places: list[Place], tensors: list[tuple[str, tuple[int, ...]]], weights: list[Tensor], stacked: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, by name and shape, that hold these weights; of layers one for each."""
    for layer, (name, shape) in enumerate(tensors):
        tensor = np.empty(shape, np.float32)
        for place, weight in zip(places, weights, strict=True):
            rows = weight[layer] if stacked else weight if place.turned else weight[: len(tensor)]
            _fill(place, tensor, rows)
        yield name, tensor


def to_tensors(places: Places, weights: Mapping[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """All tensors by name, of canonical weights in memory."""
    leaves = {named(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}
    return dict(tensors_of(places, config, lambda paths: [leaves[named(path)] for path in paths]))


def weight_shapes(config: ModelConfig) -> Any:
    """Our weights in canonical form, as types."""
    return CutModel(config, F_AND_G, CPU).shapes


def weight_paths(config: ModelConfig) -> list[Any]:
    """Paths of our weights in the tree of weights."""
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(weight_shapes(config))]


def named(path: Any) -> tuple[str, str]:
    """`shared` or `blocks`, and the weight's name below it, of a path in the tree of weights."""
    part, *keys = (str(key.key) for key in path)
    return part, "/".join(keys)


def _ours(place: Place, tensor: Tensor) -> Tensor:
    """What a tensor holds of our weight, the dims in our order but without those of heads."""
    own = tensor if place.third is None else np.split(tensor, 3, axis=-1)[place.third]
    return own.T if place.turned else own


def _fill(place: Place, tensor: Tensor, weight: Tensor) -> None:
    """Put our weight, of one layer and without padding, into the tensor."""
    own = _ours(place, tensor)  # a view
    own[...] = weight.reshape(own.shape)
