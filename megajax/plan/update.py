"""Muon's update of layer matrices: what a device computes and sends for it, by arithmetic on shapes
(`core/optim/muon.py`)."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from megajax.core.axes import AXES
from megajax.core.mesh import matrix_dims, unused_batch_axes
from megajax.core.parallel.collectives import PIPE, entry_axes
from megajax.plan.placed import Shape, ShardedWeight
from megajax.plan.sizes import Sizes

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Dealt:
    """Matrices on a stage that are orthogonalized together.

    Attributes:
        rows, columns: of one matrix, with no more rows than columns.
        shard: shape of a device's shard of each.
        owners: mesh axes of the devices that hold a matrix together.
        copied_over: mesh axes over which matrices are replicated.
        filled: number of matrices, including zero ones that make all shares equal.
        devices, num_owners: devices that share the work, and those that hold a matrix together.
    """

    rows: int
    columns: int
    shard: Shape
    owners: Axes
    copied_over: Axes
    filled: int
    devices: int
    num_owners: int

    @property
    def share(self) -> int:
        """Matrices per device."""
        return self.filled // self.devices

    @property
    def operand(self) -> Shape:
        """Shape of what a device exchanges in either direction, and of what it gathers if there are copies."""
        return (self.share * self.num_owners, *self.shard)

    def flops(self, steps: int) -> int:
        """FLOPs of a device's share."""
        return steps * self.share * 2 * self.rows**2 * (2 * self.columns + self.rows)


def matrices_of(sizes: Sizes) -> list[ShardedWeight]:
    """The weights that Muon updates."""
    trained = sizes.held.trained if sizes.config.optimizer.name == "muon" else ()
    return [placed for placed in trained if placed.weight.stacked and matrix_dims(placed.weight.logical)]


def dealt(sizes: Sizes) -> list[Dealt]:
    """All matrices that Muon updates, grouped by shape and sharding."""
    mesh, found = sizes.config.mesh, Counter[tuple]()
    for placed in matrices_of(sizes):
        divided = sizes.zero > 0 and placed.data_dim is not None
        shape, whole = placed.shard if divided else placed.whole, placed.weight.shape
        entries = [entry_axes(entry) for entry in placed.spec]
        if divided:
            assert placed.data_dim is not None
            entries[placed.data_dim] += unused_batch_axes(placed.spec)
        rows, columns = matrix_dims(placed.weight.logical) or (0, 0)
        sides = slice(-rows - columns, -columns), slice(-columns, None)
        axes = tuple(tuple(axis for entry in entries[side] for axis in entry) for side in sides)
        numbers, local = (tuple(prod(dims[side]) for side in sides) for dims in (whole, shape))
        used = {PIPE, *(axis for entry in entries for axis in entry)}
        copied = tuple(axis for axis in AXES if axis not in used)
        kind = min((numbers, axes, local), (numbers[::-1], axes[::-1], local[::-1]))
        found[*kind, copied] += placed.copies * prod(shape[: -rows - columns])

    def alike(kind: tuple, number: int) -> Dealt:
        (rows, columns), axes, shard, copied = kind
        owners = sum(axes, ())
        devices = mesh.size_of(owners + copied)
        filled = -(-number // devices) * devices
        return Dealt(rows, columns, shard, owners, copied, filled, devices, mesh.size_of(owners))

    return [alike(kind, number) for kind, number in found.items()]
