"""Passes that several devices compute, and state that several hold, compared by their bits: `--train.recheck`.

Devices at one place of `replica` and `data`, which form a ring, have the same rows of a batch. Those one place on have
the same weights, and repeat their passes by the same code. If the results differ, those one place back decide.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.axes import REPLICA, ROW_AXES
from megajax.core.parallel.checksum import checksum
from megajax.core.parallel.collectives import axis_index, axis_size, gather_shards, send, spec_axes, there, vary
from megajax.core.pipeline.buffers import idle, stored
from megajax.core.pipeline.sums import CHECKSUM
from megajax.core.program.program import Batch, Program
from megajax.core.program.state import TrainState

RECHECK = "recheck"
"""The metric of a step that says which devices differ, and in which of what is compared, bool [compared, devices]."""
COMPARED = "gradients or losses", "the state, from other devices' copies", "the state, from that after the step before"
_RING = (REPLICA, "data")
_MOST_PASSES = 3  # the last only if the others differ


def compares_gradients(program: Program) -> bool:
    """Whether devices compute the same bits of gradients from the same rows."""
    return program.config.deterministic or program.mesh.devices.flat[0].platform == "cpu"


def repeated(program: Program, batch: Batch, passes: Callable[[Batch, Array], tuple]) -> tuple[Any, Array]:
    """The results of `passes` over this device's rows, the rows of a rank; and which devices differ, bool [ring, rest].
    If one does, the results may be of other rows."""
    ring = there(_RING)
    most = min(_MOST_PASSES, axis_size(ring))

    def sent(rows: Any, places: int) -> Any:
        return jax.tree.map(lambda x: send(x, ring, places, ring=True), rows)

    def run(carry: tuple) -> tuple:
        """First the rows of the place before, then a device's own, then those of the place after."""
        number, rows, votes, _ = carry
        results = passes(*rows)
        losses, local, figures = results[:3]
        gradients = {path: x for path, x in local.items() if path[-1] == CHECKSUM} or local
        compared = losses, figures, gradients if compares_gradients(program) else {}
        by_device = _everywhere(program, checksum(jax.tree.leaves(compared)))
        of_rows = jnp.roll(by_device, number - 1, 0)  # at the place that has the rows
        return number + 1, sent(rows, -1), stored(votes, number, of_rows), results

    def goes_on(carry: tuple) -> Array:
        number, _, votes, _ = carry
        return (number < 2) | ((number < most) & jnp.any(votes[0] != votes[1]))

    rows = sent((batch, axis_index(ROW_AXES)), +1)
    votes = jnp.zeros((most, axis_size(ring), program.mesh.size // axis_size(ring)), jnp.uint32)
    nothing = idle(jax.eval_shape(passes, *rows))
    number, _, votes, results = lax.while_loop(goes_on, run, (jnp.int32(0), rows, votes, nothing))
    votes = jnp.where((jnp.arange(most) < number)[:, None, None], votes, votes[:1])
    by_device = jnp.stack([jnp.roll(rows, 1 - turn, 0) for turn, rows in enumerate(_outvoted(votes))])
    return results, jnp.any(by_device, axis=0)


def state_checksums(program: Program, state: TrainState) -> Array:
    """Of every device's shards, [ring, rest, 2]: of what all places of the ring have, and what those of `replica`."""
    groups: tuple[list[Array], list[Array]] = [], []
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(program.layout.specs), strict=True):
        groups["data" in spec_axes(spec)].append(leaf)
    return _everywhere(program, jnp.stack([vary(checksum(group), program.mesh.axis_names) for group in groups]))


def differing(program: Program, in_passes: Array, now: Array, before: Array) -> Array:
    """`RECHECK`, from those that differ in passes, and the state's checksums now and after the step before."""
    of_replicas = now[..., 1].reshape(program.config.mesh.replica, -1)
    in_copies = _outvoted(now[..., 0]) | _outvoted(of_replicas).reshape(in_passes.shape)
    return jnp.stack([in_passes, in_copies, jnp.any(now != before, axis=-1)]).reshape(len(COMPARED), -1)


def _everywhere(program: Program, x: Array) -> Array:
    """Every device's value, [ring, rest, …], on every device."""
    axes = program.mesh.axis_names
    every = gather_shards(vary(x, axes)[None], 0, axes, invariant=True)
    return every.reshape(axis_size(there(_RING)), -1, *x.shape)


def _outvoted(votes: Array) -> Array:
    """Which of them, along the first dim, are not what more than half say; if no more than half agree, all."""
    return 2 * jnp.sum(votes[:, None] == votes[None], axis=1, dtype=jnp.int32) <= len(votes)
