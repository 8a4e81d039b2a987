"""LoRA (Hu et al., arXiv 2106.09685): the weight W [*I, *O] of a layer's product is frozen and replaced by
`W + alpha / rank · A B`, where A [*I, R] and B [R, *O] are trained. Linear layers compute
`x W + alpha / rank · (x A) B` (`parallel/layers.py`).

Letters: L layers, I inputs and O outputs of a product, each one dim or several, R rank.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jax.sharding import PartitionSpec

from megajax.core.mesh import LATENTS, in_region
from megajax.core.models.config import ModelConfig
from megajax.core.models.lora_config import LoraConfig
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.random import NamedKey
from megajax.core.precision import at_least_fp32
from megajax.core.trees import Tree

LORA = "lora"  # key of the adapters in the weights, next to `shared` and `blocks`
_BLOCKS = "blocks"


class Adapters:
    """The adapters of a model: a tree `{"blocks": …}` with `{"a": A, "b": B}` for the weight of each adapted product,
    stacked like the weights.

    Attributes:
        products: the adapted products of a layer, as paths in its weights.
        shapes, logical_specs: of the adapters, [L, …], like those of `StagedModel`.
        num_inner: number of input dims of each product.
    """

    def __init__(self, lora: LoraConfig, config: ModelConfig, model: StagedModel):
        self._scale = lora.alpha / lora.rank
        wanted = lora.products(config)
        dims = flatten_dict(model.logical_specs[_BLOCKS])
        # As in `LORA_TARGETS`.
        names = {path: f"expert_{path[-2]}" if "experts" in dims[path] else path[-2] for path in model.products}
        self.products = tuple(sorted(path[:-1] for path, name in names.items() if name in wanted))
        shapes, specs = self.part(model.shapes), self.part(model.logical_specs)
        # Every product has an activation between tensor-parallel regions, or a latent, as its input or its output.
        self.num_inner = jax.tree.map(
            lambda spec: 1 if "experts" in spec or spec[1] in {"embed", *LATENTS} else len(spec) - 2, specs
        )

        def pair_of(dims: tuple[Any, ...], inner: int, spec: PartitionSpec, rank: Any) -> dict[str, tuple[Any, ...]]:
            stacked = 2 if "experts" in spec else 1
            end = stacked + inner
            return {"a": (*dims[:end], rank), "b": (*dims[:stacked], rank, *dims[end:])}

        def shapes_of(leaf: jax.ShapeDtypeStruct, inner: int, spec: PartitionSpec) -> dict[str, jax.ShapeDtypeStruct]:
            pair = pair_of(leaf.shape, inner, spec, lora.rank)
            return {name: jax.ShapeDtypeStruct(shape, leaf.dtype) for name, shape in pair.items()}

        def specs_of(spec: PartitionSpec, inner: int) -> dict[str, PartitionSpec]:
            rank = "rank" if in_region(spec) else "outer_rank"
            return {name: PartitionSpec(*dims) for name, dims in pair_of((*spec,), inner, spec, rank).items()}

        self.shapes = jax.tree.map(shapes_of, shapes, self.num_inner, specs)
        self.logical_specs = jax.tree.map(specs_of, specs, self.num_inner)

    def init(self, seed: int) -> Tree:
        """Fresh adapters in fp32: A as `peft` draws it, uniform up to 1 / sqrt(I) (Kaiming with slope sqrt(5)), B zero.
        Each layer's are drawn from a key with its own name: the same on every mesh."""
        root = NamedKey.from_seed(seed) / LORA

        def fresh(path: Any, leaf: jax.ShapeDtypeStruct) -> Array:
            names = [str(key.key) for key in path]
            if names[-1] == "b":
                return jnp.zeros(leaf.shape, jnp.float32)
            inner = flatten_dict(self.num_inner)[tuple(names[:-1])]
            key, bound = root, 1 / math.sqrt(math.prod(leaf.shape[-1 - inner : -1]))
            for name in names:
                key = key / name

            def of_layer(number: Array) -> Array:
                return jax.random.uniform((key / number).key, leaf.shape[1:], jnp.float32, -bound, bound)

            return jax.vmap(of_layer)(jnp.arange(leaf.shape[0], dtype=jnp.int32))

        return jax.tree_util.tree_map_with_path(fresh, self.shapes)

    def part(self, tree: Tree) -> Tree:
        """Select the entries of adapted products from a tree with the structure of the weights."""
        flat = flatten_dict(tree[_BLOCKS])
        return {_BLOCKS: unflatten_dict({path: flat[*path, "weight"] for path in self.products})}

    def of(self, path: Any) -> tuple[dict[str, Any], int] | None:
        """Paths, in the tree of weights, of the adapter for the weight at `path`, and the number of input dims of its
        product; None if it has none."""
        names = tuple(str(key.key) for key in path)
        if names[0] != _BLOCKS or names[-1] != "weight" or names[1:-1] not in self.products:
            return None
        pair = {name: tuple(map(jax.tree_util.DictKey, (LORA, *names[:-1], name))) for name in "ab"}
        return pair, flatten_dict(self.num_inner)[names[:-1]]

    def put(self, tree: Tree, part: Tree) -> Tree:
        """A tree with the structure of the weights, with the entries of adapted products replaced by `part`."""
        weights = {(*path, "weight"): leaf for path, leaf in flatten_dict(part[_BLOCKS]).items()}
        return {**tree, _BLOCKS: unflatten_dict(flatten_dict(tree[_BLOCKS]) | weights)}

    def added(self, adapter: Mapping[str, Array], inner: int) -> Array:
        """What an adapter adds to the weight of its product, which has `inner` input dims. Layers may be stacked along
        any number of dims, and arrays may be shards of A and B that belong together."""
        a, b = adapter["a"], adapter["b"]
        stacked = a.ndim - inner - 1
        a_IR = a.reshape(*a.shape[:stacked], -1, a.shape[-1])
        b_RO = b.reshape(*b.shape[: stacked + 1], -1)
        added = jnp.matmul(a_IR, b_RO, precision=lax.Precision.HIGHEST)  # full fp32 on GPUs too
        return (self._scale * added).reshape(*a.shape[:-1], *b.shape[stacked + 1 :])

    def merged(self, weights: Mapping[str, Tree]) -> Tree:
        """Weights with their adapters merged in, and without the adapters."""
        frozen = without_adapters(weights)

        def merge(weight: Array, adapter: Mapping[str, Array], inner: int) -> Array:
            a_and_b = jax.tree.map(lambda x: x.astype(at_least_fp32(x.dtype)), adapter)
            return (weight + self.added(a_and_b, inner)).astype(weight.dtype)

        return self.put(frozen, jax.tree.map(merge, self.part(frozen), weights[LORA], self.num_inner))


def layer_weights(weights: Mapping[str, Tree]) -> Tree:
    """The weights of the layers, or a tree like them. Adapters, if there are any, are `a` and `b` next to the `weight`
    of their product."""
    if LORA not in weights:
        return weights[_BLOCKS]
    return unflatten_dict(flatten_dict(weights[_BLOCKS]) | flatten_dict(weights[LORA][_BLOCKS]))


def without_adapters(weights: Mapping[str, Tree]) -> Tree:
    """The weights without LoRA's adapters."""
    return {name: part for name, part in weights.items() if name != LORA}
