"""Products whose weight gradients are computed later: the backward pass hands out their factors instead.

The backward pass of `Y = X A` has two products: `dX = dY Aᵀ`, for which the layer before waits, and `dA = Xᵀ dY`, for
which nobody does. Here the second one is left out, and its factors `X` and `dY` come out as the gradients of two
arguments that are used for nothing else, the dummies. So the pullback of a layer is its input-gradient pass, and the
weight gradients are products of the factors at any later time.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from megajax.parallel.collectives import vary, varying_axes

Pair = tuple[Array, list[Array]]  # the input of one or several products, and the gradient of each one's output
Factors = Mapping[str, Any]  # a `Pair` by the name of the products
NO_FACTORS: Factors = {}


class FactorProbe(dict[str, Pair]):
    """In place of dummies: takes down what each product gets and gives, which has the types of its factors."""

    def __bool__(self) -> bool:
        return True


def deferred(
    name: str, multiply: Callable[[Array, list[Array]], list[Array]], x: Array, weights: list[Array], dummies: Factors
) -> list[Array]:
    """`multiply(x, weights)`, which is linear in `x` and in `weights`; its factors go into `dummies[name]`."""
    axes = sorted(varying_axes(x).union(*map(varying_axes, weights)))
    x, weights = vary(x, axes), vary(weights, axes)
    if isinstance(dummies, FactorProbe):
        dummies[name] = x, multiply(x, weights)
        return dummies[name][1]

    @jax.custom_vjp
    def product(x: Array, weights: list[Array], dummy: Pair) -> list[Array]:
        return multiply(x, weights)

    def forward(x: Array, weights: list[Array], dummy: Pair) -> tuple[list[Array], Any]:
        return multiply(x, weights), (x, weights)

    def backward(kept: Any, grads: list[Array]) -> tuple[Array, list[Array], Pair]:
        x, weights = kept
        (dx,) = jax.linear_transpose(lambda x: multiply(x, weights), x)(grads)
        return dx, jax.tree.map(jnp.zeros_like, weights), (x, grads)

    product.defvjp(forward, backward)
    return product(x, weights, dummies[name])
