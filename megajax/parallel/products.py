"""Products of activations with weights, and the gradients of the weights in the form that suits the device."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.backend import Backend
from megajax.parallel.collectives import vary, varying_axes


def product(x: Array, weight: Array, contracted: int, backend: Backend) -> Array:
    """The last `contracted` dims of `x` [..., *K] with the first ones of `weight` [*K, *M]; shape [..., *M]."""
    if not backend.transposed_copies:
        return jnp.tensordot(x, weight, axes=contracted)
    axes = sorted(varying_axes(x) | varying_axes(weight))
    return _product(vary(x, axes), vary(weight, axes), contracted)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, weight: Array, contracted: int) -> Array:
    return jnp.tensordot(x, weight, axes=contracted)


def _forward(x: Array, weight: Array, contracted: int) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight, contracted), (x, weight)


def _backward(contracted: int, kept: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, weight = kept
    over_outputs = tuple(range(x.ndim - contracted, grad.ndim)), tuple(range(contracted, weight.ndim))
    return lax.dot_general(grad, weight, (over_outputs, ((), ()))), _by_transposed_copy(x, grad, contracted)


_product.defvjp(_forward, _backward)


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
