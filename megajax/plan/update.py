"""Muon's update of layer matrices: what a device computes and sends for it, by arithmetic on shapes
(`core/optim/muon.py`)."""

from collections import Counter
from dataclasses import dataclass
from math import prod

from megajax.core.program.weight import Shape, Weight
from megajax.plan.sizes import Sizes


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
    owners: tuple[str, ...]
    copied_over: tuple[str, ...]
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


def matrices_of(sizes: Sizes) -> list[Weight]:
    """The weights that Muon updates."""
    trained = sizes.held.trained if sizes.config.optimizer.name == "muon" else ()
    return [weight for weight in trained if weight.matrices]


def dealt(sizes: Sizes) -> list[Dealt]:
    """All matrices that Muon updates, grouped by shape and sharding."""
    mesh, counts = sizes.config.mesh, Counter[tuple]()
    for weight in matrices_of(sizes):
        matrices, local = weight.matrices, weight.stage_shape(weight.owned)
        assert matrices is not None
        sides = slice(-matrices.rows - matrices.columns, -matrices.columns), slice(-matrices.columns, None)
        axes = matrices.row_axes, matrices.column_axes
        joined = () if matrices.rows else (matrices.num_rows, matrices.num_columns)
        whole = weight.owned.padded_shape(weight.shape)
        numbers, shard = (tuple(prod(dims[side]) for side in sides) for dims in (whole, local))
        kind = min((numbers, axes, shard), (numbers[::-1], axes[::-1], shard[::-1]))
        counts[*kind, mesh.there(matrices.copied_over), joined] += prod(local[: -matrices.rows - matrices.columns])

    def alike(kind: tuple, count: int) -> Dealt:
        numbers, axes, shard, copied, joined = kind
        rows, columns = sorted(joined or numbers)
        owners = sum(axes, ())
        devices = mesh.size_of(owners + copied)
        filled = -(-count // devices) * devices
        return Dealt(rows, columns, shard, owners, copied, filled, devices, mesh.size_of(owners))

    return [alike(kind, count) for kind, count in counts.items()]
