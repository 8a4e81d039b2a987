"""The weights in a folder in Hugging Face's format, checked against the model that they should be of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.convert.exchange import Exchange
from megajax.convert.tensor_files import TensorFiles
from megajax.convert.weights import Tensor, named, weight_of, whole_model
from megajax.errors import UserError
from megajax.models.config import ModelConfig

_LAYERS = 1000  # are soon looked for one by one


class StoredWeights:
    """All weights in a folder of a model, which is `config` by its config.json; none is read yet.

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
        self.fresh: dict[str, tuple[str, ...]] = {}
        missing: set[str] = set()
        for beginning, head in self._places.fresh.items():
            theirs = {ours: each.name for ours, each in self._places.shared.items() if ours.startswith(beginning)}
            if not there.keys() & theirs.values():
                self.fresh[head] = tuple(theirs)
                missing.update(theirs.values())
        self.dtype = self._check(exchange, missing)

    def _check(self, exchange: Exchange, missing: set[str]) -> str:
        places, tensors, spelled = self._places, self._tensors, self._spelled
        shapes = {spelled(name): shape for name, shape in places.shapes(self._config).items() if name not in missing}
        layers = range(self._config.num_layers)
        unused = {spelled(name.format(layer=layer)) for name in places.unused for layer in layers}
        tensors.check(shapes, exchange.heads[self._config.head].kind)
        tensors.check_no_others(shapes.keys() | unused | places.copies.keys(), exchange.architecture(self._config))
        for copy, name in places.copies.items():
            if copy in tensors.shapes and not np.array_equal(tensors.read(copy), self.read(name)):
                valid = "the same, the head is tied"
                raise UserError(f"{tensors.folder}: {copy} differs from {spelled(name)}; valid: {valid}")
        return tensors.dtype(shapes)

    def read(self, name: str) -> Tensor:
        """The tensor of a name in the family's `Places`, in fp32; a `UserError` if it has NaNs or infinities."""
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


def _drawn(config: ModelConfig, seed: int, names: set[str]) -> dict[str, Tensor]:
    """Fresh weights of the ends, by our names."""
    model = whole_model(config)

    def draw() -> dict[str, jax.Array]:  # of the others nothing is computed
        leaves = ((named(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model.init(seed)))
        return {name: leaf for (part, name), leaf in leaves if part == "shared" and name in names}

    return {name: np.asarray(leaf) for name, leaf in jax.jit(draw)().items()} if names else {}
