"""What a family of models is: the one interface between models and the code that distributes their layers.

A model is cut at its stage boundaries: into the ends (embedding, head, everything that is not a layer) and the stacked
layers. To add a family, write its `FamilyModel`, declare its batch, count its products, and enter it in
`models/registry.py`.
Letters: B batch, T tokens, D model.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.backend import CPU, Backend
from megajax.core.batch import BatchSpec
from megajax.core.models.attention_mask import AttentionMask
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.lora_config import LoraConfig
from megajax.core.models.registry import FAMILIES
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.float8 import FLOAT8
from megajax.core.parallel.products import FactorProbe, Pair
from megajax.core.parallel.random import Dropout, NamedKey

Tree = Any
Path = tuple[str, ...]  # in nested dicts
Batch = Mapping[str, Array]  # some rows of the arrays in the family's `BatchSpec`
Scores = dict[str, tuple[Array, Array]]


class FamilyModel(Protocol):
    """A model, an `nnx.Module` whose attribute `blocks` holds its stacked layers (`models/layer.py`).

    Besides its output a layer returns figures by name, such as how many tokens it did something with. Step metrics
    hold their sums over layers, microbatches and the mesh axes that the input varies over. They are not differentiated.
    """

    def context(self, batch: Batch, dropout: Dropout) -> Context:
        """What every layer receives for a microbatch besides its input; not differentiated, needs no weights."""
        ...

    def embed(self, batch: Batch, context: Context) -> Array:
        """The input of the first of `blocks`, x_BTD; any function of the weights, possibly with layers of its own."""
        ...

    def embedding(self, batch: Batch, context: Context) -> Array:
        """`embed` without the layers it contains; language models only."""
        ...

    def first_blocks(self) -> Sequence[Any]:
        """The layers that `embed` contains, one by one; language models only."""
        ...

    def losses(self, x_BTD: Array, batch: Batch, context: Context) -> dict[str, Array]:
        """For every loss and measure in the batch's form, its sum over the targets, computed from the last layer's
        output; scalars."""
        ...

    def scores(self, x_BTD: Array, batch: Batch) -> Scores:
        """For every loss by name, two arrays over its targets, [B, …]: the cross-entropy, and 1 or 0 (int32) for
        whether the target is the most probable one. Where the target is `IGNORED` they are 0 and `IGNORED`."""
        ...

    def logits(self, x_BTD: Array) -> Array:
        """This device's columns of the logits; language models only."""
        ...

    def task_logits(self, x_BTD: Array, batch: Batch) -> Array:
        """The logits that answer a task, in at least fp32, identical on all devices: [B, C] for classes, or for texts
        to choose from, or [B, T, 2] for the tokens where a span begins and ends; only models with such a
        head."""
        ...


@dataclass(frozen=True)
class MatrixProduct:
    """`count` batches of products [rows, inner] · [inner, columns] on one device."""

    name: str
    count: int
    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """FLOPs of all of them, counting multiplications and additions separately."""
        return 2 * self.count * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Family:
    """A family of models."""

    model: Callable[
        [ModelConfig, NamedKey, RegionBoundary, Backend], Any
    ]  # makes a `FamilyModel` with weights from the key
    form: Callable[[ModelConfig], BatchSpec]  # what its batch holds
    # (configuration, sequences, queries per attention block) -> the products of a step, each listed once
    products: Callable[[ModelConfig, int, int], list[MatrixProduct]]
    reset_form: BatchSpec | None = None  # its batch if attention restarts with every document; None: not supported
    # Whether `embed` is linear in the weights, so that its backward pass needs nothing from its forward pass.
    linear_embedding: Callable[[ModelConfig], bool] = lambda _: False


def family_of(config: ModelConfig) -> Family:
    """The family that a configuration names."""
    return importlib.import_module(FAMILIES[config.family].module).FAMILY


class StagedModel:
    """A model as functions of its weights, which are nested dicts: `shared`, the weights of the ends, which the first
    and the last stage use, and `blocks`, the stacked weights of the layers.

    Attributes:
        boundary: the boundary of its tensor-parallel regions.
        linear_embedding: see `Family`.
        shapes: `{"shared": …, "blocks": …}` of `ShapeDtypeStruct`, layers `[L, …]`.
        logical_specs: the same tree with a `PartitionSpec` of logical dim names for every weight.
    """

    def __init__(self, config: ModelConfig, boundary: RegionBoundary, backend: Backend, lora: LoraConfig | None = None):
        """If `lora` has a rank, layers may have adapters, and the weights of their products are frozen."""
        family = family_of(config)
        self._lora = lora if lora is not None and lora.rank else None
        self.boundary, self.linear_embedding = boundary, family.linear_embedding(config)
        self._new = lambda key: family.model(config, key, boundary, backend)
        x64 = jax.config.read("jax_enable_x64")
        self._ends, self._blocks, weights = _abstract(family.model, config, boundary, backend, x64)
        self.shapes = nnx.to_pure_dict(weights)
        self._products = self._paths_of_products()
        self.logical_specs = nnx.to_pure_dict(nnx.get_partition_spec(weights))

    def init(self, seed: int) -> Tree:
        """Fresh weights in fp32, layers `[L, …]`. Each is drawn from a key with its own name: the same on any mesh."""
        return nnx.to_pure_dict(_cut(self._new(NamedKey.from_seed(seed)))[2])

    def ends(self, shared: Tree) -> Any:
        """The model without its layers, on which to call `embed`, `losses`, …."""
        return nnx.merge(self._ends, shared)

    def block(self, weights: Tree) -> Any:
        """One layer; `weights` have no leading dim and may include LoRA adapters (`models/lora.py`) and float8 copies
        (`parallel/float8.py`)."""
        flat = flatten_dict(weights)
        copies = {path[:-1]: flat.pop(path) for path in list(flat) if path[-1] == FLOAT8}
        block = self._adapted(flat) if self._lora else nnx.merge(self._blocks, unflatten_dict(flat))
        for name, paths in self._products.items() if copies else ():
            for linear, (*path, _) in zip(block.products[name], paths, strict=True):
                linear.use_float8(copies[*path,])
        return block

    def _adapted(self, flat: dict[Path, Any]) -> Any:
        assert self._lora is not None
        adapters = {path: flat.pop(path) for path in list(flat) if path[-1] in ("a", "b")}
        block = nnx.merge(self._blocks, unflatten_dict(flat))
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
        seen = FactorProbe()
        self.block(weights)(x_BTD, dataclasses.replace(context, factors=seen), jnp.zeros((), jnp.int32))
        return dict(seen)

    def weight_gradients(self, weights: Tree, factors: Mapping[str, Pair]) -> dict[Path, Array]:
        """The gradients of the weights in a layer's products; only the types of `weights` matter."""
        products = self.block(weights).products
        gradients: dict[Path, Array] = {}
        for name, paths in self._products.items():
            linears = products[name]
            gradients |= zip(paths, type(linears[0]).weight_gradients(factors[name], linears), strict=True)
        return gradients

    def _paths_of_products(self) -> dict[str, list[Path]]:
        block = nnx.merge(self._blocks, self.shapes["blocks"])
        params = ((path, node) for path, node in nnx.iter_graph(block) if isinstance(node, nnx.Param))
        paths = {id(node): tuple(map(str, path)) for path, node in params}
        return {name: [paths[id(linear.weight)] for linear in linears] for name, linears in block.products.items()}

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


def step_products(config: ModelConfig, sequences: int, query_block: int) -> list[MatrixProduct]:
    """All matrix products of a training step; attention processes `query_block` queries at a time."""
    return family_of(config).products(config, sequences, query_block)


def step_flops(config: ModelConfig, sequences: int) -> int:
    """FLOPs of a step over `sequences` sequences, counted as in the paper: for GPT-2 `72 B s L h² (1 + s/6h + V/12Lh)`.

    For any decoder this is, per token, 6 N for the N weights in products (all but norms, biases, and an embedding table
    that is not also the head) plus 12 L H K S for attention, regardless of masking. A row of a choice task has as many
    sequences as texts. BERT's logits are those of the tokens that can be masked.
    """
    return sum(product.flops for product in step_products(config, sequences, config.sequence_length))


def layer_products(model: ModelConfig, sequences: int, query_block: int) -> Iterator[MatrixProduct]:
    """All products of the layers; with experts, those that the tokens choose. Attention processes `query_block` queries
    at a time, against the keys that one of them may see."""
    hidden, layers = model.hidden_size, model.num_layers
    queries = model.num_heads * model.head_size
    gated = 2 if model.activation == "swiglu" else 1
    shapes = {
        "qkv": (hidden, queries + 2 * model.num_kv_heads * model.head_size),
        "attention output": (queries, hidden),
    }
    tokens = sequences * model.sequence_length
    yield from weight_products(tokens, shapes, layers)
    sparse = model.num_blocks if model.num_experts else 0
    if sparse:
        own = {"experts up": (hidden, gated * model.expert_size), "experts down": (model.expert_size, hidden)}
        yield from weight_products(tokens * model.experts_per_token, own, sparse)
        yield from weight_products(tokens, {"router": (hidden, model.num_experts)}, sparse)
    for name, width, count in (
        ("MLP", model.mlp_size, layers - sparse),
        ("shared expert", model.shared_expert_size, sparse),
    ):
        mlp = {f"{name} up": (hidden, gated * width), f"{name} down": (width, hidden)}
        yield from weight_products(tokens, mlp, count) if width and count else ()
    heads, head_size, length = sequences * model.num_heads, model.head_size, model.sequence_length
    for block, keys in AttentionMask.of_model(model, length).block_sizes(length, query_block):
        # forward: scores; gradient of the probabilities
        yield MatrixProduct(f"attention scores, {keys} keys", 2 * layers, heads, block, head_size, keys)
        # forward: result; gradient of the queries
        yield MatrixProduct(f"attention sums, {keys} keys", 2 * layers, heads, block, keys, head_size)
        # gradients of keys and values
        yield MatrixProduct(f"attention gradients, {keys} keys", 2 * layers, heads, head_size, block, keys)


def weight_products(tokens: int, shapes: Mapping[str, tuple[int, int]], count: int = 1) -> Iterator[MatrixProduct]:
    """Products of `tokens` tokens with weights [inner, columns] by name, each `count` times."""
    for name, (inner, columns) in shapes.items():
        yield MatrixProduct(f"{name}, forward", count, 1, tokens, inner, columns)
        yield MatrixProduct(f"{name}, input gradient", count, 1, tokens, columns, inner)
        yield MatrixProduct(f"{name}, weight gradient", count, 1, inner, tokens, columns)


@lru_cache(maxsize=256)
def _abstract(
    model: Callable, config: ModelConfig, boundary: RegionBoundary, backend: Backend, x64: bool
) -> tuple[nnx.GraphDef, nnx.GraphDef, nnx.State]:
    """The parts of a model, with shapes in place of weights; `x64` is whether JAX's default dtypes have 64 bits."""
    return _cut(nnx.eval_shape(lambda: model(config, NamedKey.from_seed(0), boundary, backend)))


def _cut(model: Any) -> tuple[nnx.GraphDef, nnx.GraphDef, nnx.State]:
    """Take out the layers: graph of the ends, graph of the layers, and the weights of both by name."""
    blocks = model.blocks
    del model.blocks
    ends_graph, shared = nnx.split(model, nnx.Param)
    blocks_graph, stacked = nnx.split(blocks, nnx.Param)
    return ends_graph, blocks_graph, nnx.State({"shared": shared, "blocks": stacked})
