"""A bit that flips on one device, in a step that is rechecked, is found, and the device named; and nothing else is."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from tiny import full, tiny_config, tiny_program

from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import axis_index, spec_axes, varying_axes
from megajax.core.pipeline.executor import Pipeline
from megajax.core.pipeline.sums import Floats
from megajax.core.program.bind import BoundModel
from megajax.core.program.program import BATCH, Program
from megajax.core.program.recheck import RECHECK
from megajax.core.program.train_step import _train_step, checksums_of_state
from megajax.data.synthetic import placed_batch
from megajax.verify.run import drawn_state

EVERY, ROWS = -1, 2  # of a device
FIELDS = "kind", "device", "row", "layer", "leaf", "number", "bit"
NO_FAULT = dict.fromkeys(FIELDS, 0) | {"device": -1}
ACTIVATION, GRADIENT = 1, 2
leave, layer, passes, terms = RegionBoundary.leave, BoundModel.layer, Pipeline.losses_and_gradients, Floats.terms
traced: dict[str, Any] = {}  # what a fault depends on, while a step is traced


@jax.custom_vjp
def flipped(x, here, number, bit):
    """A number of an array with one other bit; gradients pass."""
    words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    flat, place = words.reshape(-1), number % x.size
    other = flat[place] ^ jnp.where(here, 1 << (bit % (8 * x.dtype.itemsize)), 0).astype(words.dtype)
    return lax.bitcast_convert_type(flat.at[place].set(other).reshape(x.shape), x.dtype)


flipped.defvjp(lambda *args: (flipped(*args), None), lambda _, grad: (grad, None, None, None))


def with_fault(x, kind: int, leaf: int, **where):
    """An array of a device, on which a bit may flip; of one that several devices hold, on all of these."""
    program, fault = traced["program"], traced["fault"]
    here = (fault["kind"] == kind) & (fault["leaf"] == leaf)
    for name, value in where.items():
        here &= (fault[name] == value) | ((fault["row"] == EVERY) & (name == "row"))
    coordinate, places = fault["device"], {}
    for axis in reversed(program.mesh.axis_names):
        coordinate, places[axis] = jnp.divmod(coordinate, program.mesh.shape[axis])
    for axis in varying_axes(x) & places.keys():
        here &= axis_index(axis) == places[axis]
    return flipped(x, here & (fault["device"] >= 0), fault["number"], fault["bit"])


def faulty_layer(self, weights, factors, number, x, context):
    traced.update(layer=number, row=context.row_B[0], leaves=0)
    try:
        return layer(self, weights, factors, number, x, context)
    finally:
        del traced["layer"]


def faulty_leave(self, y, *axes):
    if "layer" in traced and len(varying_axes(y)) == len(traced["program"].mesh.axis_names):
        y = with_fault(y, ACTIVATION, traced["leaves"], layer=traced["layer"], row=traced["row"])
        traced["leaves"] += 1
    return leave(self, y, *axes)


def faulty_passes(self, *options):
    losses, grads, figures = passes(self, *options)
    if traced["program"].config.optimizer.zero < 3:  # which has sums over devices here
        row = self.ends.microbatches[1][0, 0]
        grads = {path: with_fault(x, GRADIENT, leaf, row=row) for leaf, (path, x) in enumerate(grads.items())}
    return losses, grads, figures


def faulty_terms(self, gradients):
    if self.checked:
        gradients = {path: with_fault(x, GRADIENT, leaf) for leaf, (path, x) in enumerate(gradients.items())}
    return terms(self, gradients)


@dataclass(frozen=True)
class Rechecked:
    """A rechecked step, compiled once, in which a bit may flip."""

    program: Program
    fresh: Any
    run: Callable

    def step(self, state: Any = None, checksums: Any = None, batch: int = 0, **fault: int) -> tuple[Any, np.ndarray]:
        """The state after a step, and which devices differ."""
        state = self.fresh if state is None else state
        checksums = checksums_of_state(self.program)(state) if checksums is None else checksums
        words = {name: np.int32(value) for name, value in (NO_FAULT | fault).items()}
        after, metrics = self.run(state, placed_batch(self.program, batch), checksums, words)
        differs = np.asarray(metrics[RECHECK])
        assert bool(metrics["skipped"]) == differs.any()
        return after, differs


@cache
def rechecked(mesh: tuple[int, ...], precision: str, zero: int, ranks: int = 0) -> Rechecked:
    rates = {"warmup_steps": 0, "zero_ranks": ranks}
    sizes = {"num_layers": mesh[1], "num_heads": 2, "global_batch": ROWS * mesh[0]}
    program = tiny_program(tiny_config(mesh, precision=precision, zero=zero, optimizer=rates, dropout=0.1, **sizes))
    specs, scalar = program.layout.specs, PartitionSpec()

    def step(state, batch, checksums, fault):
        traced.update(program=program, fault=fault)
        return _train_step(program, True, state, batch, checksums)

    state = program.layout.from_canonical(drawn_state(program))
    region = jax.jit(program.region(step, (specs, BATCH, scalar, scalar), (specs, scalar)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundModel, "layer", faulty_layer)
        patch.setattr(RegionBoundary, "leave", faulty_leave)
        patch.setattr(Pipeline, "losses_and_gradients", faulty_passes)
        patch.setattr(Floats, "terms", faulty_terms)
        words = {name: np.int32(value) for name, value in NO_FAULT.items()}
        args = state, placed_batch(program, 0), checksums_of_state(program)(state), words
        return Rechecked(program, state, region.lower(*args).compile())


def in_memory(tree: Any, leaf: int, device: jax.Device, number: int, bit: int) -> Any:
    """A state with one other bit in the memory of one device."""
    leaves, structure = jax.tree.flatten(tree)
    x = leaves[leaf]
    parts = [np.array(shard.data) for shard in x.addressable_shards]
    for part, shard in zip(parts, x.addressable_shards, strict=True):
        if shard.device == device:
            byte = number * 7 % part.nbytes
            part.reshape(-1).view(np.uint8)[byte] ^= 1 << bit % 8
    placed = [jax.device_put(part, shard.device) for part, shard in zip(parts, x.addressable_shards, strict=True)]
    leaves[leaf] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)
    return jax.tree.unflatten(structure, leaves)


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


KINDS = "old", "at rest", "activation", "gradient"


@pytest.mark.parametrize(
    ("mesh", "precision", "zero", "ranks", "count"),
    [
        ((3, 1, 1), "fp32", 1, 0, 12),
        full((8, 1, 1), "fp32", 1, 0, 100),
        full((8, 1, 1), "bf16", 3, 0, 100),
        full((8, 1, 1), "fp16", 1, 4, 100),
        full((2, 2, 2), "bf16", 1, 0, 100),
        full((2, 2, 2), "fp32", 3, 0, 100),
    ],
)
def test_a_flipped_bit_is_found_and_its_device_named(mesh, precision, zero, ranks, count):
    """In memory since long ago or since the step before, or in what is computed: once, or always. Of two replicas both
    are named, but for what changed at rest. What is not found changes nothing."""
    made, rng, counts = rechecked(mesh, precision, zero, ranks), random.Random(count), Counter()
    program, (clean, nothing) = made.program, made.step()
    specs = jax.tree.leaves(program.layout.specs)
    copied = [leaf for leaf, spec in enumerate(specs) if ranks or "data" not in spec_axes(spec)]
    sums = checksums_of_state(program)(made.fresh)
    assert not nothing.any()
    for _ in range(count):
        kind, device, number, bit = rng.choice(KINDS), *(rng.randrange(most) for most in (program.mesh.size, 2**20, 64))
        compared, (replica, place) = KINDS.index(kind), divmod(device, program.mesh.size // mesh[0])
        first = ROWS * rng.choice([replica, (replica - 1) % mesh[0]])  # of its own pass, or that of its neighbour's
        if kind in KINDS[:2]:
            leaf = rng.choice(copied if kind == "old" else range(len(specs)))
            state = in_memory(made.fresh, leaf, program.mesh.devices.ravel()[device], number, bit)
            after, differs = made.step(state, None if kind == "old" else sums)
            compared += 1
        else:
            row = rng.choice([EVERY, first + (kind == "activation") * rng.randrange(ROWS)])
            where = {"row": EVERY if kind == "gradient" and zero == 3 else row, "layer": place // mesh[2]}
            where |= {"leaf": rng.randrange(2 if kind == "activation" else 8), "number": number, "bit": bit}
            after, differs = made.step(kind=compared - 1, device=device, **where)
            compared = 0
        counts[kind, bool(differs.any())] += 1
        if not differs.any():
            assert compared == 0 and same(after, clean), (kind, device)
            continue
        named = {int(each) * mesh[0] // program.mesh.size for each in np.flatnonzero(differs[compared])}
        assert named == ({0, 1} if mesh[0] == 2 and compared < 2 else {replica}), (kind, device, differs.astype(int))
        assert differs[compared, device] and (compared < 2 or differs[compared].sum() == 1)
    print(f"{mesh} {precision} ZeRO-{zero}: {dict(counts)}")


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
def test_no_device_is_named_falsely(mesh):
    made = rechecked(mesh, "bf16", 1)
    state = made.fresh
    for step in range(1000):
        state, differs = made.step(state, batch=step)
        assert not differs.any(), step
    assert int(state.step) == 1000
