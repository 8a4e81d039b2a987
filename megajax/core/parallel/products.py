"""Products of activations with weights, and the gradients of the weights in the form that suits the device.

The backward pass of `Y = X A` has two products: `dX = dY Aᵀ`, for which the layer before waits, and `dA = Xᵀ dY`, for
which nobody does. Where weight gradients are `deferred`, the second one is left out, and its factors `X` and `dY` come
out as the gradients of two arguments that are used for nothing else, the dummies. So the pullback of a layer is its
input-gradient pass, and the weight gradients are products of the factors at any later time.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.backend import Backend
from megajax.core.parallel.collectives import vary, varying_axes

# The input of one or several products (with other arrays they depend on), and the gradient of each one's output.
Pair = tuple[Any, list[Array]]
# A `Pair` by the name of the products. In place of dummies, an empty one records what has their types. None: nothing is
# deferred.
Factors = dict[str, Pair] | None


def product(x: Array, weight: Array, contracted: int, backend: Backend) -> Array:
    """Contract the last `contracted` dims of `x` [..., *K] with the first ones of `weight` [*K, *M]: [..., *M]."""
    if not backend.transposed_copies:
        return jnp.tensordot(x, weight, axes=contracted)
    axes = sorted(varying_axes(x) | varying_axes(weight))
    return _product(vary(x, axes), vary(weight, axes), contracted)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, weight: Array, contracted: int) -> Array:
    return jnp.tensordot(x, weight, axes=contracted)


def _backward(contracted: int, kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = kept
    over_outputs = tuple(range(x.ndim - contracted, grad.ndim)), tuple(range(contracted, weight.ndim))
    return lax.dot_general(grad, weight, (over_outputs, ((), ()))), _by_transposed_copy(x, grad, contracted)


_product.defvjp(lambda x, weight, contracted: (_product(x, weight, contracted), (x, weight)), _backward)


def weight_gradient(x: Array, grad: Array, contracted: int, backend: Backend) -> Array:
    """The gradient of a weight [*K, *M], from its product's input [..., *K] and output gradient [..., *M]."""
    if backend.transposed_copies:
        return _by_transposed_copy(x, grad, contracted)
    rows = tuple(range(x.ndim - contracted))
    return jnp.tensordot(x, grad, axes=(rows, rows))


def _by_transposed_copy(x: Array, grad: Array, contracted: int) -> Array:
    rows = x.ndim - contracted
    x_NK, grad_NM = (array.reshape(math.prod(array.shape[:rows]), -1) for array in (x, grad))
    if x_NK.shape[1] <= grad_NM.shape[1]:
        gradient_KM = _transposed_copy(x_NK) @ grad_NM
    else:
        gradient_KM = lax.optimization_barrier(_transposed_copy(grad_NM) @ x_NK).T
    return gradient_KM.reshape(*x.shape[rows:], *grad.shape[rows:])


def _transposed_copy(x: Array) -> Array:
    """The barriers keep XLA from making the transposition a part of the product, or of what computes `x`."""
    return lax.optimization_barrier(lax.optimization_barrier(x).T)


def deferred(
    name: str,
    multiply: Callable[..., list[Array]],
    x: Array,
    weights: list[Any],
    dummies: dict[str, Pair],
    *beside: Array,
    input_gradient: Callable[..., Array] | None = None,
) -> list[Array]:
    """`multiply(x, weights, *beside)`, which is linear in `x` and in `weights`; its factors go into `dummies[name]`,
    with the floats in `beside` next to `x`. The gradient of `x`, of which only the type matters, is `input_gradient(x,
    grads, weights, *beside)`, or found by transposition. A weight may be several arrays."""
    axes = sorted(varying_axes(x).union(*map(varying_axes, jax.tree.leaves(weights))))
    x, weights, beside = vary(x, axes), vary(weights, axes), vary(beside, axes)
    if name not in dummies:
        outputs = multiply(x, weights, *beside)
        dummies[name] = (x, *beside) if beside else x, outputs
        return outputs

    @jax.custom_vjp
    def product(x: Array, weights: list[Any], beside: tuple[Array, ...], dummy: Pair) -> list[Array]:
        return multiply(x, weights, *beside)

    def forward(x: Array, weights: list[Any], beside: tuple[Array, ...], dummy: Pair) -> tuple[list[Array], Any]:
        return multiply(x, weights, *beside), (x, weights, beside)

    def backward(kept: Any, grads: list[Array]) -> tuple:
        x, weights, beside = kept
        if input_gradient is None:
            (dx,) = jax.linear_transpose(lambda x: multiply(x, weights, *beside), x)(grads)
        else:
            dx = input_gradient(x, grads, weights, *beside)
        nothing = jax.tree.map(jnp.zeros_like, (weights, beside))
        return dx, *nothing, ((x, *beside) if beside else x, grads)

    product.defvjp(forward, backward)
    return product(x, weights, beside, dummies[name])
