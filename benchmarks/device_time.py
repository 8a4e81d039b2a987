"""The time of a function on a device, without that of calls from Python, which can take longer than a GPU's work."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

ROUNDS, LEAST, MOST = 5, 0.005, 100  # measurements; seconds and calls of one, at least and at most


def milliseconds(function: Callable[..., Sequence[Array]], inputs: Sequence[Any]) -> float:
    """The median time of a call, of several in one program. Every call after the first sees first numbers of the last
    one's results in its inputs: otherwise XLA would compute once what does not change."""

    def with_first(x: Array, number: Any) -> Array:
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        return x.at[(0,) * x.ndim].set(jnp.clip(number, -1, 1).astype(x.dtype)) if floats else x

    def call(_: Array, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        outputs = [*function(*carry[0])]
        number = sum(x[(0,) * x.ndim].astype(jnp.float32) for x in outputs)
        return [with_first(x, number) for x in carry[0]], outputs

    zeros = [jnp.zeros(type_.shape, type_.dtype) for type_ in jax.eval_shape(function, *inputs)]
    compute = jax.jit(lambda calls, *inputs: lax.fori_loop(0, calls, call, ([*inputs], zeros))[1])

    def seconds(calls: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(compute(calls, *inputs))
        return (time.perf_counter() - began) / calls

    seconds(1)
    calls = max(1, min(MOST, int(LEAST / seconds(1))))
    return 1e3 * statistics.median(seconds(calls) for _ in range(ROUNDS))
