"""The axes of the device mesh: the one table of their order and their roles. No JAX.

A further axis is a line here and a field of `MeshConfig` (docs/extending.md). Everything else asks for a role.
"""

from typing import Literal

Role = Literal["rows", "tokens", "sequence", "weights"]

PIPE, EXPERT, CONTEXT, TENSOR = "pipe", "expert", "context", "tensor"

# What each axis divides. The outermost axis of the devices comes first: as in Megatron-LM a group of the innermost axis
# sits on neighbouring devices (one server), and the members of an outermost one are the farthest apart.
_ROLES: dict[str, set[Role]] = {
    PIPE: {"weights"},  # layers
    "data": {"rows"},  # of a batch
    EXPERT: {"rows"},  # of a batch, and the experts
    CONTEXT: {"tokens"},  # of every sequence, from the embedding to the loss
    TENSOR: {"weights", "sequence"},  # each layer, and with `--sequence-parallel` the tokens between its regions
}


def _having(*roles: Role) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if _ROLES[axis] & {*roles})


DEVICE_ORDER = tuple(_ROLES)
AXES = tuple(sorted(_ROLES, key=lambda axis: "rows" not in _ROLES[axis]))  # data, expert, pipe, context, tensor

# Axes that are sharded over:
ROW_AXES = _having("rows")  # the rows of a batch
BATCH_AXES = _having("rows", "tokens")  # or its tokens: losses and gradients are sums over them, ZeRO shards over them
SEQUENCE_AXES = _having("sequence")  # with `--sequence-parallel` the tokens between tensor-parallel regions
WEIGHT_AXES = _having("weights")  # the weights, with or without ZeRO
OPTIONAL_AXES = (EXPERT, CONTEXT)  # not spoken of where they have size 1
