"""Products of activations with weights, and their gradients in the form that suits the device.

The backward pass of `Y = X A` has two products: `dX = dY Aᵀ`, for which the layer before waits, and `dA = Xᵀ dY`, for
which nobody does. A rule says how all three are computed: `DenseRule`, `float8.Float8Rule`, and
`models/grouped.GroupRule` of experts.

Where weight gradients are `deferred`, `dA` is left out, and its factors `X` and `dY` come out as the gradient of an
argument that is used for nothing else, the dummy. So the pullback of a layer is its input-gradient pass, and the weight
gradients are products of the factors at any later time.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from megajax.core.backend import Backend
from megajax.core.parallel.collectives import TENSOR, axis_size, sum_in_tree, vary_as
from megajax.core.parallel.fixed_tree import active, in_chunks, pairwise
from megajax.core.precision import at_least_fp32

# The input of one or several products, followed by what its rule takes `beside` it, and each output's gradient.
Pair = tuple[tuple[Any, ...], list[Array]]
# A `Pair` by the name of the products. In place of dummies, an empty one records what has their types. None: nothing is
# deferred.
Factors = dict[str, Pair] | None


class Rule(Protocol):
    """How products of one input with weights are computed, and the gradients of both. It may need arrays `beside`."""

    @property
    def together(self) -> bool:
        """Whether several products of an input are computed together; if not, JAX adds up the input's gradient."""
        ...

    def forward(self, x: Array, weights: Sequence[Array], *beside: Any) -> list[Array]:
        """The outputs."""
        ...

    def input_gradient(self, grads: Sequence[Array], weights: Sequence[Array], *beside: Any) -> Array:
        """The gradient of the input."""
        ...

    def weight_gradients(self, x: Array, grads: Sequence[Array], *beside: Any) -> list[Array]:
        """The gradients of the weights, in the compute dtype."""
        ...


def products(rule: Rule, x: Array, weights: Sequence[Array], *beside: Any, trained: bool = True) -> list[Array]:
    """The outputs of the products of `x` with the weights, differentiable; the weights have gradients if `trained`."""
    given = x, list(weights), beside
    x, weights, beside = vary_as(given, given)
    if rule.together:
        return _products(rule, trained, x, weights, beside)
    return [_products(rule, trained, x, [weight], beside)[0] for weight in weights]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(rule: Rule, trained: bool, x: Array, weights: list[Array], beside: tuple) -> list[Array]:
    return rule.forward(x, weights, *beside)


def _forward(rule: Rule, trained: bool, x: Array, weights: list[Array], beside: tuple) -> tuple[list[Array], Any]:
    return rule.forward(x, weights, *beside), (x if trained else None, weights, beside)


def _backward(rule: Rule, trained: bool, kept: Any, grads: list[Array]) -> tuple[Array, list[Array] | None, None]:
    x, weights, beside = kept
    input_gradient = rule.input_gradient(grads, weights, *beside)
    return input_gradient, rule.weight_gradients(x, grads, *beside) if trained else None, None


_products.defvjp(_forward, _backward)


def deferred(name: str, operands: tuple[Any, ...], outputs: list[Array], factors: Factors) -> list[Array]:
    """The `outputs` of products of the first of `operands`, with others beside it. With `factors`, the backward pass
    stores the factors of their weight gradients there under `name`."""
    if factors is None:
        return outputs
    return _deferred(outputs, operands, factors.setdefault(name, (operands, outputs)))


@jax.custom_vjp
def _deferred(outputs: list[Array], operands: tuple[Any, ...], dummy: Pair) -> list[Array]:
    return outputs


_deferred.defvjp(
    lambda outputs, operands, dummy: (outputs, operands),
    lambda operands, grads: (grads, None, (operands, grads)),
)


@dataclass(frozen=True)
class DenseRule:
    """Products of one input [..., *K] with weights [*K, *M], K of `inner` dims."""

    inner: int
    backend: Backend
    together = False

    def forward(self, x: Array, weights: Sequence[Array]) -> list[Array]:
        return [jnp.tensordot(x, weight, self.inner) for weight in weights]

    def input_gradient(self, grads: Sequence[Array], weights: Sequence[Array]) -> Array:
        gradients = []
        for grad, weight in zip(grads, weights, strict=True):
            columns = tuple(range(self.inner, weight.ndim))
            outputs = tuple(range(grad.ndim - len(columns), grad.ndim))
            gradients.append(lax.dot_general(grad, weight, ((outputs, columns), ((), ()))))
        return functools.reduce(jnp.add, gradients)

    def weight_gradients(self, x: Array, grads: Sequence[Array]) -> list[Array]:
        if self.backend.transposed_copies:
            return [self._by_transposed_copy(x, grad) for grad in grads]
        rows = tuple(range(x.ndim - self.inner))
        turned = (jnp.tensordot(grad, x, axes=(rows, rows)) for grad in grads)  # as JAX's own gradient is computed
        return [jnp.moveaxis(gradient, range(-self.inner, 0), range(self.inner)) for gradient in turned]

    def _by_transposed_copy(self, x: Array, grad: Array) -> Array:
        rows = x.ndim - self.inner
        x_NK, grad_NM = (array.reshape(math.prod(array.shape[:rows]), -1) for array in (x, grad))
        if x_NK.shape[1] <= grad_NM.shape[1]:
            gradient_KM = _transposed_copy(x_NK) @ grad_NM
        else:
            gradient_KM = lax.optimization_barrier(_transposed_copy(grad_NM) @ x_NK).T
        return gradient_KM.reshape(*x.shape[rows:], *grad.shape[rows:])


def _transposed_copy(x: Array) -> Array:
    """The barriers keep XLA from making the transposition a part of the product, or of what computes `x`."""
    return lax.optimization_barrier(lax.optimization_barrier(x).T)


def product(x: Array, weight: Array, inner: int, backend: Backend) -> Array:
    """Contract the last `inner` dims of `x` [..., *K] with the first ones of `weight` [*K, *M]: [..., *M]."""
    return products(DenseRule(inner, backend), x, [weight])[0]


def spread(weight: Array, like: Array, *, by_bits: bool = False) -> Array:
    """A weight [*M] for each of the first dims of `like`, [*B, *M] or [*B, M]. Its gradient is summed in at least fp32:
    JAX would sum in the compute dtype. In parts (`fixed_tree.py`), those of a weight that all of them share are sums
    over the tokens of each part, whether it has only these or all, and are added up in the tree. `by_bits`: see
    `Backend.forms_of_gpus`."""
    return _spread(ranks_in_parts(), by_bits, weight, like)


def ranks_in_parts() -> int:
    """How many ranks a tensor group has in parts; 0 where nothing is in parts."""
    return axis_size(TENSOR) if active() else 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _spread(parts: int, by_bits: bool, weight: Array, like: Array) -> Array:
    @custom_vmap
    def of(weight: Array, like: Array) -> Array:
        return vary_as(_spread_over(weight, like.shape), like)

    @of.def_vmap
    def _(size: int, mapped: list[bool], weight: Array, like: Array) -> tuple[Array, bool]:
        return jax.vmap(of.fun, [0 if each else None for each in mapped])(weight, like), True

    return of(weight, like) if parts else _spread_over(weight, like.shape)


def _spread_over(weight: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(weight.reshape(-1) if shape[-1] == weight.size else weight, shape)


def _spread_gradient(parts: int, by_bits: bool, weight: Array, grad: Array) -> tuple[Array, None]:
    def summed(chunks: Array) -> Array:
        return jnp.sum(chunks.astype(at_least_fp32(grad.dtype)), axis=1)

    @custom_vmap
    def of(weight: Array, grad: Array) -> Array:
        return pairwise(summed(in_chunks(grad.reshape(-1, *weight.shape), parts))).astype(grad.dtype)

    @of.def_vmap
    def _(size: int, mapped: list[bool], weight: Array, grad: Array) -> tuple[Array, bool]:
        sums_P = summed(grad.reshape(size, -1, *weight.shape[mapped[0] :]))
        return (sums_P if mapped[0] else sum_in_tree(TENSOR, sums_P)).astype(grad.dtype), mapped[0]

    if parts:
        return of(weight, grad), None
    others = grad.ndim - (1 if grad.shape[-1] == weight.size else weight.ndim)
    wide = _by_bits(grad) if by_bits and grad.dtype == jnp.bfloat16 else grad
    return jnp.sum(wide, tuple(range(others))).astype(grad.dtype).reshape(weight.shape), None


def _by_bits(x: Array) -> Array:
    """bf16 as fp32."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)


_spread.defvjp(lambda parts, by_bits, weight, like: (_spread(parts, by_bits, weight, like), weight), _spread_gradient)
