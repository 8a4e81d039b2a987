"""What a layer and the ends of a model keep, compute and send on a device, for any number of rows: the findings of
`plan/traced.py`."""

from dataclasses import dataclass
from functools import cached_property
from math import prod

from megajax.program.communication import Collective

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Dims:
    """The shape of an array, of one row; and which dims count rows."""

    of_row: Shape
    counting: tuple[bool, ...]

    @classmethod
    def at(cls, shape: Shape, rows: int) -> "Dims":
        """The dims of an array that has this shape with so many rows."""
        counting = tuple(dim > 0 and dim % rows == 0 for dim in shape)
        return cls(tuple(dim // rows if counts else dim for dim, counts in zip(shape, counting, strict=True)), counting)

    def shape(self, rows: int) -> Shape:
        """The shape with so many rows."""
        return tuple(dim * rows if counts else dim for dim, counts in zip(self.of_row, self.counting, strict=True))


@dataclass(frozen=True)
class Operand:
    """An array that is kept or sent.

    Attributes:
        dims: its shape.
        item: bytes of a number.
    """

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
    """A collective, see `program/communication.Collective`."""

    kind: str
    axes: tuple[str, ...]
    operand: Operand
    count: int

    def collective(self, rows: int) -> Collective:
        """With so many rows."""
        return Collective(
            self.kind, self.axes, (self.operand.dims.shape(rows),), self.operand.num_bytes(rows), self.count
        )


@dataclass(frozen=True)
class Product:
    """A matrix product, or several with the same left operand, side by side.

    Attributes:
        dims: [rows, inner, columns].
        again: the backward pass computes it again.
    """

    dims: Dims
    again: bool = False

    def shape(self, rows: int) -> tuple[int, int, int]:
        """Rows, inner dim and columns, with so many rows of a microbatch."""
        first, inner, columns = self.dims.shape(rows)
        return first, inner, columns


@dataclass(frozen=True)
class Region:
    """The products with weights between two boundaries of a layer, as in the paper two: by columns, by rows.

    Attributes:
        products: in their order.
        attends: whether attention stands between them.
    """

    products: tuple[Product, ...]
    attends: bool


@dataclass(frozen=True)
class LayerCost:
    """One layer.

    Attributes:
        residuals: what is kept until the backward pass, each array once.
        factors: what is kept until deferred weight gradients are computed.
        regions: what the forward pass computes.
        fused: whether attention is one kernel that keeps no scores.
        forward, backward, weight_gradients: what the three passes send.
    """

    residuals: Kept
    factors: Kept
    regions: tuple[Region, ...]
    fused: bool
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]
    weight_gradients: tuple[Sent, ...]

    @property
    def products(self) -> tuple[Product, ...]:
        """Those of all regions."""
        return tuple(product for region in self.regions for product in region.products)


@dataclass(frozen=True)
class EndsCost:
    """Embedding and head.

    Attributes:
        products: of the head, forward and backward.
        embedding, head, embedding_backward: what the three passes send; that of the head goes forward and backward.
    """

    products: tuple[Product, ...]
    embedding: tuple[Sent, ...]
    head: tuple[Sent, ...]
    embedding_backward: tuple[Sent, ...]

    @property
    def weight_gradients(self) -> tuple[Dims, ...]:
        """The products that sum over rows."""
        return tuple(each.dims for each in self.products if each.dims.counting[1])

    @property
    def logits(self) -> Dims:
        """[rows, columns] of the largest product forward."""
        of_rows = [each.dims for each in self.products if each.dims.counting[0]]
        largest = max(of_rows, key=lambda dims: dims.of_row[1] * dims.of_row[2])  # of equal ones the first, forward
        return Dims(largest.of_row[::2], largest.counting[::2])


@dataclass(frozen=True)
class StepCost:
    """What is traced of a configuration.

    Attributes:
        layer, without_remat: a layer, and one that recomputes nothing.
        ends: embedding and head.
    """

    layer: LayerCost
    without_remat: LayerCost
    ends: EndsCost

    @property
    def recomputes_cheaply(self) -> bool:
        """Whether neither a product nor a collective is computed again."""
        layer, plain = self.layer, self.without_remat
        return (layer.regions, layer.backward) == (plain.regions, plain.backward)
