"""Whether a fused form of a computation, cuDNN's or a kernel of ours, is right on this device: its results and
gradients beside those of plain code in fp32. A form that is wrong or fails (it may not compile here) is never an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from megajax.core.backend import Backend

LIMIT = 0.02  # largest distance of a row from the plain one, relative to its norm plus the rows' root mean square
_ROUNDINGS = 3  # or this many times the distance of plain code in the run's precision
_LONGEST_REASON = 160  # characters

Compute = Callable[..., Sequence[Array]]


@dataclass(frozen=True)
class FormComparison:
    """Something that fused forms compute, with the inputs on which they are compared with plain code."""

    name: str
    what: str  # the inputs, in words
    outputs: Sequence[str]  # names of what is computed
    forms: Mapping[str, Backend]  # by name
    plain: Backend
    function: Callable[[Backend], Compute]  # of the inputs
    inputs: Callable[[], Sequence[Any]]  # makes them, arrays

    def problem(self, form: str) -> str:
        """Why a form cannot be used here, in one line; empty if it is right."""
        try:
            inputs, right, limits = self._right
            distances = _distances(jax.jit(self.function(self.forms[form]))(*inputs), right)
        except Exception as error:  # whatever a compiler or a device raises
            first_line = next(iter(str(error).strip().splitlines()), "")
            return f"{type(error).__name__}: {first_line}"[:_LONGEST_REASON]
        for output, distance, limit in zip(self.outputs, distances, limits, strict=True):
            if not distance <= limit:  # nor is NaN
                return f"wrong here: a row of {output} is {distance:.2%} off, more than {limit:.2%}"
        return ""

    @cached_property
    def _right(self) -> tuple[Sequence[Any], Sequence[Array], list[float]]:
        """The inputs, what plain code computes of them in fp32, and how far each output may be from that."""
        compute, inputs = jax.jit(self.function(self.plain)), self.inputs()
        with jax.default_matmul_precision("float32"):
            right = compute(*map(_in_fp32, inputs))
        return inputs, right, [max(LIMIT, _ROUNDINGS * off) for off in _distances(compute(*inputs), right)]


def _in_fp32(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _distances(outputs: Sequence[Array], right: Sequence[Array]) -> list[float]:
    return [float(_distance(x, y)) for x, y in zip(outputs, right, strict=True)]


@jax.jit
def _distance(output: Array, right: Array) -> Array:
    """The largest distance of a row (the last dim), relative to its norm plus the rows' root mean square, so that it is
    defined for rows of zeros."""
    right = right.reshape(-1, right.shape[-1])
    off_N = jnp.linalg.norm(output.reshape(right.shape).astype(right.dtype) - right, axis=1)
    size_N = jnp.linalg.norm(right, axis=1)
    return jnp.max(off_N / (size_N + jnp.sqrt(jnp.mean(size_N**2)) + jnp.finfo(right.dtype).tiny))
