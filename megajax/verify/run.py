"""Run a configuration for a few steps on its mesh, and collect everything that must not depend on the mesh."""

import contextlib
import dataclasses
import math
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from megajax.config import Config
from megajax.errors import RunError, UserError
from megajax.precision import E4M3, OPERAND_DTYPE
from megajax.private import has_fusion_emitters
from megajax.program.communication import Collective, collectives_of
from megajax.program.program import Program
from megajax.program.state import TrainState
from megajax.program.synthetic import placed_batch
from megajax.program.train_step import train_step_with_gradients
from megajax.verify.comparison import Leaves, named_leaves
from megajax.verify.recording import Recording

FP8_IN_FP64 = "fp8-in-fp64"  # a step in fp64 whose products have operands rounded to e4m3
_PACKAGE = Path(__file__).parents[1]
QUICK: dict[str, Any] = {  # compile fast instead of well, and use few cores
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if has_fusion_emitters() else {}),
}


class TracingError(Exception):
    """A step cannot be traced; the message is that of JAX or an assertion, with the place in our code."""

    def __init__(self, error: Exception):
        ours = [
            frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents
        ]
        traced = [frame for frame in ours if Path(__file__).parent not in Path(frame.filename).parents]
        at = [
            f"{Path(each.filename).relative_to(_PACKAGE.parent)}:{each.lineno}, in {each.name}" for each in traced[-1:]
        ]
        text = textwrap.shorten(str(error), 1000, placeholder=" …")
        super().__init__("; ".join([f"{type(error).__name__}: {text}", *at]))


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    """In the block, turn everything that stops tracing, except user errors, into `TracingError`."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        raise TracingError(error) from error


@dataclass(frozen=True)
class MeshRun:
    """Results of a few steps on a mesh; the last step overflows and must be skipped."""

    config: Config  # the configuration that ran
    fresh: Leaves  # initial weights as drawn on this mesh, in canonical form; empty unless requested
    metrics: list[dict[str, float]]  # scalar metrics of every step by name, including the skipped step
    counts: list[Leaves]  # metrics that are arrays of integers: the loads of experts
    gradients: list[Leaves]  # gradients of every step except the skipped one, in canonical form
    weights: Leaves  # after all steps, in canonical form; trained ones are main weights
    rows: list[list[int]]  # rows of the global batch held at each coordinate of the row axes
    unequal: list[str]  # leaves of the state whose replicas differ between devices
    uncast: list[str]  # leaves whose compute weights are not the cast main weights
    collectives: list[Collective]  # what a step communicates
    states: list[TrainState]  # canonical states before every step except the skipped one; empty unless requested
    operand_dtype: DTypeLike | None = None  # given to the program, see there

    @property
    def operands(self) -> DTypeLike | None:
        """The dtype of the operands of layers' products with weights; None: the compute dtype, by plain products."""
        return self.operand_dtype or OPERAND_DTYPE.get(self.config.precision)

    @property
    def kind(self) -> str:
        """What it computes in, in one word."""
        return FP8_IN_FP64 if self.operand_dtype == E4M3 else self.config.precision

    @property
    def losses(self) -> list[float]:
        return [metrics["loss"] for metrics in self.metrics[: len(self.gradients)]]


def run(
    config: Config,
    devices: Sequence[jax.Device],
    steps: int,
    *,
    with_fresh: bool = False,
    with_states: bool = False,
    states: Sequence[TrainState] = (),
    quick_compile: bool = True,
    operand_dtype: DTypeLike | None = None,
) -> MeshRun:
    """Run `config` on the first of `devices` with random batches, from weights drawn by NumPy: `steps` steps, and one
    more in which the loss scale is infinite.

    Args:
        with_fresh, with_states: whether to return these.
        states: states of another run. Each step starts from one of them instead of from the result of the step before,
            so that rounding does not add up: Adam makes a full-size update even of a gradient that is only rounding.
        operand_dtype: see `Program`.
    """
    with in_precision(config):
        with _traced():
            program = Program.on(config, list(devices)[: config.mesh.num_devices], operand_dtype)
            traced = train_step_with_gradients(program).trace(program.layout.shapes, program.batch_types)
        options: dict[str, Any] = dict(QUICK) if quick_compile else {}
        layout = program.layout
        fresh = _canonical(program, layout.init(options).params) if with_fresh else {}
        state = layout.from_canonical(drawn_state(program))
        batches = [placed_batch(program, step) for step in range(steps + 1)]
        step = traced.lower().compile(options)
        metrics, counts, gradients, kept = [], [], [], []
        for number, batch in enumerate(batches):
            if number == steps:
                state = _overflowing(state)
            elif states:
                state = _taken_over(program, states[number], state)
            if with_states and number < steps:
                kept.append(jax.device_get(layout.to_canonical(state)))
            state, figures, grads = step(state, batch)
            metrics.append({name: float(value) for name, value in figures.items() if value.ndim == 0})
            counts.append({name: np.asarray(value) for name, value in figures.items() if value.ndim})
            if number < steps:
                gradients.append(_canonical(program, grads))
        weights = _canonical(program, layout.with_main(state).params)
        uncast = [] if state.main is None else _uncast(program, state)
        found = collectives_of(traced.jaxpr)
        rows, unequal = _rows(program), _unequal(state)
        parts = metrics, counts, gradients, weights, rows, unequal, uncast, found, kept
        return MeshRun(config, fresh, *parts, operand_dtype)


def recorded(
    config: Config, devices: Sequence[jax.Device], quick_compile: bool, operand_dtype: DTypeLike | None = None
) -> Recording:
    """Every activation of the first step of such a run."""
    recording = Recording()
    with in_precision(config), recording.taken():
        program = Program.on(config, list(devices)[: config.mesh.num_devices], operand_dtype)
        state = program.layout.from_canonical(drawn_state(program))
        batch = placed_batch(program, 0)
        step = train_step_with_gradients(program).lower(state, batch).compile(QUICK if quick_compile else {})
        jax.block_until_ready(step(state, batch))
    return recording


def drawn_weights(program: Program) -> Any:
    """Canonical weights, the same on every mesh and in every precision, of realistic sizes. No bias is zero and no
    scale is one, so that omitting one or applying it twice is noticed."""
    rng, size = np.random.default_rng(0), program.config.model.init_std

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean, deviation = {"scale": (1.0, size), "bias": (0.0, size / 10)}.get(path[-1].key, (0.0, size))
        return rng.normal(mean, deviation, leaf.shape).astype(np.float32).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, program.layout.canonical_shapes.params)


def drawn_state(program: Program) -> TrainState:
    """The canonical state before the first step, with these weights."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), program.layout.canonical_shapes)
    return dataclasses.replace(zeros, params=drawn_weights(program))


@contextlib.contextmanager
def in_precision(config: Config) -> Iterator[None]:
    """Enable 64-bit types in JAX if the precision needs them, in this thread and in threads that run callbacks."""
    wanted, before = config.precision == "fp64", jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", wanted)
    try:
        with jax.enable_x64(wanted):
            yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _canonical(program: Program, tree: Any) -> Leaves:
    return named_leaves(program.layout.canonical_weights(jax.device_get(tree)))


def _taken_over(program: Program, canonical: TrainState, state: TrainState) -> TrainState:
    """`state` with the weights and moments of another run, cast to this run's precision."""
    layout = program.layout
    cast = jax.tree.map(lambda leaf, type_: leaf.astype(type_.dtype), canonical, layout.canonical_shapes)
    taken = layout.from_canonical(cast)
    return dataclasses.replace(taken, loss_scale=state.loss_scale, recent_norms=state.recent_norms)


def _overflowing(state: TrainState) -> TrainState:
    """A state with an infinite loss scale, so that no gradient is finite."""
    place = state.loss_scale.scale.sharding
    scale = jax.device_put(np.float32(math.inf), place)
    return dataclasses.replace(state, loss_scale=dataclasses.replace(state.loss_scale, scale=scale))


def _rows(program: Program) -> list[list[int]]:
    """The rows of the global batch at each coordinate of the row axes, found by placing a batch of row numbers. Devices
    with the same coordinate must have the same rows; otherwise the list is empty."""
    name, type_ = next(iter(program.batch_types.items()))
    row_B = np.arange(len(type_), dtype=np.int32)
    numbers = np.broadcast_to(row_B.reshape(-1, *[1] * (type_.ndim - 1)), type_.shape)
    local = program.local_rows
    shards = program.put_batch({name: numbers[local]}, local)[name].addressable_shards
    held: dict[Any, list[int]] = {shard.device: shard.data[(..., *[0] * (type_.ndim - 1))].tolist() for shard in shards}
    places = []
    for devices in program.mesh.devices.reshape(program.config.mesh.row_shards, -1):  # the row axes come first
        same = {tuple(held[device]) for device in devices}
        places.append(list(same.pop()) if len(same) == 1 else [])
    return places


def _unequal(state: TrainState) -> list[str]:
    """Leaves whose replicas differ between devices."""

    def differs(leaf: jax.Array) -> bool:
        parts = {(str(shard.index), np.asarray(shard.data).tobytes()) for shard in leaf.addressable_shards}
        return len(parts) > len({index for index, _ in parts})

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path) for path, leaf in leaves if differs(leaf)]


def _uncast(program: Program, state: TrainState) -> list[str]:
    """Trained leaves of `params` that are not bitwise equal to the main weights cast to the compute dtype."""
    layout = program.layout
    params = named_leaves(jax.device_get(layout.trained(state.params)))
    computed = named_leaves(jax.device_get(layout.computed(jax.device_get(state.main))))
    return [name for name, leaf in params.items() if leaf.tobytes() != computed[name].tobytes()]
