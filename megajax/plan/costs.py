"""What a layer and the ends of a model save, compute and send on a device, for any number of rows: the results of
`plan/traced.py`."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod

from megajax.core.program.weight import Shape


@dataclass(frozen=True)
class Dims:
    """The shape of an array for any number of rows of a microbatch."""

    fixed: Shape  # the part that does not depend on rows
    of_row: Shape  # what each row adds

    def shape(self, rows: int) -> Shape:
        """The shape for this many rows."""
        return tuple(dim + rows * each for dim, each in zip(self.fixed, self.of_row, strict=True))


@dataclass(frozen=True)
class Operand:
    """An array that is saved or sent, with `item` bytes per element."""

    dims: Dims
    item: int

    def num_bytes(self, rows: int) -> int:
        """Its bytes for this many rows."""
        return self.item * prod(self.dims.shape(rows))


@dataclass(frozen=True)
class Kept:
    """Saved arrays."""

    operands: tuple[Operand, ...]

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.operands + other.operands)

    def num_bytes(self, rows: int) -> int:
        """Bytes for a microbatch of this many rows."""
        one, two = self._bytes_by_rows
        return one + (rows - 1) * (two - one)

    @cached_property
    def _bytes_by_rows(self) -> tuple[int, int]:
        one, two = (sum(operand.num_bytes(rows) for operand in self.operands) for rows in (1, 2))
        return one, two


@dataclass(frozen=True)
class Sent:
    """A collective with one operand; see `core/program/communication.Collective`."""

    kind: str
    axes: tuple[str, ...]
    operand: Operand
    count: int


@dataclass(frozen=True)
class Product:
    """A matrix product, or several with the same left operand, concatenated."""

    dims: Dims  # [rows, inner, columns]
    again: bool = False  # recomputed in the backward pass
    experts: int = 0  # number of experts that the rows are divided among, each with its own weight; 0: one weight
    weights: int = 1  # products concatenated


@dataclass(frozen=True)
class Region:
    """The products with weights between two boundaries of a layer: two as in the paper, by columns and by rows; those
    of experts are separate regions."""

    products: tuple[Product, ...]  # in order
    attends: bool  # whether attention is between them


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer, and what its three passes send."""

    residuals: Kept  # saved until the backward pass, each array once
    factors: Kept  # saved until deferred weight gradients are computed
    regions: tuple[Region, ...]  # what the forward pass computes
    fused: bool  # whether attention is one kernel that saves no scores
    forward: tuple[Sent, ...]
    backward: tuple[Sent, ...]
    weight_gradients: tuple[Sent, ...]

    def __add__(self, other: "LayerCost") -> "LayerCost":
        """One layer after the other."""
        return LayerCost(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def products(self) -> tuple[Product, ...]:
        """The products of all regions."""
        return tuple(product for region in self.regions for product in region.products)


@dataclass(frozen=True)
class EndsCost:
    """The costs of embedding and head, and what their three passes send; the head's pass is forward and backward."""

    products: tuple[Dims, ...]  # of the head, forward and backward: rows, inner dim and columns
    embedding: tuple[Sent, ...]
    head: tuple[Sent, ...]
    embedding_backward: tuple[Sent, ...]

    @property
    def logits(self) -> Dims:
        """[rows, columns] of the largest product forward."""
        of_rows = [dims for dims in self.products if dims.of_row[0]]
        largest = max(of_rows, key=lambda dims: dims.fixed[1] * dims.fixed[2])  # in a tie the first, which is forward
        return Dims(largest.fixed[::2], largest.of_row[::2])


@dataclass(frozen=True)
class StepCost:
    """The traced costs of a configuration: by kinds of layers how many slots a period has, a layer, and one without
    recomputation; and the ends."""

    kinds: Mapping[str, tuple[int, LayerCost, LayerCost]]
    ends: EndsCost

    @cached_property
    def layer(self) -> LayerCost:
        """All slots of a period, which is a layer if all are of one kind."""
        return reduce(operator.add, (layer for slots, layer, _ in self.kinds.values() for _ in range(slots)))
