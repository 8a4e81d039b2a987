"""The weights in a folder in Hugging Face's format, checked against the model that they should be of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.backend import CPU
from megajax.convert.exchange import Exchange
from megajax.convert.tensor_files import TensorFiles
from megajax.convert.weights import Tensor, named, weight_of, weight_shapes
from megajax.errors import UserError
from megajax.models.config import ModelConfig
from megajax.models.family import CutModel
from megajax.parallel.boundary import F_AND_G

_LAYERS = 1000  # are soon looked for one by one


class StoredWeights:
    """All weights of a model, of which none is read yet.

    Args:
        folder: where the files are.
        config: the model, by the folder's config.json.
        exchange: of its family.

    Attributes:
        dtype: of all that are there, as in `DTYPES`; fp32 where they have several.
        fresh: by what they are in messages, the names of our weights that are not there and are drawn anew.

    Raises:
        UserError: the files are missing, damaged or pickles; a tensor is missing, or has another shape or type; there
            are further ones, or a copy that differs.
    """

    def __init__(self, folder: Path, config: ModelConfig, exchange: Exchange):
        self._config, self._tensors = config, TensorFiles(folder)
        there = self._tensors.shapes
        if config.num_layers > max(len(there), _LAYERS):  # each has several
            raise UserError(
                f"{folder / 'config.json'}: {exchange.named_options()['num_layers'][0]} is {config.num_layers}, but "
                f"there are {len(there)} tensors in all; valid: the number of layers in the safetensors"
            )
        self._places = exchange.places(config)
        self._spelled = self._places.spelling(there)
        self.fresh = {
            head: tuple(theirs)
            for head, theirs in self._places.may_be_fresh().items()
            if not theirs.values() & there.keys()
        }
        self.dtype = self._check(exchange)

    def _check(self, exchange: Exchange) -> str:
        places, tensors, spelled = self._places, self._tensors, self._spelled
        fresh = {places.shared[name].name for names in self.fresh.values() for name in names}
        shapes = {spelled(name): shape for name, shape in places.shapes(self._config).items() if name not in fresh}
        tensors.check(shapes, exchange.kind(self._config))
        unused = {spelled(name) for name in places.names_unused(self._config)}
        tensors.check_no_others(shapes.keys() | unused | places.copies.keys(), exchange.architecture(self._config))
        for copy, name in places.copies.items():
            if copy in tensors.shapes and not np.array_equal(tensors.read(copy), self.read(name)):
                valid = "the same, the head is tied"
                raise UserError(f"{tensors.folder}: {copy} differs from {spelled(name)}; valid: {valid}")
        return tensors.dtype(shapes)

    def read(self, name: str) -> Tensor:
        """The tensor of a name in the family's `Places`, in fp32.

        Raises:
            UserError: it has values that are NaN or infinite.
        """
        return self._tensors.read(self._spelled(name))

    def weights(self, seed: int) -> Callable[[Any, tuple[int, ...]], Tensor]:
        """(path, shape) of one of our weights in canonical form, layers stacked `[L, …]` -> that weight; what is fresh
        is what a run of this seed begins with. Raises `UserError` as `read`."""
        drawn = _drawn(self._config, seed, {name for names in self.fresh.values() for name in names})

        def weight(path: Any, shape: tuple[int, ...]) -> Tensor:
            part, name = named(path)
            if part == "shared" and name in drawn:
                return drawn[name]
            return weight_of(self._places, self.read, self._config, path, shape)

        return weight

    def canonical(self, seed: int) -> dict[str, Any]:
        """All of our weights at once.

        Raises:
            UserError: as `read`.
        """
        weight, shapes = self.weights(seed), weight_shapes(self._config)
        return jax.tree_util.tree_map_with_path(lambda path, ours: weight(path, ours.shape), shapes)


def _drawn(config: ModelConfig, seed: int, names: set[str]) -> dict[str, Tensor]:
    """Fresh weights of the ends, by our names."""
    if not names:
        return {}
    model = CutModel(config, F_AND_G, CPU)

    def draw() -> dict[str, jax.Array]:  # of the others nothing is computed
        leaves = ((named(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model.init(seed)))
        return {name: leaf for (part, name), leaf in leaves if part == "shared" and name in names}

    return {name: np.asarray(leaf) for name, leaf in jax.jit(draw)().items()}
