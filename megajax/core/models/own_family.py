"""Models of the user's, `megajax.register("family", name, …)`: layers of any kind on every stage of the pipeline,
between the decoder's embedding and output table, which are sharded like those of any other family.

Letters: B batch, T tokens, D model, H heads, K head size.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict
from jax import Array

from megajax.core.backend import CPU, Backend
from megajax.core.batch import text_form
from megajax.core.errors import UserError, told
from megajax.core.models import family as families
from megajax.core.models.attention import Attend, Aux, attend_in_context
from megajax.core.models.config import ModelConfig
from megajax.core.models.context import Context
from megajax.core.models.decoder.model import TransformerDecoder
from megajax.core.models.flops import weight_products
from megajax.core.models.registry import FamilyEntry
from megajax.core.models.rotary import rotated
from megajax.core.models.staged import StagedModel
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import TENSOR, own_shard
from megajax.core.parallel.layers import (
    ColumnParallelLinear,
    Initializer,
    RowParallelLinear,
    column_parallel,
    normal,
    param,
)
from megajax.core.parallel.random import NamedKey
from megajax.core.parallel.sites import named

Make = Callable[[ModelConfig, "Weights"], Any]


@dataclass(frozen=True)
class Family:
    """A kind of model, to be registered. `layer`, `embedding` and `head` are classes, or functions, of a `ModelConfig`
    and `Weights` that make an `nnx.Module`.

    Attributes:
        layer: called as `layer(x_BTD, tokens)` (`Tokens`), returns an array like `x_BTD`: what the next layer gets.
            It is made once for all layers and stacked, so nothing in it may depend on the number of the layer but its
            initial weights, which differ.
        embedding: called as `embedding(x_BTD, tokens)` with the embedded tokens, returns an array like them. None:
            they are what the first layer gets.
        head: called as `head(x_BTD)` with the last layer's output, returns an array like it, from which the product
            with the output table makes logits. None: the norm that `model.norm` names.
        generates: whether text can be generated with a cache: if `tokens.attend` and `tokens.rotated` are all by which
            a layer depends on other tokens and on positions. `megajax verify --exact` compares it.
    """

    layer: Make
    embedding: Make | None = None
    head: Make | None = None
    generates: bool = False


_ONLY = {
    "mesh.context": 1,
    "sequence_parallel": False,
    "lora.rank": 0,
    "model.num_experts": 0,
    "model.latent_size": 0,
    "model.linear_heads": 0,
    "model.prediction_modules": 0,
    "model.sliding_window": 0,
    "model.attention_gate": "none",
    "model.attention_sinks": False,
    "model.query_key_norm": False,
}
"""What layers of the user's do not have; an option with another value is refused."""


class Weights:
    """Makes the weights of one module. Every weight has a name of its own there, from which its initial numbers follow:
    they are the same on every mesh. Weights that are attributes called `scale` or `bias` do not decay."""

    def __init__(self, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self._config, self._key, self._boundary, self._backend = config, key, boundary, backend
        self._drawn = set[str]()

    def inside(self, name: str) -> "Weights":
        """For a module inside this one, with names of its own."""
        return Weights(self._config, self._key / name, self._boundary, self._backend)

    def __call__(self, name: str, *shape: int, initial: Initializer | float | None = None) -> nnx.Param:
        """A weight that every device has whole, but for ZeRO. `initial` is a function of its shape, the standard
        deviation of a normal distribution, or None: `model.init_std`. Its numbers are read as `weight[...]`."""
        return param(shape, (None,) * len(shape), self._initial(name, initial))

    def columns(self, name: str, inputs: int, *, bias: bool = False, **outputs: int | tuple[int, int]) -> "Columns":
        """Products of one input, [B, T, inputs], with a weight for each of the outputs by name, sharded over `tensor`
        by columns (paper §3). An output is a width, or a number of heads and their size: a device computes its share of
        the columns or heads, whose number `mesh.tensor` must divide."""
        linears = {
            part: self._linear(ColumnParallelLinear, f"{name}/{part}", (inputs, *_sizes(size)), bias)
            for part, size in outputs.items()
        }
        return Columns(name, linears)

    def rows(self, name: str, inputs: int | tuple[int, int], outputs: int, *, bias: bool = False) -> "Rows":
        """The product of what `columns` made, [B, T, width] or [B, T, heads, size], with a weight that is sharded over
        `tensor` by rows; all devices of a tensor group get the sum, [B, T, outputs]."""
        linear = self._linear(Rows, name, (*_sizes(inputs), outputs), bias)
        linear.name = name
        return linear

    def _linear(self, kind: Any, name: str, shape: tuple[int, ...], bias: bool) -> Any:
        std = self._config.residual_init_std if kind is Rows else None
        inside = ("mlp",) if len(shape) == 2 else ("heads", "head_size")
        dims = (*inside, "embed") if kind is Rows else ("embed", *inside)
        return kind(self._initial(name, std), self._boundary, shape, dims, self._backend, bias=bias)

    def rngs(self, name: str) -> nnx.Rngs:
        """Random keys for a module of `flax.nnx`, whose weights every device has whole, but for ZeRO."""
        return nnx.Rngs(self._named(name).key)

    def _named(self, name: str) -> NamedKey:
        if name in self._drawn:
            raise UserError(f"weights: two are called {name}; valid: another name, or weights.inside(…) for a module")
        self._drawn.add(name)
        return self._key / name

    def _initial(self, name: str, initial: Initializer | float | None = None) -> Initializer:
        if callable(initial):
            return initial
        return normal(self._named(name), self._config.init_std if initial is None else initial)


def _sizes(size: int | tuple[int, int]) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


class Columns(nnx.Module):
    """See `Weights.columns`."""

    def __init__(self, name: str, linears: Mapping[str, ColumnParallelLinear]):
        self.name, self.parts = name, tuple(linears)
        for part, linear in linears.items():
            setattr(self, part, linear)

    @property
    def linears(self) -> tuple[ColumnParallelLinear, ...]:
        return tuple(getattr(self, part) for part in self.parts)

    def __call__(self, x_BTD: Array, tokens: "Tokens") -> Any:
        """This device's columns or heads of every output; of a single one, the array itself."""
        outputs = column_parallel(x_BTD, *self.linears, name=self.name, factors=tokens.context.factors)
        return outputs if len(outputs) > 1 else outputs[0]


class Rows(RowParallelLinear):
    """See `Weights.rows`."""

    name = ""

    @property
    def linears(self) -> "tuple[Rows]":
        return (self,)

    def __call__(self, y: Array, tokens: Any) -> Array:  # type: ignore[override]
        return super().__call__(y, self.name, tokens.context.factors)


@dataclass
class Tokens:
    """What a module gets besides its input, and functions that depend on which tokens and heads a device has.

    Attributes:
        context: the same for megajax's own layers.
        layer: the number of the layer, possibly known only on the device.
        length: T.
    """

    context: Context
    layer: Array | int
    length: int
    backend: Backend
    config: ModelConfig
    _attend: Attend = attend_in_context
    _aux: Aux = field(default_factory=dict)

    @property
    def position_BT(self) -> Array:
        """The positions of the tokens in their documents, int32; B is 1 if they are the same in all rows."""
        index_1T, first_BT = self._index_1T, self.context.visible.first_key_BT
        return index_1T if first_BT is None else index_1T - first_BT

    @property
    def sees_BTS(self) -> Array:
        """Which tokens, S, each token, T, sees: those up to itself in its document; bool, B maybe 1."""
        seen = self.context.visible.mask(self._index_1T, self._index_1T)
        assert seen is not None
        return seen

    def attend(self, q_BTHK: Array, k_BTHK: Array, v_BTHK: Array) -> Array:
        """Attention to the tokens that are seen, with dropout, in the form that is fastest here, [B, T, H, K]. There
        may be fewer heads of keys and values."""
        y_BTHK, aux = self._attend(q_BTHK, k_BTHK, v_BTHK, self.context, self.backend)
        self._aux |= aux
        return y_BTHK

    def rotated(self, x_BTHK: Array) -> Array:
        """Queries or keys, rotated by their positions (`model.positions` must be rotary)."""
        assert self.context.position_BT is not None, "--model.positions is not rotary"
        return rotated(x_BTHK, self.context.position_BT, self.config, False)

    @property
    def _index_1T(self) -> Array:
        alone = "what generates depends on other tokens and positions by tokens.attend and rotated alone"
        assert self.context.cache == "none", alone  # otherwise these are not the whole sequence
        return jnp.arange(self.length, dtype=jnp.int32)[None]

    def dropout(self, name: str, x_BTD: Array) -> Array:
        """Dropout at the place called `name`, with `model.dropout`; of what every device of a tensor group has."""
        return self.context.dropout.fold(zlib.crc32(name.encode()))(x_BTD, jnp.arange(self.length, dtype=jnp.int32))

    def own(self, values: Array, dim: int = 0) -> Array:
        """This device's share of numbers that belong to all heads or columns, along their `dim`."""
        return own_shard(values, dim, TENSOR)


class Layer(nnx.Module):
    """A layer of the user's as one of ours (`models/layer.py`)."""

    def __init__(self, make: Make, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        self.layer = _made(make, config, key, boundary, backend)
        self.config, self.backend = config, backend

    @property
    def products(self) -> dict[str, tuple]:
        """Its products that have factors, by name."""
        groups = [node for _, node in nnx.iter_graph(self.layer) if isinstance(node, Columns | Rows)]
        return {group.name: group.linears for group in groups}

    def __call__(
        self, x_BTD: Array, context: Context, layer: Array | int, attend: Attend = attend_in_context
    ) -> tuple[Array, Aux]:
        x_BTD = named(x_BTD, "input")
        context = replace(context, dropout=context.dropout.fold(layer))
        tokens = Tokens(context, layer, x_BTD.shape[1], self.backend, self.config, attend)
        return named(_called("layer", self.layer, x_BTD, tokens), "output"), tokens._aux


class Model(TransformerDecoder):
    """A decoder with layers of the user's, and maybe an embedding and a head."""

    def __init__(self, own: Family, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend):
        super().__init__(config, key, boundary, backend, block=partial(Layer, own.layer))
        self.own_embedding: Any = own.embedding and _made(own.embedding, config, key / "embedding", boundary, backend)
        if own.head:
            self.final_norm: Any = _made(own.head, config, key / "head", boundary, backend)
        self.own = own

    def embedding(self, batch: Any, context: Context) -> Array:
        """The embedded tokens as the first layer gets them."""
        x_BTD = super().embedding(batch, context)
        if self.own_embedding is None:
            return x_BTD
        tokens = Tokens(context, 0, x_BTD.shape[1], self.backend, self.config)
        return _called("embedding", self.own_embedding, x_BTD, tokens)

    def logits(self, x_BTD: Array) -> Array:
        """This device's columns, from the last layer's output."""
        return self._logits(_called("head", self.final_norm, x_BTD)) if self.own.head else super().logits(x_BTD)


def _made(make: Make, config: ModelConfig, key: NamedKey, boundary: RegionBoundary, backend: Backend) -> Any:
    name = getattr(make, "__name__", repr(make))
    with told(
        f"family {config.family}: {name}",
        "a class or function of a ModelConfig and megajax.Weights (docs/own-model.md)",
    ):
        made = make(config, Weights(config, key, boundary, backend))
    if not isinstance(made, nnx.Module):
        raise UserError(f"family {config.family}: {name} made {made!r:.80}; valid: an nnx.Module")

    def told_of(path: Sequence[Any]) -> str:
        return f"family {config.family}: {'.'.join(map(str, path))} of {name}"

    for path, node in nnx.iter_graph(made):
        if isinstance(node, jax.Array | np.ndarray) or (
            isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)
        ):
            raise UserError(f"{told_of(path)} is no weight; valid: without it, or in a tuple")
        if isinstance(node, nnx.Param) and any(isinstance(key, int) for key in path):
            raise UserError(f"{told_of(path)} is in a list; valid: an attribute for each module")
        if isinstance(node, nnx.Param) and not node.get_metadata().get("out_sharding"):  # as those of nnx.Linear
            node.set_metadata(out_sharding=(None,) * node.ndim, eager_sharding=False)
    return made


def _called(part: str, module: Any, x_BTD: Array, *tokens: Tokens) -> Array:
    with told(f"{part} {type(module).__name__}", f"{part}(x_BTD{', tokens' * bool(tokens)}), see docs/own-model.md"):
        y_BTD = module(x_BTD, *tokens)
    if (getattr(y_BTD, "shape", None), getattr(y_BTD, "dtype", None)) != (x_BTD.shape, x_BTD.dtype):
        found = f"{getattr(y_BTD, 'dtype', type(y_BTD).__name__)} {[*getattr(y_BTD, 'shape', ())]}"
        raise UserError(
            f"{part} {type(module).__name__} returned {found} for {x_BTD.dtype} {[*x_BTD.shape]}; valid: the same"
        )
    return y_BTD


@cache
def family(own: Family) -> families.Family:
    """A registered family as the code that distributes layers knows it."""
    return families.Family(
        model=partial(Model, own),
        form=lambda _: text_form(),
        products=_products,
        reset_form=text_form(with_positions=True),
        linear_embedding=lambda _: own.embedding is None,
    )


def _products(model: ModelConfig, sequences: int, query_block: int) -> list[families.MatrixProduct]:
    """Those with weights: what else a layer multiplies is not known, and not counted."""
    layer = StagedModel(model, RegionBoundary(), CPU).shapes["blocks"]
    shapes = {
        "/".join(path): (prod(x.shape[1:-1]), x.shape[-1]) for path, x in flatten_dict(layer).items() if x.ndim > 2
    }
    shapes["head"] = model.hidden_size, model.padded_vocab_size
    tokens = sequences * model.sequence_length
    return [
        product
        for name, shape in shapes.items()
        for product in weight_products(tokens, {name: shape}, 1 if name == "head" else model.num_layers)
    ]


def entry_of(own: Family | Make) -> FamilyEntry:
    """What is known of a registered family before it is used; given the layer alone, or all of it."""
    own = own if isinstance(own, Family) else Family(own)
    return FamilyEntry(__name__, own=own, generates=own.generates, only=_ONLY)
