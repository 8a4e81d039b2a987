"""Whether a checkpoint is of the model that a configuration describes: if not, it is not damaged, but another's."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from megajax.backend import CPU
from megajax.config import Config
from megajax.errors import UserError
from megajax.models.config import ModelConfig
from megajax.models.family import CutModel
from megajax.options import options
from megajax.parallel.boundary import RegionBoundary
from megajax.traits import Size, Through


def check_fits(checkpoint: Path, model: ModelConfig) -> None:
    """Refuse a configuration of another model than the checkpoint's; called when the checkpoint could not be read."""
    stored = _stored_shapes(checkpoint / "state")
    cut = CutModel(model, RegionBoundary(), CPU)
    specs = jax.tree.leaves(cut.logical_specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    sizes: dict[str, tuple[int, int]] = {}
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(cut.shapes), specs, strict=True):
        name = jax.tree_util.keystr(path)
        dims = ["layers", *spec[1:]] if name.startswith("['blocks']") else list(spec)
        found = stored.get(name, ())
        if len(found) == leaf.ndim:
            for dim, wanted, size in zip(dims, leaf.shape, found, strict=False):
                if wanted != size:
                    sizes.setdefault(dim, (wanted, size))
    for key, option in options(Config).items():
        is_of, through = option.trait(Size), option.trait(Through)
        if is_of and is_of.dim in sizes:
            wanted, size = sizes[is_of.dim]
            name = f"{through.words} (see {key})" if through else key
            file = checkpoint.parents[1] / "config.toml"
            raise UserError(f"{file}: {name} is {wanted}; valid: {size}, as in the weights of {checkpoint}")


def _stored_shapes(state: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's weights by path; none if it cannot be read."""
    import orbax.checkpoint as ocp

    shapes: dict[str, tuple[int, ...]] = {}
    logging.getLogger("absl").setLevel(logging.ERROR)
    with contextlib.suppress(Exception):  # of many kinds, where it is damaged
        with ocp.PyTreeCheckpointer() as reader:
            found: Any = reader.metadata(state).item_metadata
        for path, leaf in jax.tree_util.tree_leaves_with_path(found.tree["params"]):
            shapes[jax.tree_util.keystr(path)] = tuple(leaf.shape)
    return shapes
