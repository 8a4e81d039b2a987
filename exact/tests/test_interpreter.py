"""Control flow in one place gives what JAX gives; what is forced; what is refused in one line."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import Agreement, Case, exactly, names_in
from jax import lax

from jaxequal import interpreter
from jaxequal.errors import RunError
from jaxequal.interpreter import CONTROL, Interpreter, UnknownPrimitive
from jaxequal.numbers import Value, constant, drawn, elements, with_lowest

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
BRANCHES: list[Callable[..., Any]] = [lambda x: x, lambda x: 2 * x, lambda x: -x]


def running(carry: Any, x: Any) -> tuple[Any, Any]:
    return 2 * carry + x.sum(), (carry * x, carry)


@jax.custom_vjp
def backwards(x: Any) -> Any:
    return x * x


backwards.defvjp(lambda x: (x * x, x), lambda x, grad: (7 * x * grad,))


@jax.custom_jvp
def forwards(x: Any) -> Any:
    return x * x


forwards.defjvp(lambda x, dx: (x[0] ** 2, 5 * dx[0]))

CASES: dict[str, Case] = {
    **{f"scan, reverse {way}": (lambda x, way=way: lax.scan(running, 1.0, x, reverse=way), (X,)) for way in (0, 1)},
    "scan of nothing": (lambda x: lax.scan(running, 1.0, x), (X[:0],)),
    "scan in a scan": (
        lambda x: lax.scan(lambda c, row: (lax.scan(running, c, row[:, None])[0], c), 1.0, x),
        (X,),
    ),
    "scan of a constant": (lambda x: lax.scan(lambda c, _: (c + x[0], None), x[1], None, length=3), (X,)),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2 + x), (0, x)), (X,)),
    "for": (lambda x: lax.fori_loop(2, 5, lambda n, c: c + n.astype(c.dtype) * x, x), (X,)),
    "switch": (lambda x, n: [lax.switch(n + k, BRANCHES, x) for k in (-3, 0, 1, 2)], (X, np.array(1, np.int32))),
    "jit, remat and derivatives": (
        lambda x: (
            jax.jit(lambda x: x + 1)(x),
            jax.grad(lambda x: jax.checkpoint(lambda x: (x * x) ** 2)(x).sum())(x),
            jax.grad(lambda x: (x * backwards(x)).sum())(x),
            jax.grad(lambda x: (x * forwards(x)).sum())(x),
            backwards(x) + forwards(x),
        ),
        (X,),
    ),
    "what is traced whole": (lambda x: (jnp.searchsorted(x[0], x), jnp.nonzero(x > 0, size=5)), (X,)),
    "a constant array": (lambda x: lax.scan(lambda c, row: (c + row * X[0], None), X[1], x)[0], (X,)),
}


@pytest.fixture(scope="module")
def agreement() -> Agreement:
    return Agreement(CASES)


@pytest.mark.parametrize("name", CASES)
def test_control_flow_gives_what_jax_gives(name: str, agreement: Agreement) -> None:
    agreement.check(name)


def test_callbacks_are_called_on_every_device() -> None:
    found: list[float] = []
    exactly(lambda x: jax.debug.callback(lambda y: found.append(float(y)), x.sum()), X)
    assert found == [X.sum()]


# A program for a model of a step: a scan, and a decision about its result; a scan that decides by itself.


def updated(x: Any) -> Any:
    total = lax.scan(lambda c, row: (c + row.sum(), None), 0.0, x)[0]
    clipped = jnp.where(total > 1e9, total, 2 * total) + jnp.minimum(total / 64, 1.0) + jnp.maximum(total, 0.0)
    return jnp.where(jnp.isfinite(total), total, 0.0), 64 * clipped


def decided_inside(x: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.where(row[0] / 2 < 9, c + 1, c + 5), None), 0.0, x)[0]


def test_decisions_are_forced_without_running_a_scan_again() -> None:
    traced, x = jax.make_jaxpr(updated)(X), constant(X, X.dtype)
    machine, found = Interpreter(), []
    for machine.finite, machine.flipped in ((True, False), (False, False), (True, True)):
        found += [int(each[0, 0]) for each in machine(traced, [x])]
    assert found == [6, 1158, 0, 1158, 6, 774]  # 64 (12 + 6 / 64 + 6), as JAX; 64 (6 + 6 / 64 + 6)
    equations = machine.equations
    machine(traced, [x])
    once = machine.equations - equations
    assert equations == 3 * once + len(X) * len(traced.jaxpr.eqns[0].params["jaxpr"].jaxpr.eqns)


def test_a_scan_that_decides_or_has_other_values_runs_again() -> None:
    traced, x = jax.make_jaxpr(decided_inside)(X), constant(X, X.dtype)
    machine = Interpreter()
    found = [int(machine(traced, [x])[0][0, 0])]
    machine.flipped = True
    found.append(int(machine(traced, [x])[0][0, 0]))
    traced = jax.make_jaxpr(updated)(X)
    machine.flipped = False
    found += [int(machine(traced, [each])[0][0, 0]) for each in (x, constant(X + 1, X.dtype))]
    assert found == [3, 15, 6, 18]


def test_a_primitive_without_a_rule_is_one_line() -> None:
    with pytest.raises(UnknownPrimitive, match=r"^no rule for the primitive igamma \(.*test_interpreter.py") as caught:
        exactly(lambda x: lax.igamma(x, x), X)
    assert "\n" not in str(caught.value)


def test_a_loop_without_end_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "MOST_TURNS", 20)
    with pytest.raises(RunError, match=r"^a while loop goes on after 20 turns \(.*test_interpreter.py") as caught:
        exactly(lambda x: lax.while_loop(lambda x: x[0, 0] < 0, lambda x: x * 1, x), X)
    assert "\n" not in str(caught.value)
    assert exactly(lambda x: lax.fori_loop(0, 19, lambda _, x: x + 1, x), X)[0][0, 0, 0, 0] == 14


def softmax_in_parts(x: Any, parts: int) -> Any:
    """With the sums and maxima of parts, as attention over a context group."""
    pieces = jnp.split(x, parts)
    highest = [piece.max() for piece in pieces]
    sums = [jnp.exp(piece - top).sum() for piece, top in zip(pieces, highest, strict=True)]
    most = jnp.stack(highest).max()
    whole = sum(each * jnp.exp(top - most) for each, top in zip(sums, highest, strict=True))
    return jnp.exp(x - most) / whole


@pytest.mark.parametrize("masked", [False, True])
def test_a_softmax_in_parts_is_the_softmax(masked: bool) -> None:
    """Also where one part sees nothing."""
    x = drawn((12,), 1)
    if masked:
        x = with_lowest(x, np.arange(12) // 4 == 1)
    type_ = jax.ShapeDtypeStruct((12,), np.float32)

    def of(function: Callable[..., Any]) -> Value:
        return elements(Interpreter()(jax.make_jaxpr(function)(type_), [x])[0])

    expected = of(jax.nn.softmax)
    np.testing.assert_array_equal(of(lambda x: softmax_in_parts(x, 3)), expected)
    assert not np.array_equal(of(lambda x: softmax_in_parts(x + x.sum() * jnp.arange(12.0) * 0.5, 3)), expected)
    assert (expected[:, :, 4:8] == 0).all() == masked


def test_every_rule_of_control_has_a_case() -> None:
    used = {name for function, args in CASES.values() for name in names_in(jax.make_jaxpr(function)(*args).jaxpr)}
    others = {
        "custom_linear_solve",
        "reduce_window",
        "closed_call",
        "eval_jaxpr",
        "shard_map",
        "debug_callback",
        "call_hi_primitive",
        "name",
    }
    assert {*CONTROL} - used <= others
