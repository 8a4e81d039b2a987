"""Whether a checkpoint is of the model that a configuration describes: if not, it is not damaged, but another's."""

import contextlib
import logging
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from megajax.backend import CPU
from megajax.errors import UserError
from megajax.models.config import ModelConfig
from megajax.models.family import CutModel
from megajax.parallel.boundary import RegionBoundary

_KEYS = {  # logical dim -> what decides its size, what explains most first
    "layers": "model.num_layers",
    "embed": "model.hidden_size",
    "heads": "model.num_heads",
    "kv_heads": "model.num_kv_heads",
    "head_size": "model.head_size",
    "mlp": "model.mlp_size",
    "position": "model.sequence_length",
    "vocabulary": "model.vocab_size, padded to a multiple of model.vocab_multiple,",
}


def check_fits(checkpoint: Path, model: ModelConfig) -> None:
    """Refuse a configuration of another model than the checkpoint's; called when the checkpoint could not be read.

    Raises:
        UserError: a size is another; the message names the key and both sizes.
    """
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
    for dim, key in _KEYS.items():
        if dim in sizes:
            wanted, size = sizes[dim]
            file = checkpoint.parents[1] / "config.toml"
            raise UserError(f"{file}: {key} is {wanted}; valid: {size}, as in the weights of {checkpoint}")


def _stored_shapes(state: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in a checkpoint, by their places; none if it does not tell."""
    import orbax.checkpoint as ocp

    shapes: dict[str, tuple[int, ...]] = {}
    logging.getLogger("absl").setLevel(logging.ERROR)
    with contextlib.suppress(Exception):  # of many kinds, where it is damaged
        with ocp.PyTreeCheckpointer() as reader:
            found: Any = reader.metadata(state).item_metadata
        for path, leaf in jax.tree_util.tree_leaves_with_path(found.tree["params"]):
            shapes[jax.tree_util.keystr(path)] = tuple(leaf.shape)
    return shapes
