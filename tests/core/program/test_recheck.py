"""A bit that flips on one device, at a step that is rechecked, is found, and the device named; and nothing else is."""

import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from tiny import full, tiny_config, tiny_program

from megajax.core.parallel.collectives import axis_index, spec_axes, varying_axes
from megajax.core.pipeline.sums import Floats
from megajax.core.program.bind import BoundModel
from megajax.core.program.program import BATCH
from megajax.core.program.recheck import RECHECK, repeated
from megajax.core.program.train_step import _train_step, checksums_of_state
from megajax.data.synthetic import placed_batch
from megajax.verify.run import drawn_state

ROWS, SCALAR = 2, PartitionSpec()  # of a device
KINDS = OLD, REST, ACTIVATION, GRADIENT = "in memory, long ago", "in memory, at rest", "activation", "gradient"
NO_FAULT = dict.fromkeys(("kind", "device", "row", "layer", "leaf", "number", "bit"), 0)
layer, terms = BoundModel.layer, Floats.terms
fault: dict[str, Any] = {}  # of the step that is being traced, and whether its device is at this place of each axis


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_who_computed_otherwise_is_named(ranks):
    """In the pass over its own rows, or over those of the rank before; of two ranks, both are."""
    program = tiny_program(tiny_config((ranks, 1, 1)))

    def differing(wrong, rows):
        def passes(_, rank):
            return {"loss": jnp.where((axis_index("data") == wrong) & (rank == rows), 1.0, 2.0)}, {}, {}

        return repeated(program, {}, passes)[1]

    named = jax.jit(program.region(differing, (SCALAR, SCALAR), SCALAR))
    for rank in range(ranks):
        for rows in (rank, (rank - 1) % ranks):
            assert np.flatnonzero(named(rank, rows)).tolist() == ([0, 1] if ranks == 2 else [rank])
        assert not named(rank, rank - ranks).any()


@jax.custom_vjp
def flipped(x, here, number, bit):
    """A number of an array with one other bit; gradients pass."""
    words = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").reshape(-1)
    other = words[number % x.size] ^ jnp.where(here, 1 << bit % (8 * x.dtype.itemsize), 0).astype(words.dtype)
    return lax.bitcast_convert_type(words.at[number % x.size].set(other).reshape(x.shape), x.dtype)


flipped.defvjp(lambda *args: (flipped(*args), None), lambda _, grad: (grad, None, None, None))


def with_fault(x, kind: str, **where):
    """An array of a device, on which a bit may flip; of one that several devices hold, on all of these."""
    here = fault["kind"] == KINDS.index(kind)
    for name, value in where.items():
        here &= fault[name] == value
    for axis in varying_axes(x):
        here &= fault[axis]
    return flipped(x, here, fault["number"], fault["bit"])


def faulty_layer(self, weights, factors, number, x, context):
    y, figures = layer(self, weights, factors, number, x, context)
    return with_fault(y, ACTIVATION, layer=number, row=context.row_B[0]), figures


def faulty_terms(self, gradients):
    return terms(self, {path: with_fault(x, GRADIENT, leaf=leaf) for leaf, (path, x) in enumerate(gradients.items())})


class Rechecked:
    """A rechecked step in which a bit may flip, compiled once."""

    def __init__(self, mesh: tuple[int, ...], precision: str, zero: int, ranks: int = 0):
        sizes = {"num_layers": mesh[1], "num_heads": 2, "global_batch": ROWS * mesh[0], "dropout": 0.1}
        rates = {"warmup_steps": 0, "zero_ranks": ranks}
        config = tiny_config(mesh, precision=precision, zero=zero, optimizer=rates, **sizes)
        self.program = program = tiny_program(config)
        self.state, self.sums = program.layout.from_canonical(drawn_state(program)), checksums_of_state(program)
        specs = program.layout.specs
        self.run = jax.jit(program.region(self._step, (specs, BATCH, SCALAR, SCALAR), (specs, SCALAR)))

    def _step(self, state, batch, checksums, words):
        mesh = self.program.mesh
        places = jnp.unravel_index(words["device"], mesh.devices.shape)
        fault.update(words)
        fault.update({axis: axis_index(axis) == place for axis, place in zip(mesh.axis_names, places, strict=True)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BoundModel, "layer", faulty_layer)
            patch.setattr(Floats, "terms", faulty_terms)
            return _train_step(self.program, True, state, batch, checksums)

    def step(self, before: Any, state: Any, batch: int = 0, **words: int) -> tuple[Any, np.ndarray]:
        """The state after a step, and which devices differ; `before` is the state after the step before."""
        words = {name: np.int32(value) for name, value in (NO_FAULT | words).items()}
        after, metrics = self.run(state, placed_batch(self.program, batch), self.sums(before), words)
        assert bool(metrics["skipped"]) == metrics[RECHECK].any()
        return after, np.asarray(metrics[RECHECK])


def in_memory(tree: Any, leaf: int, device: jax.Device, number: int, bit: int) -> Any:
    """A state with one other bit in the memory of one device."""
    leaves, structure = jax.tree.flatten(tree)
    x = leaves[leaf]
    parts = {shard.device: np.array(shard.data).reshape(-1) for shard in x.addressable_shards}
    parts[device].view(np.uint8)[number % parts[device].nbytes] ^= 1 << bit % 8
    shape = x.sharding.shard_shape(x.shape)
    placed = [jax.device_put(part.reshape(shape), place) for place, part in parts.items()]
    leaves[leaf] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.parametrize(
    ("mesh", "precision", "zero", "ranks", "count"),
    [
        pytest.param((3, 1, 1), "fp32", 1, 0, 12, marks=pytest.mark.slow),
        full((8, 1, 1), "fp32", 1, 0, 100),
        full((8, 1, 1), "bf16", 3, 0, 100),
        full((8, 1, 1), "fp16", 1, 2, 100),
        full((2, 2, 2), "bf16", 1, 0, 100),
        full((2, 2, 2), "fp32", 3, 0, 100),
    ],
)
def test_a_flipped_bit_is_found_and_its_device_named(mesh, precision, zero, ranks, count):
    """Of two replicas both are named, but for what changed at rest. What is not found has changed nothing."""
    made, rng, counts = Rechecked(mesh, precision, zero, ranks), random.Random(count), Counter()
    devices, good = made.program.mesh.devices.ravel(), made.state
    specs = jax.tree.leaves(made.program.layout.specs)
    copied = [leaf for leaf, spec in enumerate(specs) if ranks or "data" not in spec_axes(spec)]
    clean, nothing = made.step(good, good)
    assert not nothing.any()
    for _ in range(count):
        kind, device, number, bit = rng.choice(KINDS), *(rng.randrange(most) for most in (devices.size, 2**20, 64))
        replica, place = divmod(device, devices.size // mesh[0])
        if kind in (OLD, REST):
            leaf = rng.choice(copied if kind == OLD else range(len(specs)))
            state = in_memory(good, leaf, devices[device], number, bit)
            after, differs = made.step(state if kind == OLD else good, state)
        else:  # an activation in the pass over its own rows, or over its neighbour's
            row = ROWS * rng.choice([replica, (replica - 1) % mesh[0]]) + rng.randrange(ROWS)
            where = {"kind": KINDS.index(kind), "row": row, "layer": place // mesh[2], "leaf": rng.randrange(8)}
            after, differs = made.step(good, good, device=device, number=number, bit=bit, **where)
        counts[kind, bool(differs.any())] += 1
        named = differs[{OLD: 1, REST: 2}.get(kind, 0)]
        if not differs.any():
            pairs = zip(jax.tree.leaves(after), jax.tree.leaves(clean), strict=True)
            assert kind in (ACTIVATION, GRADIENT) and all(np.array_equal(*pair, equal_nan=True) for pair in pairs)
        elif kind == REST:
            assert np.flatnonzero(named).tolist() == [device]
        else:
            replicas = named.reshape(mesh[0], -1).any(axis=1)
            assert np.flatnonzero(replicas).tolist() == ([0, 1] if mesh[0] == 2 else [replica]) and named[device]
    print(f"{mesh} {precision} ZeRO-{zero}: {dict(counts)}")


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2)])
def test_nothing_is_found_in_a_thousand_steps(mesh):
    made = Rechecked(mesh, "bf16", 1)
    state = made.state
    for step in range(1000):
        state, differs = made.step(state, state, step)
        assert not differs.any(), step
    assert int(state.step) == 1000
