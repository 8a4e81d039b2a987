"""A model cut at its stage boundaries: into the ends (embedding, head, everything that is not a layer) and the stacked
layers, as functions of their weights.
Letters: B batch, T tokens, D model.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.backend import CPU, Backend
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.family import Batch, family_of
from megajax.core.models.lora_config import LoraConfig
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.float8 import FLOAT8
from megajax.core.parallel.products import Pair
from megajax.core.parallel.random import Dropout, NamedKey
from megajax.core.trees import Path, Tree


class StagedLayers:
    """The layers of one kind as functions of their weights."""

    def __init__(self, graph: nnx.GraphDef, shapes: Tree, lora: LoraConfig | None):
        self._graph, self._lora = graph, lora
        block = nnx.merge(graph, shapes)
        params = ((path, node) for path, node in nnx.iter_graph(block) if isinstance(node, nnx.Param))
        paths = {id(node): tuple(map(str, path)) for path, node in params}
        self._products = {
            name: [paths[id(linear.weight)] for linear in linears] for name, linears in block.products.items()
        }

    def block(self, weights: Tree) -> Any:
        """One layer; `weights` have no leading dim and may include LoRA adapters (`models/lora.py`) and float8 copies
        (`parallel/float8.py`)."""
        flat = flatten_dict(weights)
        copies = {path[:-1]: flat.pop(path) for path in list(flat) if path[-1] == FLOAT8}
        block = self._adapted(flat) if self._lora else nnx.merge(self._graph, unflatten_dict(flat))
        for name, paths in self._products.items() if copies else ():
            for linear, (*path, _) in zip(block.products[name], paths, strict=True):
                linear.use_float8(copies[*path,])
        return block

    def _adapted(self, flat: dict[Path, Any]) -> Any:
        assert self._lora is not None
        adapters = {path: flat.pop(path) for path in list(flat) if path[-1] in ("a", "b")}
        block = nnx.merge(self._graph, unflatten_dict(flat))
        for name, paths in self._products.items():
            for linear, (*path, _) in zip(block.products[name], paths, strict=True):
                pair = [adapters[*path, matrix] for matrix in ("a", "b") if (*path, matrix) in adapters]
                linear.freeze(self._lora.alpha / self._lora.rank, *pair)
        return block

    @property
    def products(self) -> frozenset[Path]:
        """Paths of the weights in a layer's products."""
        return frozenset(path for paths in self._products.values() for path in paths)

    def factors(self, weights: Tree, x_BTD: Array, context: Context) -> dict[str, Pair]:
        """Arrays with the types of the factors of a layer's products, by name; to be evaluated abstractly."""
        recorded: dict[str, Pair] = {}
        self.block(weights)(x_BTD, dataclasses.replace(context, factors=recorded), jnp.zeros((), jnp.int32))
        return recorded

    def weight_gradients(self, weights: Tree, factors: dict[str, Pair]) -> dict[Path, Array]:
        """The gradients of the weights in a layer's products; only the types of `weights` matter."""
        products = self.block(weights).products
        gradients: dict[Path, Array] = {}
        for name, paths in self._products.items():
            linears = products[name]
            gradients |= zip(paths, type(linears[0]).weight_gradients(factors[name], linears), strict=True)
        return gradients


class StagedModel:
    """A model as functions of its weights, which are nested dicts: `shared`, the weights of the ends, which the first
    and the last stage use, and `blocks`, the stacked weights of the layers.

    Attributes:
        boundary: the boundary of its tensor-parallel regions.
        linear_embedding: see `Family`.
        shapes: `{"shared": …, "blocks": …}` of `ShapeDtypeStruct`, layers `[L, …]`.
        layers: those of every kind (`ModelConfig.kinds`).
        logical_specs: the same tree with a `PartitionSpec` of logical dim names for every weight.
        norms: the paths of the weights in norms that `model.norm` names.
    """

    def __init__(
        self,
        config: ModelConfig,
        boundary: RegionBoundary,
        backend: Backend,
        lora: LoraConfig | None = None,
        loss: Callable[[Any], Any] | None = None,
    ):
        """If `lora` has a rank, layers may have adapters, and the weights of their products are frozen. `loss` gives
        the ends another one (`models/own_loss.py`)."""
        family = family_of(config)
        self.config, self._lora = config, lora if lora is not None and lora.rank else None
        self.boundary, self.linear_embedding = boundary, family.linear_embedding(config)
        self._loss = loss
        self._new = lambda key: family.model(config, key, boundary, backend)
        x64 = jax.config.read("jax_enable_x64")
        self._ends, graphs, weights = _abstract(family.model, config, boundary, backend, x64)
        self.shapes = nnx.to_pure_dict(weights)
        self.norms = {path for path, weight in nnx.to_flat_state(weights) if weight.get_metadata().get("of_norm")}
        self.layers = {
            kind: StagedLayers(graph, of_kind(self.shapes["blocks"], kind), self._lora)
            for kind, graph in graphs.items()
        }
        self.logical_specs = nnx.to_pure_dict(nnx.get_partition_spec(weights))

    def init(self, seed: int) -> Tree:
        """Fresh weights in fp32, layers `[L, …]`. Each is drawn from a key with its own name: the same on any mesh."""
        return nnx.to_pure_dict(_cut(self._new(NamedKey.from_seed(seed)), self.layers)[2])

    def ends(self, shared: Tree) -> Any:
        """The model without its layers, on which to call `embed`, `losses`, …."""
        ends = nnx.merge(self._ends, shared)
        if self._lora and self.config.num_predicting:
            ends.prediction.freeze()
        return self._loss(ends) if self._loss else ends

    @property
    def products(self) -> frozenset[Path]:
        """Paths of the weights in the layers' products, among those of `blocks`."""
        paths = ((kind, path) for kind, layers in self.layers.items() for path in layers.products)
        return frozenset((kind, *path) if kind else path for kind, path in paths)

    def predictions(
        self, shared: Tree, x_BTD: Array, batch: Batch, context: Context
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """See `FamilyModel.predictions`; empty without modules."""
        return self.ends(shared).predictions(x_BTD, batch, context) if self.config.num_predicting else ({}, {})

    def context(self, batch: Batch, dropout: Dropout) -> Context:
        """See `FamilyModel.context`."""
        return self.ends(self.shapes["shared"]).context(batch, dropout)


def count_parameters(config: ModelConfig) -> int:
    """Number of weights, including the padding of the vocabulary."""
    return sum(size for size, _ in _weights(config))


def count_active_parameters(config: ModelConfig) -> int:
    """Number of weights that a token uses: all except those of the experts that it does not choose."""
    chosen, experts = config.experts_per_token, config.num_experts
    return sum(size * chosen // experts if "experts" in dims else size for size, dims in _weights(config))


def _weights(config: ModelConfig) -> Iterator[tuple[int, PartitionSpec]]:
    """Size and logical dim names of every weight."""
    model = StagedModel(config, RegionBoundary(), CPU)  # the same on all backends
    sizes = [leaf.size for leaf in jax.tree.leaves(model.shapes)]
    return zip(sizes, jax.tree.leaves(model.logical_specs), strict=True)


@lru_cache(maxsize=256)
def _abstract(
    model: Callable, config: ModelConfig, boundary: RegionBoundary, backend: Backend, x64: bool
) -> tuple[nnx.GraphDef, dict[str, nnx.GraphDef], nnx.State]:
    """The parts of a model, with shapes in place of weights; `x64` is whether JAX's default dtypes have 64 bits."""
    whole = nnx.eval_shape(lambda: model(config, NamedKey.from_seed(0), boundary, backend))
    return _cut(whole, config.kinds)


def _cut(model: Any, kinds: Iterable[str]) -> tuple[nnx.GraphDef, dict[str, nnx.GraphDef], nnx.State]:
    """Take out the layers: graph of the ends, graphs of the layers of every kind, and the weights of all by name."""
    blocks = model.blocks
    del model.blocks
    ends_graph, shared = nnx.split(model, nnx.Param)
    graphs = {kind: nnx.split(getattr(blocks, kind) if kind else blocks, nnx.Param)[0] for kind in kinds}
    stacked = nnx.split(blocks, nnx.Param)[1]
    return ends_graph, graphs, nnx.State({"shared": shared, "blocks": stacked})


def of_kind(blocks: Tree, kind: str) -> Tree:
    """What layers of a kind have in a tree of all."""
    return blocks[kind] if kind else blocks
