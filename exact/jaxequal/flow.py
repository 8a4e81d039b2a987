"""What becomes of values in a traced program, without running it: which arguments it compares with constants, and which
laws of functions it may need that the fields do not have."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_MOVES = frozenset((
    "all_gather", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "device_put", "dynamic_slice",
    "expand_dims", "gather", "optimization_barrier", "pad", "pvary", "reshape", "rev", "sharding_constraint", "slice",
    "split", "squeeze", "stop_gradient", "tile", "transpose", "unstack",
))  # fmt: skip
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
_LOGARITHMS = frozenset(("log", "log1p"))
_OF_LOGARITHMS = _MOVES | {"add", "sub", "mul", "neg", "max", "min", "reduce_max", "reduce_sum", "select_n", "psum"}
_SQUARES = frozenset(("square", "integer_pow"))
_CONSTANT, _LOG, _ROOT = "constant", "log", "root"
_Labels = frozenset[Any]  # of a value: numbers of arguments that it consists of, and what else it is

LAWS = {_LOG: "takes exp of a log", _ROOT: "squares a square root"}


class Flow:
    """What a program does.

    Attributes:
        read: numbers of the arguments that it compares with constants.
        laws: what it does that only a law makes equal to something else.
    """

    def __init__(self, program: ClosedJaxpr):
        self.read: set[int] = set()
        self.laws: set[str] = set()
        self._run(program.jaxpr, [frozenset({n}) for n in range(len(program.jaxpr.invars))])

    def _run(self, jaxpr: Jaxpr, labels: Sequence[_Labels]) -> list[_Labels]:
        known = dict(zip(jaxpr.invars, labels, strict=True))

        def read(variable: Any) -> _Labels:
            if isinstance(variable, Literal) or variable in jaxpr.constvars:
                return frozenset({_CONSTANT})
            return known.get(variable, frozenset())

        for equation in jaxpr.eqns:
            inputs = [read(variable) for variable in equation.invars]
            inner = [*programs(equation)]
            out = self._called(equation, inner, inputs) if inner else self._computed(equation, inputs)
            known.update(zip(equation.outvars, out, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _called(self, equation: Any, inner: Sequence[Jaxpr], inputs: list[_Labels]) -> list[_Labels]:
        """The last inputs are those of inner programs, but for a `while`, of which nothing is known. What one turn of a
        `scan` carries is there in the next."""
        results = []
        for program in inner:
            known = inputs[len(inputs) - len(program.invars) :]
            if len(known) < len(program.invars) or equation.primitive.name == "while":
                known = [frozenset()] * len(program.invars)
            out = self._run(program, known)
            first, count = (equation.params.get(key, 0) for key in ("num_consts", "num_carry"))
            if equation.primitive.name == "scan":
                again = [old | new for old, new in zip(known[first:][:count], out, strict=False)]
                out = self._run(program, [*known[:first], *again, *known[first + count :]])
            results.append(out)
        columns = [frozenset().union(*each) for each in zip(*results, strict=False)]
        return (columns + [frozenset()] * len(equation.outvars))[: len(equation.outvars)]

    def _computed(self, equation: Any, inputs: list[_Labels]) -> list[_Labels]:
        name, of_all = equation.primitive.name, frozenset[Any]().union(*inputs)
        to_truth = name == "convert_element_type" and equation.params["new_dtype"].kind == "b"
        if to_truth or (name in _COMPARISONS and frozenset({_CONSTANT}) in inputs):
            self.read |= {label for label in of_all if isinstance(label, int)}
        squared = name in _SQUARES or (name == "mul" and equation.invars[0] is equation.invars[1])
        for label, sinks in ((_LOG, name in ("exp", "exp2")), (_ROOT, squared)):
            if sinks and label in of_all:
                self.laws.add(LAWS[label])
        out = of_all if name in _MOVES else of_all & {_LOG} if name in _OF_LOGARITHMS else frozenset()
        out |= {_LOG} if name in _LOGARITHMS else {_ROOT} if name == "sqrt" else frozenset()
        return [out] * len(equation.outvars)


def programs(equation: Any) -> Iterator[Jaxpr]:
    """Those that an equation runs."""
    for param in equation.params.values():
        for each in param if isinstance(param, tuple | list) else (param,):
            if isinstance(each, ClosedJaxpr | Jaxpr):
                yield each.jaxpr if isinstance(each, ClosedJaxpr) else each


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Those of a program and of all programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in programs(equation):
            yield from equations(inner)
