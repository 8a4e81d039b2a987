"""A step's model and weights in parts (`parallel/fixed_tree.py`)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array

from megajax.core.mesh import RULES, in_region
from megajax.core.models.context import Context
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.collectives import TENSOR, axis_index
from megajax.core.parallel.fixed_tree import Form, in_parts
from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.buffers import idle
from megajax.core.pipeline.model import Batch, Factors, Figures, LoopModel
from megajax.core.program.weight import Weight
from megajax.core.trees import Path, Tree


def form_of(weight: Weight) -> Form:
    """The form of a weight."""
    for dim, name in enumerate(weight.logical):
        if RULES.get(name) == TENSOR:
            return Form(True, dim, weight.shape[dim], weight.whole[dim])
    return Form(in_region(weight.logical))


@dataclass(frozen=True)
class ShardsInParts(Shards):
    """Shards of weights that functions are mapped over in parts."""

    forms: Tree
    parts: int
    count: int

    def gather(self, shards: Tree, *, invariant: bool = False) -> Tree:
        return self._in_forms(Form.divided, super().gather(shards, invariant=invariant))

    def some(self, paths: Any, first: str) -> "ShardsInParts":
        forms = {(first, *path): form for path, form in flatten_dict(self.forms).items()}
        forms = {path: forms.get(path, Form(mapped=False)) for path in paths}
        return ShardsInParts(super().some(paths, first).shardings, forms, self.parts, self.count)

    def scatter(self, grads: Tree) -> Tree:
        return super().scatter(self._in_forms(Form.joined, grads))

    def _in_forms(self, function: Callable, arrays: Tree) -> Tree:
        size, rank = (self.parts, self.count), axis_index(TENSOR)
        return jax.tree.map(lambda x, form: function(form, x, *size, rank), arrays, self.forms)


@dataclass(frozen=True)
class ModelInParts:
    """Functions of a step's model (`pipeline.model.LoopModel`), mapped over parts of its weights, and those of its
    layers' products."""

    model: LoopModel
    staged: StagedModel
    count: int
    forms: Tree  # of all weights
    kind: str = ""  # of the layers

    @property
    def counts(self) -> dict[str, Array]:
        return self.model.counts

    def context(self, batch: Batch, row_B: Array) -> Context:
        return self.model.context(batch, row_B)

    @property
    def _tokens(self) -> int | None:
        """The dim of an activation between regions whose parts are mapped over, with sequence parallelism."""
        return self.staged.boundary.split

    def _apart(self, x_BTD: Array) -> Array:
        """An activation between regions as what is mapped over."""
        return x_BTD if self._tokens is None else jnp.stack(jnp.split(x_BTD, self.count, self._tokens), self._tokens)

    def _joined(self, x_BTD: Array) -> Array:
        """The inverse."""
        return x_BTD if self._tokens is None else x_BTD.reshape(x_BTD.shape[0], -1, x_BTD.shape[-1])

    def embed(self, shared: Tree, batch: Batch, context: Context) -> Array:
        embed = self._in_parts(self.model.embed, "shared", None, None, out_axes=self._tokens)
        return self._joined(embed(shared, batch, context))

    def layer(
        self, weights: Tree, factors: Factors, layer: Array, x_BTD: Array, context: Context
    ) -> tuple[Array, Figures]:
        axes = 0, None, self._tokens, None
        function = self._in_parts(self.model.layer, "blocks", *axes, out_axes=(self._tokens, None))
        x_BTD, figures = function(weights, factors, layer, self._apart(x_BTD), context)
        return self._joined(x_BTD), figures

    def head(self, shared: Tree, x_BTD: Array, batch: Batch, context: Context) -> tuple[dict[str, Array], Figures]:
        head = self._in_parts(self.model.head, "shared", self._tokens, None, None)
        return head(shared, self._apart(x_BTD), batch, context)

    def with_ends(self, function: Callable, shared: Tree, *args: Any, columns: bool = False) -> Tree:
        axes = (None,) * len(args)
        run = self._in_parts(partial(self.model.with_ends, function), "shared", *axes, out_axes=-2 if columns else None)
        result = run(shared, *args)
        return result.reshape(*result.shape[:-2], -1) if columns else result

    @property
    def products(self) -> frozenset[Path]:
        return self.staged.layers[self.kind].products

    def factors(self, weights: Tree, x_BTD: Array, context: Context) -> Factors:
        factors = self._in_parts(self.staged.layers[self.kind].factors, "blocks", self._tokens, None, out_axes=0)
        return factors(weights, self._apart(x_BTD), context)

    def weight_gradients(self, weights: Tree, factors: Factors) -> dict[Path, Array]:
        forms = flatten_dict(self.forms["blocks"])
        axes = {path: forms[path].axis or 0 for path in self.products}
        gradients = self.staged.layers[self.kind].weight_gradients
        found = self._in_parts(gradients, "blocks", 0, out_axes=axes)(idle(weights), factors)
        return {path: grad if forms[path].mapped else grad[0] for path, grad in found.items()}

    def _in_parts(self, function: Callable, weights: str, *others: int | None, out_axes: Any = None) -> Callable:
        axes = jax.tree.map(lambda form: form.axis, self.forms[weights])
        return in_parts(function, self.count, (axes, *others), out_axes)
