"""What a program communicates, from its jaxpr: nothing runs, nothing is compiled."""

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
    """One communication in a program."""

    kind: str  # all-reduce, all-gather, reduce-scatter, permute or all-to-all
    axes: tuple[str, ...]  # of the mesh
    shapes: tuple[tuple[int, ...], ...]  # of its operands on one device
    num_bytes: int  # of its operands on one device
    # How often it runs, by the lengths of the scans around it: every branch of a conditional counts as taken, and a
    # loop of unknown length, as that of deferred weight gradients, as run once.
    count: int

    def bytes_sent(self, devices: int) -> float:
        """By a device of so many in a ring, each time; of a permute by one that has a neighbour to send to."""
        others = devices - 1
        share = {
            "all-reduce": 2 * others / devices,
            "reduce-scatter": others / devices,
            "all-gather": others,  # its operand is a part
            "permute": min(others, 1),
            "all-to-all": others / devices,
        }
        return share[self.kind] * self.num_bytes


def collectives(function: Callable, *args: Any) -> list[Collective]:
    """Communication of `function(*args)`; the arguments may be `ShapeDtypeStruct`."""
    return collectives_of(jax.make_jaxpr(function)(*args))


def collectives_of(traced: ClosedJaxpr) -> list[Collective]:
    """Communication of a function that was traced."""
    return [_collective(eqn, count) for eqn, count in equations(traced.jaxpr) if eqn.primitive.name in COLLECTIVES]


def _collective(eqn: JaxprEqn, count: int) -> Collective:
    axes: Any = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    avals: list[Any] = [var.aval for var in eqn.invars]
    num_bytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
    return Collective(COLLECTIVES[eqn.primitive.name], axes, tuple(aval.shape for aval in avals), num_bytes, count)


def equations(jaxpr: Jaxpr, count: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """All equations, each followed by those inside it, with how often each runs."""
    for eqn in jaxpr.eqns:
        yield eqn, count
        inner = count * eqn.params["length"] if eqn.primitive.name == "scan" else count
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, ClosedJaxpr):
                    yield from equations(part.jaxpr, inner)
                elif isinstance(part, Jaxpr):
                    yield from equations(part, inner)
