"""The axes of the device mesh: the one table of their order and roles. No JAX here.

To add an axis, add a line here and a field to `MeshConfig` (docs/extending.md). All other code asks for roles.
"""

from typing import Literal

Role = Literal["rows", "tokens", "sequence", "weights"]

REPLICA, PIPE, EXPERT, CONTEXT, TENSOR = "replica", "pipe", "expert", "context", "tensor"

# What each axis divides. Outermost first in the order of devices: as in Megatron-LM, a group of the innermost axis sits
# on neighbouring devices (one server), and a group of the outermost axis is spread the farthest.
_ROLES: dict[str, set[Role]] = {
    PIPE: {"weights"},  # layers
    REPLICA: {"rows"},  # of a batch; the devices of `--mesh.data` that ZeRO does not shard over
    "data": {"rows"},  # of a batch
    EXPERT: {"rows"},  # of a batch, and the experts
    CONTEXT: {"tokens"},  # of every sequence, from the embedding to the loss
    TENSOR: {"weights", "sequence"},  # each layer, and with `--sequence-parallel` the tokens between its regions
}


def _having(*roles: Role) -> tuple[str, ...]:
    return tuple(axis for axis in MESH_AXES if _ROLES[axis] & {*roles})


DEVICE_ORDER = tuple(_ROLES)
MESH_AXES = tuple(sorted(_ROLES, key=lambda axis: "rows" not in _ROLES[axis]))  # of a device mesh
AXES = tuple(axis for axis in MESH_AXES if axis != REPLICA)  # with a flag: data, expert, pipe, context, tensor

# Axes that shard:
ROW_AXES = _having("rows")  # the rows of a batch
BATCH_AXES = _having("rows", "tokens")  # rows or tokens: losses and gradients sum over these
ZERO_AXES = tuple(axis for axis in BATCH_AXES if axis != REPLICA)  # with ZeRO, the state
SEQUENCE_AXES = _having("sequence")  # with `--sequence-parallel`, the tokens between tensor-parallel regions
WEIGHT_AXES = _having("weights")  # the weights, with or without ZeRO
OPTIONAL_AXES = (EXPERT, CONTEXT)  # not mentioned if they have size 1
