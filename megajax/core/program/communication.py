"""What a program communicates, read from its jaxpr: nothing runs, nothing is compiled."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "ppermute": "permute",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """One collective in a program."""

    kind: str  # all-reduce, all-gather, reduce-scatter, permute or all-to-all
    axes: tuple[str, ...]  # mesh axes
    shapes: tuple[tuple[int, ...], ...]  # of its operands on one device
    num_bytes: int  # of its operands on one device
    # How often it runs, from the lengths of the scans around it. Every branch of a conditional counts as taken, and a
    # loop of unknown length, such as that of deferred weight gradients, counts as one iteration.
    count: int

    def bytes_sent(self, devices: int) -> float:
        """Bytes that a device in a ring of `devices` sends each time; for a permute, one with a device to send to."""
        others = devices - 1
        share = {
            "all-reduce": 2 * others / devices,
            "reduce-scatter": others / devices,
            "all-gather": others,  # its operand is one shard
            "permute": min(others, 1),
            "all-to-all": others / devices,
        }
        return share[self.kind] * self.num_bytes


def collectives(function: Callable, *args: Any) -> list[Collective]:
    """Collectives in `function(*args)`; the arguments may be `ShapeDtypeStruct`."""
    return collectives_of(jax.make_jaxpr(function)(*args))


def collectives_of(traced: ClosedJaxpr) -> list[Collective]:
    """Collectives in a traced function."""
    return [_collective(eqn, count) for eqn, count in equations(traced.jaxpr) if eqn.primitive.name in COLLECTIVES]


def _collective(eqn: JaxprEqn, count: int) -> Collective:
    axes: Any = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    avals: list[Any] = [var.aval for var in eqn.invars]
    num_bytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    return Collective(COLLECTIVES[eqn.primitive.name], axes, tuple(aval.shape for aval in avals), num_bytes, count)


def equations(jaxpr: Jaxpr, count: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """All equations, each followed by those nested in it, with the number of times each runs."""
    for eqn in jaxpr.eqns:
        yield eqn, count
        inner = count * eqn.params["length"] if eqn.primitive.name == "scan" else count
        for value in eqn.params.values():
            for inner_jaxpr in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(inner_jaxpr, ClosedJaxpr):
                    yield from equations(inner_jaxpr.jaxpr, inner)
                elif isinstance(inner_jaxpr, Jaxpr):
                    yield from equations(inner_jaxpr, inner)
