"""Sites: the named activations of a step.

Recomputation selects the activations to save by these names (with a policy of `jax.checkpoint`), and recording selects
by them too: a step that is traced while `recording` sends each device's value at each site to the host, forward and
backward. Otherwise a name costs nothing.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from megajax.core.axes import AXES
from megajax.core.parallel.collectives import TENSOR, Axes, axis_index

HEAD = "head"


@dataclass(frozen=True)
class SiteRecord:
    """One device's value at a site."""

    site: str
    backward: bool  # `value` is the gradient of the loss with respect to the activation
    layer: int  # global index; -1 in the head
    samples: np.ndarray  # rows of the global batch, [B]
    value: np.ndarray  # [B · parts, …], with `parts` sequences per sample; this device's shard if `split` is set
    split: int | None  # the dim that is sharded over devices
    first: int  # where this device's shard begins along it
    partial: tuple[str, ...]  # axes whose devices hold the same activation, and terms of a sum as its gradient
    device: tuple[int, ...]  # coordinates on the mesh axes, in the order of `AXES`
    tokens: np.ndarray | None = None  # positions of the tokens along dim 1; None if the device has all of them
    turn: int = 0  # order of tracing, which within a layer or the head is the order of computation


@dataclass(frozen=True)
class CollectiveRecord:
    """How far one device's result of a collective is from what its operands imply."""

    name: str  # kind, axes, and the weight
    error: float  # ‖result - expected‖ / ‖expected‖


Record = Callable[[SiteRecord | CollectiveRecord], None]
_RECORD: ContextVar[Record | None] = ContextVar("record", default=None)
_TURNS = itertools.count()
_PLACE: ContextVar[tuple[Array, ...] | None] = ContextVar("place", default=None)  # layer, samples, maybe tokens


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """Code traced in this context calls `record` when it runs, from runtime threads and in no particular order. All
    calls are done after `jax.effects_barrier()`."""
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)


@contextlib.contextmanager
def at(layer: Array | int | str, sample_B: Array | None, token_T: Array | None = None) -> Iterator[None]:
    """Sites traced in this context belong to a layer, or to the `HEAD`, to these rows of the global batch, and to these
    tokens (all by default)."""
    if _RECORD.get() is None or sample_B is None:
        yield
        return
    place = jnp.asarray(-1 if isinstance(layer, str) else layer, jnp.int32), sample_B
    token = _PLACE.set(place if token_T is None else (*place, token_T))
    try:
        yield
    finally:
        _PLACE.reset(token)


def checked(result: Any, expected: Callable[[], Any], collectives: Any) -> Any:
    """While recording, compare the `result` of collectives on weights or gradients with `expected`, computed from the
    same operands differently. `collectives` names the collective of each leaf. Returns `result`."""
    record = _RECORD.get()
    if record is None:
        return result
    leaves = jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(expected()), jax.tree.leaves(collectives)
    for (path, x), y, name in zip(*leaves, strict=True):
        keys: list[Any] = [getattr(key, "key", getattr(key, "name", "")) for key in path]
        name += " " + "/".join("/".join(key) if isinstance(key, tuple) else key for key in keys)
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        norms = [jnp.sqrt(jnp.sum(jnp.square(each))) for each in (x - y, y)]

        def on_host(difference: Any, size: Any, name: str = name) -> None:
            record(CollectiveRecord(name, float(difference) / max(float(size), 1e-30)))

        jax.debug.callback(on_host, *norms)
    return result


def named(x: Array, name: str, split: int | None = None, **where: Any) -> Array:
    """Name `x`, for recomputation policies and for recording (see `recorded`)."""
    return recorded(checkpoint_name(x, name), name, split, **where)


def recorded(
    x: Array,
    name: str,
    split: int | None = None,
    axes: Axes = TENSOR,
    first: Array | None = None,
    partial: tuple[str, ...] = (),
) -> Array:
    """Record `x`, with rows first, under a name if a recording is on. Along the dim `split` it is this device's shard:
    equal parts over `axes` by default, or the part from `first`, which other `tensor` devices may hold too. Over the
    axes `partial` it is replicated, whichever tokens a device has, and its gradient is a term of a sum."""
    record, place = _RECORD.get(), _PLACE.get()
    if record is None or place is None:
        return x
    if partial:
        place = place[:2]
    elif first is not None:
        partial = (TENSOR,)
    if first is None:
        first = jnp.zeros((), jnp.int32) if split is None else axis_index(axes) * x.shape[split]
    if len(place) > 2 and split == 1:  # this device has only some of its context rank's tokens
        place = *place[:2], lax.dynamic_slice_in_dim(place[2], first, x.shape[1])
    devices, turn = jnp.stack([axis_index(axis) for axis in AXES]), next(_TURNS)

    def send(backward: bool, value: Array, *where: Array) -> None:
        def on_host(value: Any, first: Any, device: Any, layer: Any, samples: Any, *tokens: Any) -> None:
            own, rows, coordinates = np.array(value), np.array(samples), tuple(np.asarray(device).tolist())
            begins, places = int(first), np.array(tokens[0]) if tokens else None
            found = SiteRecord(name, backward, int(layer), rows, own, split, begins, partial, coordinates, places, turn)
            record(found)

        jax.debug.callback(on_host, value, *where)

    @jax.custom_vjp
    def watched(x: Array, *where: Array) -> Array:
        send(False, x, *where)
        return x

    def forward(x: Array, *where: Array) -> tuple[Array, Any]:
        return watched(x, *where), where

    def backward(where: Any, grad: Array) -> tuple[Array | None, ...]:
        send(True, grad, *where)
        return grad, *(None for _ in where)

    watched.defvjp(forward, backward)
    return watched(x, first, devices, *place)
