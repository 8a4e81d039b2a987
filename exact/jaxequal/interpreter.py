"""Runs a traced program for all devices at once, in numbers that are never rounded (`numbers.py`)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxequal import contractions, indexing  # noqa: F401  # they add their rules
from jaxequal.arrays import ARRAYS
from jaxequal.collectives import COLLECTIVES, Devices
from jaxequal.errors import RunError
from jaxequal.functions import BRANCHES, FUNCTIONS
from jaxequal.numbers import Value, constant, elements, is_float, is_key, seeded, whole
from jaxequal.private import expansion

MOST_TURNS = 10_000  # of a `while`


class UnknownPrimitive(RunError):
    """A program has a primitive without a rule."""


class Interpreter:
    """Runs traced programs.

    Attributes:
        finite: what `isfinite` says of every number.
        flipped: scalar numbers, unless all are small integers, compare the other way round, so that a program takes its
            other branches; so do arrays in the equations of `flipping`.
        disagreeing: shapes and dtypes of results whose replicas differ between devices.
        equations: how many were run.
    """

    def __init__(self, seed: int = 0, scale: float = 1.0, levels: int = 3, underflow: float = -math.inf):
        self.context, self.finite = (seed, scale, levels, underflow), True
        self.flipped, self.flipping = False, set[int]()
        self.equations, self.disagreeing = 0, []  # type: tuple[int, list[Any]]
        self._constants: dict[int, tuple[Any, Value]] = {}
        self._scans: dict[int, tuple[Any, Sequence[np.ndarray], list[Value]]] = {}
        self._decisions = 0  # results of `flipped` so far, and calls of the program's functions

    def __call__(self, traced: ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
        """The results of a program.

        Raises:
            UnknownPrimitive: a primitive has no rule.
            RunError: a `while` goes on for too long.
        """
        self._devices, self._inside_scan = Devices.grid({}), False
        with seeded(*self.context), np.errstate(all="ignore"):
            return self._closed(traced, values)

    def _closed(self, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
        """Run a jaxpr with or without constants."""
        inner, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", [])
        known = [self._constant(x, x, variable) for x, variable in zip(consts, inner.constvars, strict=True)]
        return self._run(inner, known, values)

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Value], values: Sequence[Value]) -> list[Value]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

        def read(variable: Any) -> Value:
            is_known = not isinstance(variable, Literal)
            return known[variable] if is_known else self._constant(variable, variable.val, variable)

        for equation in jaxpr.eqns:
            self.equations += 1
            out = self._computed(equation, [read(variable) for variable in equation.invars])
            known.update(zip(equation.outvars, out if equation.primitive.multiple_results else [out], strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _constant(self, holder: Any, array: Any, variable: Any) -> Value:
        if id(holder) not in self._constants:
            self._constants[id(holder)] = holder, constant(array, variable.aval.dtype)
        return self._constants[id(holder)][1]

    def _computed(self, equation: Any, values: list[Value]) -> Any:
        name = equation.primitive.name
        if name in FUNCTIONS:
            return self._elementwise(name, equation, values)
        if name in ARRAYS:
            return ARRAYS[name](equation, *values)
        if name in COLLECTIVES:
            return COLLECTIVES[name](self._devices, equation, *values)
        if name in CONTROL:
            return CONTROL[name](self, equation, *values)
        if any(is_float(variable.aval.dtype) for variable in [*equation.invars, *equation.outvars]):
            place = _source_line(equation)
            raise UnknownPrimitive(f"no rule for the primitive {name}" + f" ({place})" * bool(place))
        return _by_jax(equation, values)

    def _elementwise(self, name: str, equation: Any, values: list[Value]) -> Value:
        of_integers, of_numbers = FUNCTIONS[name]
        rank = max(each.ndim for each in values)
        values = [each.reshape(*each.shape, *[1] * (rank - each.ndim)) for each in values]  # scalars
        if not is_float(equation.invars[0].aval.dtype):
            return of_integers(*values).astype(equation.outvars[0].aval.dtype, copy=False)
        if name == "is_finite":
            return of_numbers(*values) & self.finite
        decides = name in BRANCHES and (rank == 2 or id(equation) in self.flipping)
        if decides and not all(whole(x)[1].all() for x in values):
            self._decisions += 1
            of_numbers = FUNCTIONS[BRANCHES[name] if self.flipped else name][1]
        out = of_numbers(*values)
        self.computed(name, equation, values, out)
        return out

    def computed(self, name: str, equation: Any, values: list[Value], out: Value) -> None:
        """Numbers of a function of each element."""

    def named(self, name: str, x: Value) -> Value:
        """What `checkpoint_name` gave a name."""
        return x

    # Control flow.

    def _call(self, equation: Any, *values: Value) -> list[Value]:
        params = equation.params
        return self._closed(params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"], values)

    def _solved(self, equation: Any, *values: Value) -> list[Value]:
        """By the solver that the program has."""
        params, counts = equation.params["jaxprs"], equation.params["const_lengths"]
        first = counts.matvec + counts.vecmat
        consts, others = values[first : first + counts.solve], values[sum(counts) :]
        return self._closed(params.solve, [*consts, *others])

    def _scan(self, equation: Any, *values: Value) -> list[Value]:
        """A scan that is in no other, decides nothing and has the devices and values of before is not run again, even
        if `finite` has changed."""
        _, before, out = self._scans.get(id(equation), (None, [], []))
        inputs = [self._devices.coordinates, *values]
        if before and all(map(np.array_equal, before, inputs)):
            return out
        outside, self._inside_scan, decisions = self._inside_scan, True, self._decisions
        out = self._turns(equation, values)
        self._inside_scan = outside
        if not outside and self._decisions == decisions:
            self._scans[id(equation)] = equation, inputs, out
        return out

    def _turns(self, equation: Any, values: Sequence[Value]) -> list[Value]:
        """A carry has the rank that it has inside, and what is scanned one dim more."""
        params, inner = equation.params, getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
        carried = sum(x.aval.ndim == y.aval.ndim for x, y in zip(equation.outvars, inner.outvars, strict=True))
        scanned = sum(x.aval.ndim > y.aval.ndim for x, y in zip(equation.invars, inner.invars, strict=True))
        length, back = params["length"], params["reverse"]
        consts = len(values) - carried - scanned
        carry, xs, rows = [*values[consts:][:carried]], values[consts + carried :], []
        for turn in reversed(range(length)) if back else range(length):
            out = self._closed(params["jaxpr"], [*values[:consts], *carry, *(x[:, :, turn] for x in xs)])
            carry = out[:carried]
            rows.append(out[carried:])
        if not rows:
            stacked = (variable.aval for variable in equation.outvars[carried:])
            return [*carry, *(constant(np.zeros(each.shape), each.dtype) for each in stacked)]
        columns = zip(*(rows[::-1] if back else rows), strict=True)
        return [*carry, *(np.stack(np.broadcast_arrays(*each), 2) for each in columns)]

    def _cond(self, equation: Any, which: Value, *values: Value) -> list[Value]:
        branches, which = equation.params["branches"], which[0].astype(int)
        out: list[Value] = []
        for branch in np.unique(which):
            there = np.broadcast_to(which == branch, self._devices.count)
            out = self._on(there, branches[np.clip(branch, 0, len(branches) - 1)], values, out)
        return out

    def _while(self, equation: Any, *values: Value) -> list[Value]:
        params, (first, second) = equation.params, (equation.params["cond_nconsts"], equation.params["body_nconsts"])
        state = [*values[first + second :]]
        for _ in range(MOST_TURNS):
            (goes_on,) = self._closed(params["cond_jaxpr"], [*values[:first], *state])
            if not goes_on.any():
                return state
            there = np.broadcast_to(goes_on[0], self._devices.count)
            state = self._on(there, params["body_jaxpr"], [*values[first:][:second], *state], state)
        raise RunError(f"a while loop goes on after {MOST_TURNS} turns ({_source_line(equation)})")

    def _on(self, mask: np.ndarray, jaxpr: Any, values: Sequence[Value], others: Sequence[Value]) -> list[Value]:
        """Results on some of the devices, and `others` elsewhere."""
        if mask.all():
            return self._closed(jaxpr, values)
        everywhere = self._devices
        self._devices = Devices(everywhere.sizes, everywhere.coordinates[mask])
        inner = self._closed(jaxpr, [x[:, mask] if x.shape[1] > 1 else x for x in values])
        self._devices = everywhere
        whole = [everywhere.spread(x).copy() for x in others] or [
            np.zeros((len(x), len(mask), *x.shape[2:]), x.dtype) for x in inner
        ]
        for x, part in zip(whole, inner, strict=True):
            x[:, mask] = part
        return whole

    def _shard_map(self, equation: Any, *values: Value) -> list[Value]:
        """On all devices; inside of another, in groups of those that only the axes which become manual tell apart."""
        params, outside, inside = equation.params, self._devices, bool(self._devices.sizes)
        self._devices = devices = outside if inside else Devices.grid(dict(params["mesh"].shape))
        others = [
            place for place, axis in enumerate(devices.sizes) if inside and axis not in params["newly_manual_axes"]
        ]
        groups = np.unique(devices.coordinates[:, others], axis=0, return_inverse=True)[1].reshape(-1)
        shards = []
        for x, spec in zip(values, params["in_specs"], strict=True):
            pairs = zip(devices.spread(x).swapaxes(0, 1), devices.slices(spec, x.shape[2:]), strict=True)
            x = np.stack([array[index] for array, index in pairs], 1) if any(spec.partitions) else x
            shards.append(devices.addends(x, spec.unreduced) if spec.unreduced else x)
        found, out = self._closed(params["jaxpr"], shards), []
        for x, spec, variable in zip(found, params["out_specs"], equation.outvars, strict=True):
            x = devices.summed(x, spec.unreduced, variable.aval.dtype) if spec.unreduced else x
            whole = np.empty((groups.max() + 1, len(x), *variable.aval.shape), x.dtype)
            parts = [
                *zip(groups, devices.slices(spec, variable.aval.shape), devices.spread(x).swapaxes(0, 1), strict=True)
            ]
            for group, own, part in parts:
                whole[group][own] = part
            if any((elements(whole[group][own]) != elements(part)).any() for group, own, part in parts):
                self.disagreeing.append(variable.aval)
            out.append(np.moveaxis(whole[groups] if inside else whole, 0, 1))
        self._devices = outside
        return out

    def _expanded(self, equation: Any, *values: Value) -> list[Value]:
        """What JAX from version 0.12 keeps whole when it traces, such as `searchsorted`."""
        types = [jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype) for each in equation.invars]
        return self._closed(jax.make_jaxpr(expansion(equation.params))(*types), values)

    def _callback(self, equation: Any, *values: Value) -> tuple:
        """Call it for every device, with numbers of the first field as doubles."""
        self._decisions += 1
        for device in range(self._devices.count):
            own = (self._devices.spread(x)[0, device] for x in values)
            equation.params["callback"](
                *(x.astype("d") if len(of) > 1 else x for x, of in zip(own, values, strict=True))
            )
        return ()


def _by_jax(equation: Any, values: Sequence[Value]) -> Any:
    """The results of a primitive of integers and keys, such as one of `jax.random`, by JAX for every device."""
    results, several = [], equation.primitive.multiple_results
    for device in range(max((x.shape[1] for x in values), default=1)):
        own = [x[0, min(device, x.shape[1] - 1)] for x in values]
        given = (_array(x, variable.aval) for x, variable in zip(own, equation.invars, strict=True))
        found = equation.primitive.bind(*given, **equation.params)
        found = found if several else [found]
        results.append([constant(x, variable.aval.dtype) for x, variable in zip(found, equation.outvars, strict=True)])
    out = [np.concatenate(each, 1) for each in zip(*results, strict=True)]
    return out if several else out[0]


def _array(x: np.ndarray, aval: Any) -> jax.Array:
    if not is_key(aval.dtype):
        return jnp.asarray(x, aval.dtype)
    words = jnp.asarray(np.array(x, order="C")[..., None].view(np.uint32))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(jnp.zeros((), aval.dtype)))


CONTROL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("jit", "closed_call", "eval_jaxpr", "remat2"), Interpreter._call),  # the second and third are one
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), Interpreter._call),
    "custom_linear_solve": Interpreter._solved,
    "reduce_window": lambda machine, equation, *values: contractions.folded_window(machine._closed, equation, *values),
    "scan": Interpreter._scan,
    "cond": Interpreter._cond,
    "while": Interpreter._while,
    "shard_map": Interpreter._shard_map,
    "debug_callback": Interpreter._callback,
    "name": lambda machine, equation, x: machine.named(equation.params["name"], x),
    "call_hi_primitive": Interpreter._expanded,
}


def _source_line(equation: JaxprEqn) -> str:
    return source_info_util.summarize(equation.source_info)
