"""Attention sinks (Xiao et al., arXiv 2309.17453; learned, as in GPT-OSS): a logit of each head takes part in the
softmax but has no value, so that a token need not attend to any other.

Any attention can have them that returns the statistics of its softmax, since only the sum of that changes. The
gradients of queries, keys and values follow from the new result and the new statistics by the same formulas.
"""

import jax.numpy as jnp
from jax import Array


def with_sinks(out: Array, highest: Array, total: Array, sink: Array) -> tuple[Array, Array, Array]:
    """The result of attention, [… K], the highest logit of every query, [… 1], and the sum of the exponentials relative
    to it, [… 1], as if each query also saw its sink, [… 1], whose value is zero."""
    most = jnp.maximum(highest, sink)
    own = total * jnp.exp(highest - most)
    total = own + jnp.exp(sink - most)
    return (out.astype(total.dtype) * (own / total)).astype(out.dtype), most, total


def sink_gradients(out: Array, grad: Array, highest: Array, total: Array, sink: Array) -> Array:
    """The gradient of each query's sink, [… 1], from what `with_sinks` returned and the gradient of the result."""
    inner = jnp.sum(out.astype(total.dtype) * grad.astype(total.dtype), axis=-1, keepdims=True)
    return -jnp.exp(sink - highest) / total * inner
