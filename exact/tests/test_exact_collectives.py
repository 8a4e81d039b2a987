"""Collectives and control flow on a mesh of 2 x 2 x 2 give what JAX gives on eight simulated devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import Agreement, Case, exactly, names_in
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxequal.collectives import COLLECTIVES
from jaxequal.errors import RunError
from jaxequal.numbers import constant

AXES = ("a", "b", "c")
OF_ALL = P(AXES)
AUTO = (AxisType.Auto,) * 3
X = np.random.default_rng(0).integers(-9, 9, (16, 4, 8)).astype(np.float32)
INTEGERS = X.astype(np.int32)
LOW = np.where(X > 7, -np.inf, X)


def on_mesh(
    function: Callable[..., Any], in_spec: Any = OF_ALL, out_spec: Any = OF_ALL, **more: Any
) -> Callable[..., Any]:
    """A function of every device's part; by default, the results of all devices one after the other."""

    def call(*args: Any) -> Any:
        mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=AUTO)
        return jax.shard_map(function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, **more)(*args)

    return call


def varying(x: Any) -> Any:
    """The same, of a type that varies over all axes."""
    return x + 0 * sum(lax.axis_index(axis) for axis in AXES).astype(x.dtype)


def number() -> Any:
    return lax.axis_index("a") * 4 + lax.axis_index("b") * 2 + lax.axis_index("c")


def turns(x: Any) -> Any:
    """Each device has as many as its number."""
    start = varying(jnp.zeros((), jnp.int32))
    return lax.while_loop(lambda c: c[0] < number(), lambda c: (c[0] + 1, 2 * c[1] + x), (start, x))[1]


def branches(x: Any) -> Any:
    return lax.switch(number() % 3, [lambda x: x + 1, lambda x: x * number().astype(x.dtype), lambda x: -x], x)


def together(x: Any) -> Any:
    """A collective in a branch that whole groups take."""
    return lax.cond(lax.axis_index("a") == 1, lambda x: varying(lax.psum(x, ("b", "c"))), lambda x: x, x)


def unreduced(x: Any, y: Any) -> Any:
    """Products whose sum is left to the next region, and weights whose gradients are."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
    specs, sums = {"mesh": mesh, "in_specs": (P("a", "b"), P("b", reduced={"a"}))}, P("a", unreduced={"b"})
    first = jax.shard_map(lambda x, y: lax.pcast(x @ y, "b", to="unreduced"), out_specs=sums, **specs)

    def loss(x: Any, y: Any) -> Any:
        product = first(x, jax.reshard(y, P("b", reduced={"a"})))
        whole = jax.shard_map(lambda z: lax.psum(z, "b"), mesh=mesh, in_specs=sums, out_specs=P("a"))(product)
        return (whole**2).sum()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.value_and_grad(loss, (0, 1))(jax.reshard(x, P("a", "b")), jax.reshard(y, P("b")))


PERM = [(0, 1), (1, 3), (3, 0)]  # nobody sends to 2, which gets 0
CASES: dict[str, Case] = {
    "psum over an axis": (on_mesh(lambda x: varying(lax.psum(x, "b"))), (X,)),
    "psum over two": (on_mesh(lambda x: varying(lax.psum(x, ("c", "a")))), (X,)),
    "psum over all, of integers": (on_mesh(lambda x: lax.psum(x, AXES), out_spec=P()), (INTEGERS,)),
    "psum with the lowest": (on_mesh(lambda x: varying(lax.psum(x, "a"))), (LOW,)),
    "psum of several": (on_mesh(lambda x, y: varying(sum(lax.psum((x, y), "c"))), (P(AXES), P(AXES))), (X, 2 * X)),
    "psum of what is the same": (on_mesh(lambda x: lax.psum(lax.pcast(x, "a", to="varying"), "a"), P(), P()), (X,)),
    "pmax": (on_mesh(lambda x: varying(lax.pmax(x, ("a", "b")))), (X,)),
    "pmin of integers": (on_mesh(lambda x: varying(lax.pmin(x, "c"))), (INTEGERS,)),
    "pmax with the lowest": (on_mesh(lambda x: varying(lax.pmax(x, "c"))), (LOW,)),
    "axis_index": (on_mesh(lambda x: x * number().astype(x.dtype)), (X,)),
    "index over two axes": (on_mesh(lambda x: x * lax.axis_index(("c", "a")).astype(x.dtype)), (X,)),
    **{
        f"all_gather along {dim}, tiled {tiled}, {axes}": (
            on_mesh(lambda x, a=axes, d=dim, t=tiled: varying(lax.all_gather(x, a, axis=d, tiled=t))),
            (X,),
        )
        for axes in ("a", ("b", "c"), ("c", "b"))
        for dim in (0, 2)
        for tiled in (False, True)
    },
    **{
        f"reduce_scatter along {dim}, tiled, {axes}": (
            on_mesh(lambda x, a=axes, d=dim: varying(lax.psum_scatter(x, a, scatter_dimension=d, tiled=True))),
            (X,),
        )
        for axes in ("b", ("c", "a"))
        for dim in (1, 2)
    },
    "reduce_scatter": (on_mesh(lambda x: varying(lax.psum_scatter(x, "b", scatter_dimension=0))), (X,)),
    **{
        f"all_to_all from {split} to {joined}, tiled, {axes}": (
            on_mesh(lambda x, a=axes, s=split, j=joined: varying(lax.all_to_all(x, a, s, j, tiled=True))),
            (X,),
        )
        for axes in ("b", ("c", "a"))
        for split, joined in ((1, 2), (2, 0), (2, 2))
    },
    **{
        f"all_to_all from {split} to {joined}": (
            on_mesh(lambda x, s=split, j=joined: varying(lax.all_to_all(x, "b", s, j))),
            (X,),
        )
        for split, joined in ((0, 0), (0, 2))
    },
    "ppermute with holes": (on_mesh(lambda x: varying(lax.ppermute(x, ("b", "c"), PERM))), (X,)),
    "two axes on a dim": (on_mesh(lambda x: 2 * x, P(None, ("c", "a"), "b"), P("b", None, ("c", "a"))), (X,)),
    "different parts": (
        on_mesh(lambda x, y: lax.psum(x @ y, "b"), (P("a", None, "b"), P("a", "b")), P("a")),
        (X, np.swapaxes(X, 1, 2).copy()),
    ),
    "sums of the next region": (unreduced, (X[0], X[1].T.copy())),
    "groups within an axis": (
        on_mesh(lambda x: lax.all_gather(x, ("a", "b"), axis_index_groups=[[2, 0], [1, 3]]), check_vma=False),
        (X,),
    ),
    "over a dim with a name": (jax.vmap(lambda x: x - lax.pmax(x, "n") * lax.psum(x, "n"), axis_name="n"), (X,)),
    "turns of each device": (on_mesh(turns), (X,)),
    "branches of each device": (on_mesh(branches), (X,)),
    "a branch of some groups": (on_mesh(together), (X,)),
    "slices of each device": (
        on_mesh(lambda x: lax.dynamic_slice_in_dim(x, number() - 1, 3, 2) + x[:, number() % 4, :3][:, None]),
        (X,),
    ),
    "places of each device": (on_mesh(lambda x: x.at[0, number() % 3, number() - 2].add(varying(x[0, 0, 0]))), (X,)),
}

if jax.__version_info__ < (0, 11):  # later versions want the order of the mesh
    permuted = on_mesh(lambda x: varying(lax.ppermute(x, ("c", "a"), PERM)))
    CASES["ppermute over another order"] = permuted, (INTEGERS,)


@pytest.fixture(scope="module")
def agreement() -> Agreement:
    return Agreement(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_gives_what_eight_devices_give(name: str, agreement: Agreement) -> None:
    agreement.check(name)


def test_every_collective_has_a_case() -> None:
    used = {name for function, args in CASES.values() for name in names_in(jax.make_jaxpr(function)(*args).jaxpr)}
    unreduced = {"unreduced_psum", "unreduced_reduce_scatter", "all_gather_reduced"}
    assert {*COLLECTIVES} - used <= {"psum_invariant", "all_gather_invariant", "psum", "ragged_all_to_all"} | unreduced


def test_rows_of_any_size_are_exchanged() -> None:
    """XLA has no such exchange on CPUs: the right result is that of slices. Device d sends d + 1 rows to either."""
    mesh = AbstractMesh((2,), ("a",), AUTO[:1])

    def body(x: Any, size: Any) -> Any:
        first, out = jnp.array([0, 2]), varying_over_a(jnp.zeros((4, 3)))
        place, sizes = jnp.where(lax.axis_index("a") == 0, 0, 1) * jnp.ones(2, jnp.int32), jnp.repeat(size, 2)
        received = jnp.array([1, 2])
        return lax.ragged_all_to_all(x, out, first, sizes, place, received, axis_name="a")

    def varying_over_a(x: Any) -> Any:
        return lax.pcast(x, "a", to="varying")

    f = jax.shard_map(body, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"), check_vma=False)
    x = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    (found,) = exactly(f, x.reshape(8, 3), np.array([1, 2], np.int32))
    expected = [[x[0, start], *x[1, start : start + 2], 0 * x[0, 0]] for start in (0, 2)]
    np.testing.assert_array_equal(found, constant(np.array(expected).reshape(8, 3), X.dtype))


def test_no_devices_are_needed() -> None:
    """64 of an abstract mesh."""
    mesh = AbstractMesh((4, 4, 4), AXES, AUTO)
    function = jax.shard_map(lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P(("b", "a")), out_specs=P("a"))
    x = np.arange(32, dtype=np.float32)
    found = exactly(function, x)[0][0, 0]
    np.testing.assert_array_equal(found, x.reshape(4, 4, 2).sum(0).ravel())


def test_a_collective_that_only_some_devices_reach_is_one_line() -> None:
    """On devices, they would wait for the others."""

    def alone(x: Any) -> Any:
        return lax.cond(number() == 3, lambda x: varying(lax.psum(x, "c")), lambda x: x, x)

    with pytest.raises(RunError, match=r"^only some of the devices that communicate over .* run a psum") as caught:
        exactly(on_mesh(alone), X)
    assert "\n" not in str(caught.value)


def test_a_region_in_a_region() -> None:
    outer = AbstractMesh((2, 2), ("a", "b"), AUTO[:2])

    def call(x: Any) -> Any:
        inner = jax.shard_map(lambda x: 2 * lax.psum(x, "b"), in_specs=P("b"), out_specs=P(), axis_names={"b"})
        return jax.shard_map(inner, mesh=outer, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})(x)

    halves = X.reshape(2, 2, -1, *X.shape[1:])  # of a, of b
    (found,) = exactly(call, X)
    expected = constant(2 * halves.sum(1).reshape(-1, *X.shape[1:]), X.dtype)
    np.testing.assert_array_equal(found, expected)
