"""Two functions as traced programs: what they are given, and what is noted while they run."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
from jax.tree_util import keystr, tree_leaves_with_path

from jaxequal.errors import RunError, UserError, told
from jaxequal.flow import Flow, equations, programs
from jaxequal.functions import BRANCHES
from jaxequal.interpreter import Interpreter
from jaxequal.numbers import (
    Value,
    constant,
    drawn,
    elements,
    estimate,
    is_float,
    is_lowest,
    ordered,
)

AS_IT_IS, OTHERWISE, NOT_FINITE = "", " where numbers compare the other way round", " where isfinite says no"
UNDERFLOW = -5000.0  # exponentials of less are 0, as of scores that a mask lowers
_ENOUGH = 20  # elements on each side of a comparison


@dataclass(frozen=True)
class Arguments:
    """What both functions are given.

    Attributes:
        leaves: the arguments that are traced, by name.
        call: a function, given those -> its result.
        kept: names of those that keep their values.
    """

    leaves: dict[str, Any]
    call: Callable[..., Any]
    kept: frozenset[str]

    @classmethod
    def flattened(cls, args: Sequence[Any], keep: Collection[int]) -> "Arguments":
        named, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
        every = {f"args{keystr(path)}": leaf for path, leaf in named}
        leaves = {name: leaf for name, leaf in every.items() if hasattr(leaf, "dtype") or isinstance(leaf, float)}

        def call(function: Callable[..., Any], *traced: Any) -> Any:
            return function(*jax.tree.unflatten(tree, (every | dict(zip(leaves, traced, strict=True))).values()))

        kept = (name for (path, _), name in zip(named, every, strict=True) if path[0].idx in keep)
        return cls(leaves, call, frozenset(kept))

    def with_pullback(self, program: "TracedFunction") -> "Arguments":
        """Also cotangents of the results of a program like this; a call returns gradients, too."""
        floats = [name for name, leaf in self.leaves.items() if is_float(jnp.result_type(leaf))]
        results = {name: output for name, output in program.outputs.items() if is_float(output.dtype)}

        def call(function: Callable[..., Any], *traced: Any) -> Any:
            values = dict(zip([*self.leaves, *results], traced, strict=True))

            def results_at(some: dict[str, Any]) -> Any:
                out = self.call(function, *((values | some)[name] for name in self.leaves))
                named = dict(zip(program.outputs, jax.tree.leaves(out), strict=True))
                return {name: named[name] for name in results}, out

            _, pullback, out = jax.vjp(results_at, {name: values[name] for name in floats}, has_aux=True)
            return out, pullback({name: values[name] for name in results})

        cotangents = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in results.items()}
        return Arguments(self.leaves | cotangents, call, self.kept)

    def values(self, kept: Collection[str]) -> list[Value]:
        """Random numbers, in the context of a seed."""
        return [self._value(n, leaf, name in kept) for n, (name, leaf) in enumerate(self.leaves.items())]

    @staticmethod
    def _value(n: int, leaf: Any, kept: bool) -> Value:
        dtype = jnp.result_type(leaf)
        if is_float(dtype) and not kept:
            return drawn(np.shape(leaf), n)
        return constant(np.array(n + 2) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, dtype)


@dataclass(frozen=True)
class TracedFunction:
    """A traced function."""

    name: str
    function: Callable[..., Any]
    jaxpr: ClosedJaxpr
    outputs: dict[str, Any]  # what they are called -> shape and dtype
    flow: Flow
    seen: "Observed"

    @classmethod
    def traced(cls, name: str, function: Callable[..., Any], inputs: Arguments) -> "TracedFunction":
        try:
            with told(f"{name} cannot be traced", "what JAX can trace"):
                call = functools.partial(inputs.call, function)
                jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*inputs.leaves.values())
        except UserError as error:
            what_is_valid = str(error)
            if re.search(r"\bmesh|devices|\baxis name", what_is_valid):
                meshes = "mesh={'data': 2, …}, or a jax.sharding.AbstractMesh with axes of the type Auto"
                what_is_valid += f"; where devices do not exist, {meshes}"
            raise UserError(what_is_valid) from None
        for equation in equations(jaxpr.jaxpr):
            dtypes = (variable.aval.dtype for variable in ([] if [*programs(equation)] else equation.outvars))
            if any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
                raise RunError(
                    f"{name}: no rule for complex numbers, as those of the primitive {equation.primitive.name}"
                )
        leaves = tree_leaves_with_path(out)
        outputs = {f"output {keystr(path)}" if path else "the output": aval for path, aval in leaves}
        return cls(name, function, jaxpr, outputs, Flow(jaxpr), Observed())

    def ways(self) -> set[str]:
        """In which ways it is worth running."""
        ways = {AS_IT_IS}
        for equation in equations(self.jaxpr.jaxpr):
            name, inputs = equation.primitive.name, equation.invars
            if name in BRANCHES and is_float(inputs[0].aval.dtype) and not inputs[0].aval.shape:
                ways.add(OTHERWISE)
            if name == "is_finite":
                ways.add(NOT_FINITE)
        return ways

    def run(self, values: Sequence[Value], context: Any, way: str = "", machine: Any = None) -> "FunctionRun":
        machine = (machine or ObservingInterpreter)(self.seen, *context)
        machine.finite, machine.flipped = way != NOT_FINITE, way == OTHERWISE
        machine.flipping = self.seen.one_sided
        try:
            return FunctionRun(
                machine, dict(zip(self.outputs, map(elements, machine(self.jaxpr, values)), strict=True))
            )
        except RunError as error:
            raise type(error)(f"{self.name}: {error}") from error


def line_of(equation: Any) -> str:
    """Of the program, without folders."""
    return source_info_util.summarize(equation.source_info).rpartition("/")[2]


class Observed:
    """What was seen of the numbers of a program, in all runs.

    Attributes:
        sides: how many elements of an array were less than a constant (-1), equal (0) and greater (1), by the equation
            that compares them.
        exponents: the first two elements of exponents, by equation and turn, and which of them vary.
        vanished: whether exponentials of finite numbers were 0.
    """

    def __init__(self) -> None:
        self.sides: dict[int, Counter[float]] = {}
        self.exponents: dict[tuple[int, int], tuple[Any, np.ndarray]] = {}
        self.vanished = False

    @property
    def one_sided(self) -> set[int]:
        """The equations that always had the same result."""
        return {key for key, sides in self.sides.items() if len(sides) < 2}

    @property
    def few(self) -> bool:
        """Whether a side has some elements, but so few that all may be on one side of another comparison."""
        return any(0 < sides[side] < _ENOUGH for sides in self.sides.values() if len(sides) > 1 for side in (-1, 1))

    @property
    def exhausted(self) -> bool:
        """Whether an exponent varies only in its first element, so that its exponential does not."""
        return any(varies[0] and not varies[1] for _, varies in self.exponents.values())

    def compared(self, equation: Any, x: Value, y: Value) -> None:
        """Note on which sides of a constant the numbers of an array are; scalars are compared both ways in any case."""
        numbers, one = (x, y) if y[0].size == 1 or (0 in y[0].strides and np.ptp(y[0]) == 0) else (y, x)
        if (one[0].size > 1 and np.ptp(one[0])) or numbers.ndim == 2 or not np.isfinite(estimate(one)).all():
            return
        keys = ordered(numbers)[~is_lowest(numbers)]
        if len(keys):
            self.sides.setdefault(id(equation), Counter()).update(np.sign(keys - ordered(one).flat[0]).tolist())

    def exponent(self, key: tuple[int, int], x: Value) -> None:
        """Note which elements vary; those of another turn may have more left."""
        finite = ~is_lowest(x)[0]
        self.vanished |= bool((estimate(x)[0][finite] < UNDERFLOW).any())
        known = self.exponents.get(key)
        exact = elements(x)[:2, finite]
        if exact.shape[1] and not (known and known[1].all()):
            first, varies = known or (exact[:, :1], np.zeros(2, bool))
            self.exponents[key] = first, varies | (exact != first).any(1)


@dataclass(frozen=True)
class FunctionRun:
    machine: Any
    outputs: dict[str, np.ndarray]  # elements


class ObservingInterpreter(Interpreter):
    """An interpreter that notes the numbers of named values, on any device and in any turn of a loop."""

    def __init__(self, seen: Observed, *context: Any):
        super().__init__(*context)
        self.sites: dict[str, list[np.ndarray]] = {}
        self._seen, self._executed = seen, Counter[int]()

    def named(self, name: str, x: Value) -> Value:
        self.sites.setdefault(name, []).append(np.unique(packed(elements(x))))
        return x

    def computed(self, name: str, equation: Any, values: list[Value], out: Value) -> None:
        if name in BRANCHES or name in ("max", "min"):
            self._seen.compared(equation, *values)
        elif name == "clamp":
            low, x, high = values
            self._seen.compared(equation, x, low)
            self._seen.compared(equation, x, high)
        elif name in ("exp", "exp2", "expm1", "logistic"):
            self._executed[id(equation)] += 1
            self._seen.exponent((id(equation), self._executed[id(equation)]), values[0])


class RecordingInterpreter(ObservingInterpreter):
    """An interpreter that notes all numbers; or in turn equations, and whether they give numbers that are not known."""

    def __init__(self, *context: Any, known: np.ndarray | None = None):
        super().__init__(*context)
        self.numbers: list[np.ndarray] = []
        self.log: list[tuple[Any, bool]] = []
        self._known = known

    def _computed(self, equation: Any, values: list[Value]) -> Any:
        out = super()._computed(equation, values)
        pairs = zip(out if equation.primitive.multiple_results else [out], equation.outvars, strict=True)
        distinct = [np.unique(packed(elements(x))) for x, variable in pairs if is_float(variable.aval.dtype)]
        if self._known is None:
            self.numbers += distinct
            if sum(map(len, self.numbers[1:])) > 1 << 22:
                self.numbers = [np.unique(np.concatenate(self.numbers))]
        elif distinct:
            numbers = np.concatenate(distinct)
            place = np.searchsorted(self._known, numbers).clip(max=len(self._known) - 1)
            self.log.append((equation, bool((self._known[place] != numbers).any())))
        return out


def packed(x: np.ndarray) -> np.ndarray:
    """An integer for every number."""
    return x[0] << 31 | x[1] if len(x) > 1 else x[0]
