"""Whether a program gives the same in JAX and in the interpreter."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxequal.flow import equations
from jaxequal.interpreter import Interpreter
from jaxequal.numbers import Value, constant, elements, estimate, is_float

Case = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def exactly(function: Callable[..., Any], *args: Any) -> list[Value]:
    """The results in the interpreter, of arrays or their shapes and dtypes."""
    values = [constant(each, each.dtype) for each in map(np.asarray, args)]
    return Interpreter()(jax.make_jaxpr(function)(*args), values)


class Agreement:
    """Cases, of which JAX compiles one program."""

    def __init__(self, cases: Mapping[str, Case]):
        functions = {name: function for name, (function, _) in cases.items()}
        call = jax.jit(lambda args: {name: function(*args[name]) for name, function in functions.items()})
        self._cases, self._expected = cases, call({name: args for name, (_, args) in cases.items()})

    def check(self, name: str) -> None:
        """Compare what a case gives."""
        function, args = self._cases[name]
        found, expected = exactly(function, *args), jax.tree.leaves(self._expected[name])
        for value, array in zip(found, expected, strict=True):
            right = constant(array, array.dtype)
            assert value.dtype == right.dtype, (name, value.dtype, right.dtype)
            if is_float(array.dtype):  # and the estimates are what JAX has
                real = np.asarray(array, float)
                near = np.isclose(estimate(value)[0], real, rtol=1e-6, atol=1e-6)
                assert (near | ~np.isfinite(real)).all(), (name, estimate(value), array)
            np.testing.assert_array_equal(elements(value), elements(right), strict=False, err_msg=f"{name}: {array}")
            assert value.shape[2:] == array.shape, name


def names_in(jaxpr: Any) -> set[str]:
    """Of all primitives in it."""
    return {equation.primitive.name for equation in equations(jaxpr)}
