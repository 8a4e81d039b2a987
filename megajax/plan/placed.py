"""A weight on a mesh, and its float8 copies, as plain shapes."""

from dataclasses import dataclass
from math import prod

from jax.sharding import PartitionSpec

from megajax.core.models.router import ROUTER_BIAS
from megajax.core.parallel.collectives import entry_axes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelWeight:
    """A weight of a model, on no mesh."""

    path: tuple[str, ...]  # its name, from `shared`, those of the ends, or `blocks`, those of the layers
    shape: Shape  # of all of it; of a layer's, in one layer
    logical: PartitionSpec  # the names of its dims (`megajax/core/mesh.py`)
    stacked: bool  # whether it is a layer's
    of_product: bool  # whose gradient can be deferred

    def item(self, computed: int, main: int) -> int:
        """Bytes of a number of the weight that layers compute with, given those of most weights and of main ones."""
        return main if self.path == ROUTER_BIAS else computed


@dataclass(frozen=True)
class ShardedWeight:
    """A weight on a mesh."""

    weight: ModelWeight  # which
    spec: PartitionSpec  # mesh axes of its dims, without ZeRO and the dims that pipelined layers have before them
    whole: Shape  # shape on a device without ZeRO; of a layer's, in one layer
    batch_axes: tuple[str, ...]  # those that divide a batch and not the weight: its gradients are summed over them
    data_dim: int | None  # the dim of `whole` that ZeRO divides over these; None where it divides none
    shard: Shape  # shape on a device where it is divided; `whole` where it cannot be
    copies: int  # layers that a device has room for: chunks x layers of a chunk, padded ones included; 1 of the ends
    needs_tensor_sum: bool  # see `mesh.needs_tensor_sum`


@dataclass(frozen=True)
class ShardedCopies:
    """The float8 copies of a layer's weight [*stacked, *K, *M] on a mesh (`core/parallel/float8.py`)."""

    placed: ShardedWeight  # the weight
    rows: int  # number of dims in K
    columns: int  # number of dims in M
    divided: bool  # whether ZeRO-3 shards them
    item: int  # bytes of a number

    @property
    def shape(self) -> Shape:
        """On a device."""
        return self.placed.shard if self.divided else self.placed.whole

    @property
    def stacked(self) -> int:
        """Dims before K and M."""
        return len(self.shape) - self.rows - self.columns

    def forward(self, sizes: Shape) -> tuple[Shape, Shape]:
        """`sizes`, one entry for each dim of the weight, in the order of the forward copy and in that of its scales."""
        inner = self.stacked + self.rows
        scale = (*sizes[: self.stacked], *sizes[inner:])
        return (*scale, *sizes[self.stacked : inner]), scale

    def backward(self, sizes: Shape) -> tuple[Shape, Shape]:
        """The same for the backward copy."""
        return sizes, sizes[: self.stacked + self.rows]

    @property
    def num_bytes(self) -> int:
        """Bytes of both copies with their scales."""
        pairs = [self.forward(self.shape), self.backward(self.shape)]
        return sum(self.item * prod(values) + 4 * prod(scale) for values, scale in pairs)

    @property
    def gathered(self) -> list[tuple[Shape, int]]:
        """Shapes, and bytes of a number, of what ZeRO-3 gathers: both copies, and their scales if these are sharded."""
        found = []
        for order in (self.forward, self.backward):
            (values, scale), (_, whole) = order(self.shape), order(self.placed.whole)
            found += [(values, self.item), *([(scale, 4)] if scale != whole else [])]
        return found

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The mesh axes that shard K and M."""
        spec = self.placed.spec
        entries = [{*entry_axes(entry)} for entry in (*spec, *[None] * (len(self.shape) - len(spec)))]
        if self.divided and self.placed.data_dim is not None:
            entries[self.placed.data_dim] |= {*self.placed.batch_axes}
        inner = self.stacked + self.rows
        sides = entries[self.stacked : inner], entries[inner:]
        rows, columns = (tuple(sorted(set().union(*side))) for side in sides)
        return rows, columns
