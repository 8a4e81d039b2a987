"""What a layer and the ends of a model keep, compute and send on a device, for any number of rows: the findings of
`plan/traced.py`."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from megajax.plan.placed import Shape


@dataclass(frozen=True)
class Rows:
    """The rows of a traced microbatch, and what experts without a capacity make of them: blocks of rows
    (`parallel/grouped.py`), traced with one row each."""

    count: int
    blocked: int = 0  # the rows of all blocks; 0: there are no blocks
    experts: int = 0  # of a device, each with a block that need not be full
    block: int = 0  # rows of a block where nothing is traced
    chosen: int = 0  # experts that the tokens of one row choose on a device


@dataclass(frozen=True)
class Dims:
    """The shape of an array, of one row; which dims count rows, and what they have whatever the rows are."""

    of_row: Shape
    counting: tuple[bool, ...]
    added: Shape

    @classmethod
    def at(cls, shape: Shape, rows: Rows) -> "Dims":
        """The dims of an array that has this shape where it is traced."""
        blocked = [dim == rows.blocked > 0 for dim in shape]
        counting = tuple(own or (dim > 0 and dim % rows.count == 0) for dim, own in zip(shape, blocked, strict=True))
        return cls(
            tuple(dim // rows.count if counts else dim for dim, counts in zip(shape, counting, strict=True)),
            counting,
            tuple(own * rows.experts * rows.block for own in blocked),
        )

    def shape(self, rows: int) -> Shape:
        """The shape with so many rows."""
        dims = zip(self.of_row, self.counting, self.added, strict=True)
        return tuple(dim * rows + added if counts else dim for dim, counts, added in dims)


@dataclass(frozen=True)
class Operand:
    """An array that is kept or sent, with `item` bytes for a number."""

    dims: Dims
    item: int

    def num_bytes(self, rows: int) -> int:
        """With so many rows."""
        return self.item * prod(self.dims.shape(rows))


@dataclass(frozen=True)
class Kept:
    """Arrays that are kept."""

    operands: tuple[Operand, ...]

    def num_bytes(self, rows: int) -> int:
        """Of a microbatch of so many rows."""
        one, two = self._of_one_and_two
        return one + (rows - 1) * (two - one)

    def largest(self, rows: int) -> int:
        """Bytes of the largest one."""
        return max(operand.num_bytes(rows) for operand in self.operands)

    @cached_property
    def _of_one_and_two(self) -> tuple[int, int]:
        one, two = (sum(operand.num_bytes(rows) for operand in self.operands) for rows in (1, 2))
        return one, two


@dataclass(frozen=True)
class Sent:
    """A collective of one operand, see `program/communication.Collective`."""

    kind: str
    axes: tuple[str, ...]
    operand: Operand
    count: int


@dataclass(frozen=True)
class Product:
    """A matrix product, or several with the same left operand, side by side."""

    dims: Dims  # [rows, inner, columns]
    again: bool = False  # the backward pass computes it again
    experts: int = 0  # among which the rows are divided, each with its weight; 0: all have the same


@dataclass(frozen=True)
class Region:
    """The products with weights between two boundaries of a layer, as in the paper two: by columns, by rows; those of
    experts apart."""

    products: tuple[Product, ...]  # in their order
    attends: bool  # whether attention stands between them


@dataclass(frozen=True)
class LayerCost:
    """One layer, and what its three passes send."""

    residuals: Kept  # until the backward pass, each array once
    factors: Kept  # until deferred weight gradients are computed
    regions: tuple[Region, ...]  # what the forward pass computes
    fused: bool  # whether attention is one kernel that keeps no scores
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]
    weight_gradients: tuple[Sent, ...]

    @property
    def products(self) -> tuple[Product, ...]:
        """Those of all regions."""
        return tuple(product for region in self.regions for product in region.products)


@dataclass(frozen=True)
class EndsCost:
    """Embedding and head, and what the three passes send; that of the head goes forward and backward."""

    products: tuple[Dims, ...]  # of the head, forward and backward: rows, inner dim and columns
    embedding: tuple[Sent, ...]
    head: tuple[Sent, ...]
    embedding_backward: tuple[Sent, ...]

    @property
    def logits(self) -> Dims:
        """[rows, columns] of the largest product forward."""
        of_rows = [dims for dims in self.products if dims.counting[0]]
        largest = max(of_rows, key=lambda dims: dims.of_row[1] * dims.of_row[2])  # of equal ones the first, forward
        return Dims(largest.of_row[::2], largest.counting[::2], largest.added[::2])


@dataclass(frozen=True)
class StepCost:
    """What is traced of a configuration: a layer, one that recomputes nothing, and the ends."""

    layer: LayerCost
    without_remat: LayerCost
    ends: EndsCost
