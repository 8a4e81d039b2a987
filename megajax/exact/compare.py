"""Whether two JAX functions compute the same, exactly, and where they first differ."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, use_abstract_mesh
from jax.tree_util import keystr, tree_leaves_with_path

from megajax.core.errors import RunError, UserError, told
from megajax.exact.functions import BRANCHES
from megajax.exact.interpreter import Interpreter
from megajax.exact.numbers import PRIMES, Value, constant, drawn, is_float, seeded, signed

_AS_IT_IS, _OTHERWISE, _NOT_FINITE = "", " where numbers compare the other way round", " where isfinite says no"
_LARGEST = 64  # numerator and denominator of a factor that is told


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` found; true if the functions are equal.

    Attributes:
        equal: whether they are.
        words: how much was compared, or what differs first.
    """

    equal: bool
    words: str

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        return self.words


def compare(
    f: Callable[..., Any],
    g: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    *,
    repeats: int = 1,
    seed: int = 0,
) -> Comparison:
    """Whether two functions compute the same, and where they first differ: exactly, without devices or a compiler.

    Both are traced, then run with elements of finite fields in place of floats, for all devices of every `shard_map`.
    Sums and products in any order, however divided, are equal there, or one of the functions is wrong. So is
    exp(x) exp(y) = exp(x + y). All other functions are random, so that two programs also differ if they are equal
    only because exp(log(x)) = x or sqrt(x)² = x. Rounding, overflow and what a compiler does are
    not seen.

    Args:
        f: the function to check, such as one with a `shard_map` and collectives. Sharding constraints are ignored.
        g: what it should compute.
        args: the arguments of both, pytrees of arrays or `jax.ShapeDtypeStruct`. Floats are replaced by random numbers;
            integers, bools and keys keep their values.
        mesh: the mesh in whose context the functions are traced, or the sizes of its axes, `{"data": 2, "tensor": 4}`;
            not needed where they name theirs. Its devices need not exist.
        repeats: how many random arguments are tried.
        seed: of the first of them.

    Raises:
        RunError: a function has a primitive without a rule, or a loop or collective without an end.
    """
    _check(args, repeats)
    with contextlib.nullcontext() if mesh is None else use_abstract_mesh(_abstract(mesh)):
        of_f, of_g = _Program.traced("f", f, args), _Program.traced("g", g, args)
    problem = _of_another_form(of_f, of_g)
    for each in range(seed, seed + repeats):
        for way in _ways(of_f.ways(), of_g.ways()):
            problem = problem or _difference(of_f, of_g, _values(args, of_g.jaxpr, each), each, way)
    sizes = [aval.size for aval in of_g.outputs.values()]
    equal = f"equal: {'all ' * (sum(sizes) > 1)}{_many(sum(sizes), 'number')} of {_many(len(sizes), 'output')}"
    return Comparison(not problem, f"different: {problem}" if problem else equal)


def _check(args: Any, repeats: int) -> None:
    if not isinstance(args, tuple | list):
        raise UserError(f"args is a {type(args).__name__}; valid: a tuple of the functions' arguments")
    if repeats < 1:
        raise UserError(f"repeats is {repeats}; valid: at least 1")
    for path, leaf in tree_leaves_with_path(tuple(args)):
        name, dtype = f"args{keystr(path)}", getattr(leaf, "dtype", None)
        if dtype is None and not isinstance(leaf, int | float):
            raise UserError(f"{name} is a {type(leaf).__name__}; valid: arrays, jax.ShapeDtypeStruct, trees of them")
        if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
            raise UserError(f"{name} is {dtype}; valid: floats, integers, bools, keys")
        if isinstance(leaf, jax.ShapeDtypeStruct) and not is_float(dtype):
            raise UserError(f"{name} is {dtype} without values; valid: an array, since only floats are made up")


def _ways(of_f: set[str], of_g: set[str]) -> list[str]:
    """`isfinite` that only one of them asks guards numerics, as in `jax.nn.logsumexp`, and decides nothing."""
    return sorted((of_f | of_g) - {_NOT_FINITE} | of_f & of_g)


def _abstract(mesh: Any) -> AbstractMesh:
    if isinstance(mesh, Mapping):
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), (AxisType.Auto,) * len(mesh))
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise UserError(f'mesh is a {type(mesh).__name__}; valid: a mesh, or its axes\' sizes as {{"data": 2}}')
    return mesh.abstract_mesh


def _values(args: Sequence[Any], jaxpr: ClosedJaxpr, seed: int) -> list[Value]:
    with seeded(seed):
        return [
            drawn(aval.shape, n) if is_float(aval.dtype) else constant(leaf, aval.dtype)
            for n, (leaf, aval) in enumerate(zip(jax.tree.leaves(tuple(args)), jaxpr.in_avals, strict=True))
        ]


@dataclass(frozen=True)
class _Program:
    """A traced function."""

    name: str
    jaxpr: ClosedJaxpr
    outputs: dict[str, Any]  # what they are called -> shape and dtype

    @classmethod
    def traced(cls, name: str, function: Callable[..., Any], args: Sequence[Any]) -> "_Program":
        meshes = "mesh={'data': 2, …}, or a jax.sharding.AbstractMesh with axes of the type Auto"
        valid = f"what JAX can trace, and where devices do not exist, {meshes}"
        with told(f"{name} cannot be traced", valid):
            jaxpr, out = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = tree_leaves_with_path(out)
        return cls(name, jaxpr, {f"output {keystr(path)}" if path else "the output": aval for path, aval in leaves})

    def ways(self) -> set[str]:
        """In which ways it is worth running."""
        found = {_AS_IT_IS}
        for equation in _equations(self.jaxpr.jaxpr):
            name, inputs = equation.primitive.name, equation.invars
            if name in BRANCHES and is_float(inputs[0].aval.dtype) and not inputs[0].aval.shape:
                found.add(_OTHERWISE)
            if name == "is_finite":
                found.add(_NOT_FINITE)
        return found

    def run(self, values: Sequence[Value], seed: int, way: str) -> tuple["_Machine", dict[str, Value]]:
        machine = _Machine(seed)
        machine.finite, machine.flipped = way != _NOT_FINITE, way == _OTHERWISE
        try:
            return machine, dict(zip(self.outputs, machine(self.jaxpr, values), strict=True))
        except RunError as error:
            raise type(error)(f"{self.name}: {error}") from error


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Those of a program and of all programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves([*equation.params.values()]):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from _equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


class _Machine(Interpreter):
    """An interpreter that notes the numbers of named values, on any device and in any turn of a loop."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.sites: dict[str, list[np.ndarray]] = {}

    def named(self, name: str, x: Value) -> Value:
        self.sites.setdefault(name, []).append(np.unique(_packed(x)))
        return x


def _packed(x: Value) -> np.ndarray:
    """An integer for every number."""
    return x[0] << 31 | x[1] if len(x) > 1 else x[0]


def _of_another_form(f: _Program, g: _Program) -> str:
    """The first output that only one of them has, or that has another shape."""
    for output in [*g.outputs, *f.outputs]:
        mine, its = f.outputs.get(output), g.outputs.get(output)
        if mine is None or its is None:
            return f"{output} is in {(g if mine is None else f).name} only"
        if mine.shape != its.shape or is_float(mine.dtype) != is_float(its.dtype):
            return f"{output} is {_form(mine)} in f, {_form(its)} in g"
    return ""


def _form(aval: Any) -> str:
    return f"{aval.dtype}{[*aval.shape]}"


def _difference(f: _Program, g: _Program, values: Sequence[Value], seed: int, way: str) -> str:
    """What differs, in lines of words."""
    (mine, found), (its, right) = f.run(values, seed, way), g.run(values, seed, way)
    wrong = [output for output in right if (found[output] != right[output]).any()]
    lines = [f"{wrong[0]}{way}, in {_where(found[wrong[0]], right[wrong[0]])}"] if wrong else []
    if len(wrong) > 1:
        lines += [f"{len(wrong)} of {len(right)} outputs differ"]
    lines += _first_site(mine.sites, its.sites) if wrong else []
    for program, machine in ((f, mine), (g, its)):
        for aval in machine.disagreeing[:1]:
            lines += [f"a shard_map of {program.name} has a result {_form(aval)} that devices should share but do not"]
    return "\n".join(lines)


def _where(x: Value, right: Value) -> str:
    """Which numbers of an output are wrong, and how."""
    wrong = (x != right).any(0)[0]
    x, right = x[:, 0][:, wrong], right[:, 0][:, wrong]
    count = f"{len(x[0])} of {_many(wrong.size, 'number')}"
    first = f", the first at {np.argwhere(wrong)[0].tolist()}" if wrong.ndim else ""
    times, how = factor(x, right) if len(x) > 1 else None, ""
    if times is not None:
        how = f": f has {times} times what g has" if times else ": f has 0"
    elif np.array_equal(np.sort(_packed(x)), np.sort(_packed(right))):
        how = ": f has them at other places"
    return f"{count}{first}{how}"


def factor(x: np.ndarray, right: np.ndarray) -> Fraction | None:
    """n/d for small n and d, if the numbers x are that times the right ones; [fields, numbers]."""
    there = np.flatnonzero(right[0] > 0)[:1]
    if not len(there) or (right < 0).any() or (x < 0).any():
        return None
    prime, primes = int(PRIMES[0]), PRIMES[: len(x), None]
    ratio = int(x[0, there[0]]) * pow(int(right[0, there[0]]), -1, prime)
    for below in range(1, _LARGEST + 1):
        above = int(signed(np.array(ratio * below % prime), prime))
        if abs(above) <= _LARGEST and not ((x * below - right * above) % primes).any():
            return Fraction(above, below)
    return None


def _first_site(found: Mapping[str, list[np.ndarray]], right: Mapping[str, list[np.ndarray]]) -> list[str]:
    """The first named value with numbers that f lacks. What only f has may be of a pipeline's idle turns."""
    names = [name for name in right if name in found]
    for place, name in enumerate(names):
        numbers = np.unique(np.concatenate(right[name]))
        lacking = len(np.setdiff1d(numbers, np.concatenate(found[name])))
        if lacking:
            before = f"; equal before it: {', '.join(names[:place])}" if place else ""
            count = f"{lacking} of its {_many(len(numbers), 'number')}"
            return [f"the first named value that differs is {name}: f lacks {count}{before}"]
    return [f"all named values are equal: {', '.join(names)}"] if names else []


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
