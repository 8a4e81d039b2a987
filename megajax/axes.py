"""The axes of the device mesh: the one table of their order and their roles. No JAX.

A further axis is a line here and a field of `MeshConfig` (docs/extending.md). Everything else asks for a role.
"""

from typing import Literal

Role = Literal["rows", "tokens", "sequence", "weights"]

PIPE, TENSOR = "pipe", "tensor"

# What each axis divides. The outermost axis of the devices comes first: as in Megatron-LM a group of the innermost axis
# sits on neighbouring devices (one server), and the members of an outermost one are the farthest apart.
_ROLES: dict[str, set[Role]] = {
    PIPE: {"weights"},  # layers
    "data": {"rows"},  # of a batch
    TENSOR: {"weights", "sequence"},  # each layer, and with `--sequence-parallel` the tokens between its regions
}


def _having(*roles: Role) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if _ROLES[axis] & {*roles})


DEVICE_ORDER = tuple(_ROLES)
AXES = tuple(sorted(_ROLES, key=lambda axis: "rows" not in _ROLES[axis]))
"""The order of names, those of rows first: (data, pipe, tensor)."""

ROW_AXES = _having("rows")
"""Axes that the rows of a batch are sharded over."""

TOKEN_AXES = _having("tokens")
"""Axes that the tokens of a batch are sharded over."""

BATCH_AXES = _having("rows", "tokens")
"""Both: losses and gradients are sums over them, and ZeRO shards over them."""

SEQUENCE_AXES = _having("sequence")
"""Axes that the tokens of activations between tensor-parallel regions are sharded over, with `--sequence-parallel`."""

WEIGHT_AXES = _having("weights")
"""Axes that the weights are sharded over, with or without ZeRO."""
