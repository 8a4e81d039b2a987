"""Our weights as tensors in the Hugging Face format, and back, driven by a table of each weight's place.

Their tensors have no head dims, there is one per layer, and the vocabulary is not padded. Tensors and weights are read
and made one by one. Letters: V vocabulary, T positions, C classes, D model, Q queries of all heads, G keys or values of
all their heads, H heads, J queries, keys and values together, K head size, O values of all query heads, F feed-forward,
E experts, X an expert's feed-forward, Y twice that, S a shared expert's, L layers; of latent attention, R the input of
queries, Z the latent, W that with the shared key, U keys without it and values of all heads; P two times D; of linear
attention, k keys of all heads, v values, c queries, keys and values together, h heads, s a head's values, t taps; of
Qwen's joined tensors, q two times Q, y two times k and v, b two times h, and of a key head l its keys, g its values, r
its value heads; a digit is a literal size.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from megajax.core.backend import CPU
from megajax.core.config import MeshConfig
from megajax.core.mesh import make_mesh
from megajax.core.models.config import ModelConfig
from megajax.core.models.freeze import PREDICTION
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.program.state import StateLayout
from megajax.settings.config import Config

Tensor = npt.NDArray[np.float32]
Spelling = Callable[[Collection[str]], Callable[[str], str]]  # existing names -> (name -> its actual spelling)


@dataclass(frozen=True)
class TensorPlace:
    """Where one of our weights is."""

    name: str  # their tensor; contains `{layer}` for a layer's weight, and also `{expert}` for an expert's
    dims: str  # theirs, in letters and digits
    part: int = 0  # which of the `parts`
    parts: str = ""  # in letters, what weights have of the outputs, in turns to the end; empty: this one has all
    turned: bool = False  # theirs is [out, in], like a PyTorch `Linear`, ours [in, out]
    # What has it: the layers of a kind that stages divide (`ModelConfig.kinds`), the first ones, which are dense
    # (`dense_blocks`), or prediction modules (`prediction`).
    of: str = ""
    # Where theirs has rotary features in pairs, of which ours has the first ones before all second ones, if positions
    # rotate them: among the last outputs of each head, or of all.
    pairs: Literal["", "in heads", "at the end"] = ""

    def tensors(self, config: ModelConfig) -> Iterator[tuple[tuple[int, ...], str]]:
        """The names of its tensors, each with its index in our weight: layer and expert, or nothing for a weight of the
        ends."""
        dense, last = config.dense_layers, config.num_layers
        layers = {kind: [dense + n for n in numbers] for kind, numbers in config.kinds.items()}
        layers |= {"dense_blocks": [*range(dense)], "prediction": [*range(last, last + config.prediction_modules)]}
        numbers = {"layer": layers.get(self.of, []), "expert": [*range(config.num_experts)]}
        stacked = {word: each for word, each in numbers.items() if f"{{{word}}}" in self.name}
        for index in np.ndindex(*map(len, stacked.values())):
            found = zip(stacked.items(), index, strict=True)
            yield index, self.name.format(**{word: each[n] for (word, each), n in found})

    def own(self, outputs: Tensor, config: ModelConfig) -> Tensor:
        """A view of what this weight has of their outputs, the last dim, in which parts that take several turns have
        one more dim before them."""
        if not self.parts:
            return outputs
        sizes = [dim_sizes(config)[letter] for letter in self.parts]
        first = sum(sizes[: self.part])
        return outputs.reshape(*outputs.shape[:-1], -1, sum(sizes))[..., first : first + sizes[self.part]]

    def in_halves(self, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Their tensor with rotary features in our order."""
        return self._reordered(tensor, config, (config.rotary_size // 2, 2))

    def in_pairs(self, tensor: Tensor, config: ModelConfig) -> Tensor:
        """The inverse of `in_halves`."""
        return self._reordered(tensor, config, (2, config.rotary_size // 2))

    def _reordered(self, tensor: Tensor, config: ModelConfig, sides: tuple[int, int]) -> Tensor:
        if not (self.pairs and config.rotary):
            return tensor
        heads = config.num_heads if self.pairs == "in heads" else 1
        parts = tensor.reshape(heads, -1, *tensor.shape[1:])
        plain, rotary = np.split(parts, [parts.shape[1] - config.rotary_size], axis=1)
        turned = rotary.reshape(heads, *sides, *tensor.shape[1:]).swapaxes(1, 2).reshape(rotary.shape)
        return np.concatenate([plain, turned], axis=1).reshape(tensor.shape)


def linear(ours: str, theirs: str, dims: str) -> dict[str, TensorPlace]:
    """Weight and bias of a PyTorch `Linear`; `dims` are [out, in]."""
    return {
        f"{ours}/weight": TensorPlace(f"{theirs}.weight", dims, turned=True),
        f"{ours}/bias": TensorPlace(f"{theirs}.bias", dims[0]),
    }


def norm(ours: str, theirs: str, dims: str = "D") -> dict[str, TensorPlace]:
    """Scale and bias of a norm; as of `linear`, those that a model does not have are not looked for."""
    return {f"{ours}/scale": TensorPlace(f"{theirs}.weight", dims), f"{ours}/bias": TensorPlace(f"{theirs}.bias", dims)}


def dim_sizes(config: ModelConfig) -> dict[str, int]:
    """Sizes of dims by their letters."""
    queries, keys = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))
    sizes = {"V": config.vocab_size, "T": config.sequence_length, "D": config.hidden_size, "F": config.mlp_size}
    sizes |= {"Q": queries, "G": keys, "J": queries + 2 * keys, "K": config.head_size}
    sizes |= {"E": config.num_experts, "X": config.expert_size, "C": config.num_classes, "1": 1, "2": 2}
    values, rotary = config.num_heads * config.value_head_size, config.rotary_size
    sizes |= {"O": values, "R": config.query_latent_size or config.hidden_size, "S": config.shared_expert_size}
    sizes |= {"H": config.num_heads, "P": 2 * config.hidden_size, "Y": 2 * config.expert_size}
    sizes |= {"Z": config.latent_size, "W": config.latent_size + rotary}
    sizes |= {"U": queries - config.num_heads * rotary + values}
    keys, values = config.linear_key_heads * config.linear_key_size, config.linear_heads * config.linear_value_size
    sizes |= {"k": keys, "v": values, "c": 2 * keys + values, "h": config.linear_heads}
    sizes |= {"s": config.linear_value_size, "t": config.linear_convolution, "l": config.linear_key_size}
    several = config.linear_heads // (config.linear_key_heads or 1)
    sizes |= {"r": several, "g": several * config.linear_value_size}
    return sizes | {"q": 2 * queries, "y": 2 * (keys + values), "b": 2 * config.linear_heads}


def spelling(*pairs: tuple[str, str]) -> Spelling:
    """Names that do not exist may have the second of a pair in place of the first."""

    def of(there: Collection[str]) -> Callable[[str], str]:
        def spelled(name: str) -> str:
            return next((each for each in (name, *(name.replace(*pair) for pair in pairs)) if each in there), name)

        return spelled

    return of


@dataclass(frozen=True)
class TensorPlaces:
    """The places of all weights of a model, by our names."""

    shared: Mapping[str, TensorPlace]  # weights of the ends
    blocks: Mapping[str, TensorPlace]  # weights of every layer
    copies: Mapping[str, str]  # optional tensor -> the tensor that it must be a copy of
    written_copies: Mapping[str, str]  # those of them that are written, too
    unused: Collection[str]  # optional tensors that are not read, or how they begin; a layer's contain `{layer}`
    spelling: Spelling
    # Tensor of a layer as transformers 5 has it in memory -> the tensors on disk of each expert that it holds, one
    # after the other.
    fused: Mapping[str, tuple[str, ...]]
    # Prefixes of our weights that may be missing and are then initialized randomly -> what messages call them.
    fresh: Mapping[str, str]

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model by name, except copies and unused ones."""
        sizes = dim_sizes(config)
        places = [*self.shared.values(), *self.blocks.values()]
        shapes = {place: tuple(sizes[dim] for dim in place.dims) for place in places}
        return {name: shape for place, shape in shapes.items() for _, name in place.tensors(config)}

    def prediction_tensors(self, config: ModelConfig) -> set[str]:
        """The names of prediction modules' tensors."""
        places = (place for place in self.shared.values() if place.of == "prediction")
        return {name for place in places for _, name in place.tensors(config)}

    def fused_tensors(self, config: ModelConfig) -> dict[str, list[list[str]]]:
        """The tensors that `fused` describes, each with the names of every expert's."""
        return {
            fused.format(layer=layer): [
                [name.format(layer=layer, expert=expert) for name in names] for expert in range(config.num_experts)
            ]
            for layer in range(config.num_layers + config.prediction_modules)
            for fused, names in self.fused.items()
        }


def weight_of(
    places: TensorPlaces, read: Callable[[str], Tensor], config: ModelConfig, path: Any, shape: tuple[int, ...]
) -> Tensor:
    """The canonical weight at a path in the tree of weights: layers stacked `[L, …]`, padded rows of the vocabulary
    zero. `read` returns the tensor for a name in `places.shapes(config)`."""
    part, name = named(path)
    whole = np.zeros(shape, np.float32)
    place = (places.blocks if part == "blocks" else places.shared)[name]
    for index, tensor in place.tensors(config):
        ours = _ours(place, place.in_halves(read(tensor), config), config)
        if index:
            whole[index] = ours.reshape(shape[len(index) :])
        else:
            whole[: len(ours)] = ours
    return whole


def tensors_of(
    places: TensorPlaces, config: ModelConfig, read: Callable[[list[Any]], list[Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """All tensors that are written, with their names, from canonical weights. The tensors of a weight, or of weights
    that share tensors, are made before `read` is called with the next paths in the tree of weights."""
    shapes = places.shapes(config)
    sharing: dict[tuple[str, str], list[tuple[Any, TensorPlace]]] = {}
    for path in weight_paths(config):
        part, name = named(path)
        known = places.blocks if part == "blocks" else places.shared
        if name not in known and name.startswith(f"{PREDICTION}/"):
            continue  # the class has no modules
        place = known[name]
        sharing.setdefault((place.name, place.of), []).append((path, place))
    for members in sharing.values():
        weights, own_places = read([path for path, _ in members]), [place for _, place in members]
        for index, name in own_places[0].tensors(config):
            tensor = np.empty(shapes[name], np.float32)
            for place, weight in zip(own_places, weights, strict=True):
                ours = _ours(place, tensor, config)  # a view
                ours[...] = (weight[index] if index else weight[: len(ours)]).reshape(ours.shape)
            tensor = own_places[0].in_pairs(tensor, config)
            for each in (name, *(copy for copy, of in places.written_copies.items() if of == name)):
                yield each, tensor


def to_tensors(places: TensorPlaces, weights: Mapping[str, Any], config: ModelConfig) -> dict[str, Tensor]:
    """All tensors by name, from canonical weights in memory."""
    leaves = {named(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}
    return dict(tensors_of(places, config, lambda paths: [leaves[named(path)] for path in paths]))


def whole_model(config: ModelConfig) -> StagedModel:
    """A model on one CPU device."""
    return StagedModel(config, F_AND_G, CPU)


def whole_layout(config: Config) -> StateLayout:
    """The layout of a run's state on one CPU device."""
    config = dataclasses.replace(config, mesh=MeshConfig())
    return StateLayout(config, make_mesh(jax.devices()[:1]), whole_model(config.model))


def weight_paths(config: ModelConfig) -> list[Any]:
    """Paths of our weights in the tree of weights."""
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(whole_model(config).shapes)]


def named(path: Any) -> tuple[str, str]:
    """For a path in the tree of weights: `shared` or `blocks`, and the weight's name below it."""
    part, *keys = (str(key.key) for key in path)
    return part, "/".join(keys)


def _ours(place: TensorPlace, tensor: Tensor, config: ModelConfig) -> Tensor:
    """The part of a tensor that belongs to our weight, with dims in our order but without head dims."""
    return place.own(np.moveaxis(tensor, 0, -1) if place.turned else tensor, config)
