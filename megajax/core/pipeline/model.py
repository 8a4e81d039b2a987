"""What the pipeline's loop is given: a model, cut at its stage boundaries, in one step."""

from collections.abc import Callable
from typing import Any, Protocol

from jax import Array

from megajax.core.trees import Path, Tree

Batch = dict[str, Array]  # some rows
Factors = Tree  # of all products in a layer, or stacked for several layers
Figures = dict[str, Array]  # summed, not differentiated


class LoopModel(Protocol):
    """Functions of this device's weights, called inside the `shard_map` region."""

    @property
    def counts(self) -> dict[str, Array]:
        """By name, how many targets the global batch has, and whatever else is counted in it."""

    def context(self, batch: Batch, row_B: Array) -> Tree:
        """What every layer receives for these rows, whose numbers in the global batch are `row_B`."""

    def embed(self, shared: Tree, batch: Batch, context: Tree) -> Array:
        """The input of the first virtual stage."""

    def layer(
        self, weights: Tree, factors: Factors, layer: Array, x_BTD: Array, context: Tree
    ) -> tuple[Array, Figures]:
        """The output and the figures of the layer with this number. The gradients of dummy `factors` are the factors of
        deferred weight gradients."""

    def head(self, shared: Tree, x_BTD: Array, batch: Batch, context: Tree) -> tuple[dict[str, Array], Figures]:
        """Losses and measures by name, each divided by the number of its targets in the step, scalars; and the figures
        of layers that the head has, if it has some."""

    def with_ends(self, function: Callable, shared: Tree, *args: Any, columns: bool = False) -> Tree:
        """The result of `function` of the ends and further arguments, alike on all devices of a tensor group, or an
        array whose last dim is this device's `columns` of the vocabulary."""


class Products(Protocol):
    """The products of a layer (`models/staged.StagedModel`), whose weight gradients can be deferred."""

    @property
    def products(self) -> frozenset[Path]:
        """Paths of their weights in the layer's weights."""

    def factors(self, weights: Tree, x_BTD: Array, context: Tree) -> Factors:
        """Arrays with the types of their factors; evaluated abstractly."""

    def weight_gradients(self, weights: Tree, factors: Factors) -> dict[Path, Array]:
        """The gradients of their weights; only the types of `weights` matter."""
