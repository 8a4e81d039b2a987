"""A tensor group of always as many ranks, whatever devices there are: each device computes with the parts of several.

With `--bitwise P` a function of weights in a tensor-parallel region is mapped (`jax.vmap`) over the P / tensor parts
that a device has, of each of which it sees what a device would see if `tensor` were P: products of the same shapes, its
own heads, its range of the vocabulary. `collectives.f` and `g` then add up parts and devices in one binary tree,
neighbours first, so that no sum depends on which device has which part.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from megajax.core.precision import at_least_fp32


@dataclass(frozen=True)
class Parts:
    """How many parts a device computes with, and the number of the one that is mapped over."""

    count: int
    index: Array


_ACTIVE: ContextVar[Parts | None] = ContextVar("parts", default=None)


def active() -> Parts | None:
    """The parts that the function being traced is mapped over, if it is."""
    return _ACTIVE.get()


def in_parts(function: Callable, count: int, in_axes: Any, out_axes: Any = None) -> Callable:
    """`function` mapped over this device's parts: of arguments along `in_axes`; results without an axis are the same in
    all of them."""

    def of_part(index: Array, *args: Any) -> Any:
        token = _ACTIVE.set(Parts(count, index))
        try:
            return function(*args)
        finally:
            _ACTIVE.reset(token)

    mapped = jax.vmap(of_part, in_axes=(0, *in_axes), out_axes=out_axes)
    return lambda *args: mapped(jnp.arange(count, dtype=jnp.int32), *args)


def of_all_parts(function: Callable[[Array], Array], count: int, x: Array) -> Array:
    """`function` of `x` from all parts, [parts, …], whose result is the same in all of them."""

    @custom_vmap
    def run(x: Array) -> Array:
        return function(jnp.broadcast_to(x, (count, *x.shape)))

    run.def_vmap(lambda size, mapped, x: (function(x), False))
    return run(x)


def of_each_part(function: Callable[[Array], Array], count: int, x: Array) -> Array:
    """`function` of `x` from all parts, [parts, …], which returns [parts, …]: each part gets its own entry."""

    @custom_vmap
    def run(x: Array) -> Array:
        return function(jnp.broadcast_to(x, (count, *x.shape)))[0]

    run.def_vmap(lambda size, mapped, x: (function(x), True))
    return run(x)


def apart(x: Array, index: Array) -> Array:
    """`x` in every part by itself, so that products with it have the same shapes with any number of parts. The barrier
    keeps the compiler from seeing that it is the same in all."""

    @custom_vmap
    def run(x: Array, index: Array) -> Array:
        return x

    @run.def_vmap
    def _(size: int, mapped: list[bool], x: Array, index: Array) -> tuple[Array, bool]:
        return lax.optimization_barrier(x if mapped[0] else jnp.broadcast_to(x, (size, *x.shape))), True

    return run(x, index)


def in_chunks(x_T: Array, parts: int) -> Array:
    """As many chunks of the first dim as there are parts, [parts, …], filled up with zeros."""
    size = -(-len(x_T) // parts)
    return jnp.pad(x_T, ((0, size * parts - len(x_T)), *[(0, 0)] * (x_T.ndim - 1))).reshape(parts, size, *x_T.shape[1:])


def pairwise(x_P: Array) -> Array:
    """The sum over the first dim, neighbours first, in at least fp32 if it is a float's."""
    x_P = x_P.astype(at_least_fp32(x_P.dtype)) if jnp.issubdtype(x_P.dtype, jnp.floating) else x_P
    while len(x_P) > 1:
        if len(x_P) % 2:
            x_P = jnp.concatenate([x_P, jnp.zeros_like(x_P[:1])])
        x_P = x_P[::2] + x_P[1::2]
    return x_P[0]


@dataclass(frozen=True)
class Form:
    """How the parts of a weight are in it.

    Attributes:
        mapped: whether parts differ; otherwise the weight is used between regions, alike in all of them.
        dim: the dim of one layer's weight that has the parts; None if every part uses all of it, and then has a
            gradient of its own.
        size, local: the size of that dim, and what a device has of it.
    """

    mapped: bool = True
    dim: int | None = None
    size: int = 0
    local: int = 0

    @property
    def axis(self) -> int | None:
        """The dim of parts in what a function is mapped over."""
        return (self.dim or 0) if self.mapped else None

    def divided(self, weight: Array, parts: int, count: int, rank: Array) -> Array:
        """A device's weight, as what is mapped over; `count` of the `parts` are its own, and `rank` is its place in
        the tensor group."""
        if not self.mapped:
            return weight
        if self.dim is None:
            return jnp.broadcast_to(weight, (count, *weight.shape))
        if self.size % parts:
            weight = jnp.take(weight, self._places(parts, count, rank), self.dim)
        return weight.reshape(*weight.shape[: self.dim], count, -1, *weight.shape[self.dim + 1 :])

    def joined(self, sums: Array, parts: int, count: int, rank: Array) -> Array:
        """The inverse for sums of gradients in digits, which are the first dim."""
        if not self.mapped:
            return sums
        if self.dim is None:
            return jnp.sum(sums, axis=1, dtype=sums.dtype)
        dim = self.dim + 1
        sums = sums.reshape(*sums.shape[:dim], -1, *sums.shape[dim + 2 :])
        if self.size % parts == 0:
            return sums
        first = jnp.moveaxis(sums, dim, 0)
        nothing = jnp.zeros_like(first, shape=(self.local, *first.shape[1:]))
        return jnp.moveaxis(nothing.at[self._places(parts, count, rank)].add(first), 0, dim)

    def _places(self, parts: int, count: int, rank: Array) -> Array:
        """Where the only entry of each part is, if there are fewer entries than parts."""
        own = jnp.arange(count, dtype=jnp.int32)
        if self.local < self.size:  # a device has only those of its own parts
            return own * self.local // count
        return (rank * count + own) * self.size // parts
