"""Whether two JAX functions compute the same, exactly, and where they first differ."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, Mesh, use_abstract_mesh
from jax.tree_util import keystr, tree_leaves_with_path

from jaxequal.errors import UserError, brief
from jaxequal.flow import equations, programs
from jaxequal.numbers import PRIMES, Value, is_float, seeded, signed
from jaxequal.programs import (
    AS_IT_IS,
    NOT_FINITE,
    OTHERWISE,
    UNDERFLOW,
    Arguments,
    RecordingInterpreter,
    TracedFunction,
    line_of,
    packed,
)

_LARGEST = 64  # numerator and denominator of a factor that is reported
_SCALES = 1.0, 2.0**-10  # of random arguments; the latter if a comparison takes one side alone with the former
_MOST_DRAWS = 24  # for each of `repeats`


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


@brief
def compare(
    f: Callable[..., Any],
    g: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    *,
    gradients: bool = False,
    keep: Collection[int] = (),
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
        args: the arguments of both, pytrees of arrays or `jax.ShapeDtypeStruct`. Floats are replaced by random numbers,
            but for arrays that a function compares with constants, such as masks; integers, bools and keys keep their
            values. Strings, and integers and bools of Python, are constants of the program.
        mesh: the mesh in whose context the functions are traced, or the sizes of its axes, `{"data": 2, "tensor": 4}`;
            not needed where they name theirs. Its devices need not exist.
        gradients: compare the gradients with respect to all floats of `args`, too, of random cotangents.
        keep: places in `args` of which all arrays keep their values.
        repeats: how many times as many random arguments are tried as are needed.
        seed: of the first of them.

    Raises:
        RunError: a function has a primitive without a rule, or a loop or collective without an end.
    """
    _check(args, repeats)
    inputs = Arguments.flattened(args, keep)
    with contextlib.nullcontext() if mesh is None else use_abstract_mesh(_abstract(mesh)):
        of_f, of_g = (TracedFunction.traced(name, each, inputs) for name, each in (("f", f), ("g", g)))
        if gradients and not _form_problem(of_f, of_g):
            inputs = inputs.with_pullback(of_g)
            of_f, of_g = (TracedFunction.traced(program.name, program.function, inputs) for program in (of_f, of_g))
    problem = _form_problem(of_f, of_g)
    return Comparison(False, f"different: {problem}") if problem else _Both(of_f, of_g, inputs, seed).compared(repeats)


@brief
def assert_equal(f: Callable[..., Any], g: Callable[..., Any], args: Sequence[Any], *more: Any, **options: Any) -> None:
    """Raise an `AssertionError` with what `compare` found, unless it is true; takes what `compare` takes."""
    found = compare(f, g, args, *more, **options)
    if not found:
        raise AssertionError(str(found))


@brief
def over_meshes(**sizes: Sequence[int]) -> Any:
    """Parametrize a test of pytest by `mesh`, the sizes of axes: every combination of `data=(1, 2), tensor=(1, 4)`."""
    import pytest

    meshes = [dict(zip(sizes, each, strict=True)) for each in itertools.product(*sizes.values())]
    return pytest.mark.parametrize(
        "mesh", meshes, ids=["-".join(f"{a}{n}" for a, n in mesh.items()) for mesh in meshes]
    )


def _check(args: Any, repeats: int) -> None:
    if not isinstance(args, tuple | list):
        raise UserError(f"args is a {type(args).__name__}; valid: a tuple of the functions' arguments")
    if repeats < 1:
        raise UserError(f"repeats is {repeats}; valid: at least 1")
    for path, leaf in tree_leaves_with_path(tuple(args)):
        name, dtype = f"args{keystr(path)}", getattr(leaf, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
            raise UserError(f"{name} is {dtype}; valid: floats, integers, bools, keys")
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.shape and not is_float(dtype):
            raise UserError(f"{name} is {dtype} without values; valid: an array, since only floats are made up")


def _abstract(mesh: Any) -> AbstractMesh:
    if isinstance(mesh, Mapping):
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), (AxisType.Auto,) * len(mesh))
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise UserError(f'mesh is a {type(mesh).__name__}; valid: a mesh, or its axes\' sizes as {{"data": 2}}')
    return mesh.abstract_mesh


class _Both:
    """Two programs, run with the same numbers.

    A number that is different is different in a field but for a chance of 2^-30. A mistake on one side of a comparison
    shows as soon as one element is on that side. Arguments are drawn until each side has 20 elements: another
    comparison that divides these in halves leaves none of them on one of its sides with a chance of 2^-20, or 10^-6.
    """

    def __init__(self, f: TracedFunction, g: TracedFunction, inputs: Arguments, seed: int):
        self.f, self.g, self.inputs, self.seed, self.levels = f, g, inputs, seed, 3
        read, names = f.flow.read | g.flow.read, [*inputs.leaves]
        compared = {names[n] for n in read}
        floats = [name for name, leaf in inputs.leaves.items() if is_float(jnp.result_type(leaf))]
        given = {name for name in floats if not isinstance(inputs.leaves[name], jax.ShapeDtypeStruct)}
        self.kept = sorted((compared | inputs.kept) & given)
        self.random = [name for name in floats if name not in self.kept]

    def compared(self, repeats: int) -> Comparison:
        """With more fields, if exponentials are nested."""
        while True:
            problem, unknown = self._difference(repeats)
            if problem:
                return Comparison(False, f"different: {problem}")
            if not (self.f.seen.exhausted or self.g.seen.exhausted):
                break
            if self.levels == len(PRIMES):
                nested = f"more than {self.levels - 1} exponentials are nested, of which no number tells two apart"
                return Comparison(False, f"not compared: {nested}")
            self.levels += 1
            self.f.seen.exponents.clear()
            self.g.seen.exponents.clear()
        if unknown:
            return Comparison(False, f"not compared: {unknown}")
        sizes = [aval.size for aval in self.g.outputs.values()]
        equal = f"equal: {'all ' * (sum(sizes) > 1)}{_many(sum(sizes), 'number')} of {_many(len(sizes), 'output')}"
        some = f"; {', '.join(self.kept)} {'keep their' if len(self.kept) > 1 else 'keeps its'} values"
        return Comparison(True, equal + some * bool(self.kept))

    def _difference(self, repeats: int) -> tuple[str, str]:
        """What differs in one of the draws; and what is not compared, since it is the same in all."""
        draws, done, right = [(n, _SCALES[0]) for n in range(repeats)], 0, list[Mapping[str, np.ndarray]]()
        seen = self.f.seen, self.g.seen
        while done < len(draws):
            for way in self._ways() if done < repeats else (AS_IT_IS,):
                problem, outputs = self._drawn(draws[done], way)
                if problem:
                    return problem, ""
                right += [outputs] if way == AS_IT_IS else []
            done += 1
            if done == len(draws) and draws[-1][1] == 1:
                if done < repeats * _MOST_DRAWS and any(each.few for each in seen):
                    draws.append((done, _SCALES[0]))
                elif any(each.one_sided or each.vanished for each in seen):
                    draws.append((done, _SCALES[1]))
        if seen[0].one_sided and seen[1].one_sided:
            problem, _ = self._drawn(draws[0], OTHERWISE)
            if problem:
                return problem, ""
        return "", self._independent(right) if self.random else ""

    def _independent(self, right: list[Mapping[str, np.ndarray]]) -> str:
        """Whether all floats of the results are the same in two draws."""
        context = self._context(1000, _SCALES[0])
        if len(right) < 2:
            right = [*right, self.g.run(self._values(context), context).outputs]
        floats = [name for name, aval in self.g.outputs.items() if is_float(aval.dtype) and aval.size]
        if not floats or any((other[name] != right[0][name]).any() for other in right[1:] for name in floats):
            return ""
        numbers = np.concatenate([right[0][name].reshape(len(right[0][name]), -1) for name in floats], 1)
        all_of = _many(sum(self.g.outputs[name].size for name in floats), "number")
        return f"{all_of} of the outputs are {'the same' if numbers.any() else '0'} whatever the arguments"

    def _ways(self) -> list[str]:
        """`isfinite` that only one of them asks guards numerics, as in `jax.nn.logsumexp`, and decides nothing."""
        of_f, of_g = self.f.ways(), self.g.ways()
        return sorted((of_f | of_g) - {NOT_FINITE} | of_f & of_g)

    def _context(self, draw: int, scale: float) -> tuple[int, float, int, float]:
        return self.seed + draw, scale, self.levels, UNDERFLOW

    def _values(self, context: tuple[int, float, int, float]) -> list[Value]:
        with seeded(*context):
            return self.inputs.values(self.kept)

    def _drawn(self, draw: tuple[int, float], way: str) -> tuple[str, Mapping[str, np.ndarray]]:
        """What differs, in lines of words, and what g gives."""
        context = self._context(*draw)
        values = self._values(context)
        f, g = self.f.run(values, context, way), self.g.run(values, context, way)
        wrong = [name for name in g.outputs if (f.outputs[name] != g.outputs[name]).any()]
        lines = [f"{wrong[0]}{way}, in {_where(f.outputs[wrong[0]], g.outputs[wrong[0]])}"] if wrong else []
        if len(wrong) > 1:
            lines += [f"{len(wrong)} of {len(g.outputs)} outputs differ"]
        if wrong:
            site, is_different = _first_site(f.machine.sites, g.machine.sites)
            lines += site if is_different else [*site, *self._first_line(values, context, way)]
        for program, run in ((self.f, f), (self.g, g)):
            for aval in run.machine.disagreeing[:1]:
                shared = f"a result {_form(aval)} that devices should share but do not"
                lines += [f"a shard_map of {program.name} has {shared}"]
            lines += [f"{program.name} {law}: see Limits in docs/exact.md" for law in program.flow.laws if wrong]
        return "\n".join(lines), g.outputs

    def _first_line(self, values: Sequence[Value], context: Any, way: str) -> list[str]:
        """The first equation of g that gives a number that f never has, but for those that f can do without: what uses
        their results gives numbers that it has."""
        known = np.unique(
            np.concatenate(self.f.run(values, context, way, RecordingInterpreter).machine.numbers or [np.full(1, -1)])
        )
        log = self.g.run(values, context, way, functools.partial(RecordingInterpreter, known=known)).machine.log
        users = dict[Any, set[int]]()
        for equation in equations(self.g.jaxpr.jaxpr):
            for variable in filter(lambda each: isinstance(each, Var), equation.invars):
                users.setdefault(variable, set()).add(id(equation))
        for turn, (equation, lacks) in enumerate(log):
            ids = set().union(*(users.get(out, ()) for out in equation.outvars))
            after = itertools.islice(log, turn + 1, None)
            later = itertools.islice((lacks_it for user, lacks_it in after if id(user) in ids), len(ids))
            if lacks and not [*programs(equation)] and all(later):
                lines = [line_of(equation), *(line_of(call) for call, _ in log[turn + 1 :] if [*programs(call)]), ""]
                line = next(filter(None, lines), "a line that JAX does not know")  # or that of what calls it
                return [f"f never has the value of g's {equation.primitive.name} at {line}"]
        return []


def _form_problem(f: TracedFunction, g: TracedFunction) -> str:
    """The first output that only one of them has, or that has another shape."""
    for output in [*g.outputs, *f.outputs]:
        mine, its = f.outputs.get(output), g.outputs.get(output)
        if mine is None or its is None:
            return f"{output} is in {(g if mine is None else f).name} only"
        if (mine.shape, mine.dtype) != (its.shape, its.dtype):
            return f"{output} is {_form(mine)} in f, {_form(its)} in g"
    return ""


def _form(aval: Any) -> str:
    return f"{aval.dtype}{[*aval.shape]}"


def _where(x: np.ndarray, right: np.ndarray) -> str:
    """Which numbers of an output are wrong, and how."""
    wrong = (x != right).any(0)[0]
    x, right = x[:, 0][:, wrong], right[:, 0][:, wrong]
    count = f"{len(x[0])} of {_many(wrong.size, 'number')}"
    first = f", the first at {np.argwhere(wrong)[0].tolist()}" if wrong.ndim else ""
    times, how = factor(x, right) if len(x) > 1 else None, ""
    if times is not None:
        how = f": f has {times} times what g has" if times else ": f has 0"
    elif np.array_equal(np.sort(packed(x)), np.sort(packed(right))):
        how = ": f has them at other places"
    return f"{count}{first}{how}"


def factor(x: np.ndarray, right: np.ndarray) -> Fraction | None:
    """n/d for small n and d, if the numbers x are that times the right ones; [fields, numbers]."""
    nonzero = np.flatnonzero(right[0] > 0)[:1]
    if not len(nonzero) or (right < 0).any() or (x < 0).any():
        return None
    prime, primes = int(PRIMES[0]), PRIMES[: len(x), None]
    ratio = int(x[0, nonzero[0]]) * pow(int(right[0, nonzero[0]]), -1, prime)
    for below in range(1, _LARGEST + 1):
        above = int(signed(np.array(ratio * below % prime), prime))
        if abs(above) <= _LARGEST and not ((x * below - right * above) % primes).any():
            return Fraction(above, below)
    return None


def _first_site(left: Mapping[str, list[np.ndarray]], right: Mapping[str, list[np.ndarray]]) -> tuple[list[str], bool]:
    """The first named value with numbers that f lacks, and whether there is one. What only f has may be of a pipeline's
    idle turns."""
    names = [name for name in right if name in left]
    for index, name in enumerate(names):
        numbers = np.unique(np.concatenate(right[name]))
        lacking = len(np.setdiff1d(numbers, np.concatenate(left[name])))
        if lacking:
            before = f"; equal before it: {', '.join(names[:index])}" if index else ""
            count = f"{lacking} of its {_many(len(numbers), 'number')}"
            return [f"the first named value that differs is {name}: f lacks {count}{before}"], True
    return ([f"all named values are equal: {', '.join(names)}"] if names else []), False


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
