"""Run a configuration's compiled step a few times on its mesh, and collect what must not depend on the mesh."""

import contextlib
import dataclasses
import math
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from megajax.core.backend import CPU, Backend
from megajax.core.errors import RunError, UserError
from megajax.core.precision import E4M3
from megajax.core.private import has_fusion_emitters
from megajax.core.program.program import Batch, Program
from megajax.core.program.state import TrainState
from megajax.core.program.train_step import train_step_with_gradients
from megajax.data.synthetic import placed_batch
from megajax.settings.config import Config
from megajax.verify.accumulation import sums_in_other_dtypes
from megajax.verify.comparison import Leaves, beside_the_scale, named_leaves

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
        frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
        ours = [each for each in frames if _PACKAGE in each[0].parents and Path(__file__).parent not in each[0].parents]
        at = [f"{path.relative_to(_PACKAGE.parent)}:{frame.lineno}, in {frame.name}" for path, frame in ours[-1:]]
        text = textwrap.shorten(str(error), 1000, placeholder=" …")
        super().__init__("; ".join([f"{type(error).__name__}: {text}", *at]))


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """In the block, turn everything that stops tracing, except user errors, into `TracingError`."""
    try:
        yield
    except (UserError, RunError, TracingError):
        raise
    except Exception as error:
        raise TracingError(error) from error


@dataclass(frozen=True)
class MeshRun:
    """Results of a few steps on a mesh. Before the last one another overflows, and must be skipped."""

    config: Config  # the configuration that ran
    metrics: list[dict[str, float]]  # scalar metrics of every step by name
    loads: Leaves  # of the first step: metrics that are arrays of integers, the loads of experts
    gradients: Leaves  # of the first step, in canonical form
    weights: Leaves  # after the first step: main weights, in canonical form
    uncast: list[str]  # leaves whose compute weights are then not the cast main weights
    overflow: dict[str, float]  # scalar metrics of the overflowing step
    moved: list[str]  # leaves of the state that this step changed, apart from the loss scale
    unequal: list[str]  # leaves of the last state whose replicas differ between devices
    rows: list[list[int]]  # rows of the global batch held at each coordinate of the row axes
    sums: list[str]  # weights whose gradients are not summed over microbatches in the dtype that is asked for
    operand_dtype: DTypeLike | None = None  # given to the program, see there

    @property
    def kind(self) -> str:
        """What it computes in, in one word."""
        return FP8_IN_FP64 if self.operand_dtype == E4M3 else self.config.precision


def run(
    config: Config,
    devices: Sequence[jax.Device],
    steps: int,
    *,
    quick_compile: bool = True,
    operand_dtype: DTypeLike | None = None,
    backend: Backend = CPU,
) -> MeshRun:
    """Run `config` on the first of `devices` with random batches, from weights drawn by NumPy: at least two `steps`,
    and before the last of them one more in which the loss scale is infinite. For `operand_dtype` and `backend` see
    `Program`.
    """
    with in_precision(config):
        with traced():
            program = Program.on(config, list(devices)[: config.mesh.num_devices], operand_dtype, backend)
            whole = train_step_with_gradients(program).trace(program.layout.shapes, program.batch_types)
        # Without fusions, the older emitters compute wrong sums (JAX 0.10).
        options: dict[str, Any] = dict(QUICK) if quick_compile and not config.bitwise else {}
        *batches, extra = (placed_batch(program, step) for step in range(steps + 1))
        step = whole.lower().compile(options)
        state, figures, grads = step(program.layout.from_canonical(drawn_state(program)), batches[0])
        metrics, gradients = [_scalars(figures)], _canonical(program, grads)
        loads = {name: np.asarray(value) for name, value in figures.items() if value.ndim}
        weights = _canonical(program, program.layout.with_main(state).params)
        uncast = [] if state.main is None else _uncast(program, state)
        for batch in batches[1:]:
            if batch is batches[-1]:
                state, overflow, moved = _overflown(step, state, extra)
            state, figures, _ = step(state, batch)
            metrics.append(_scalars(figures))
        return MeshRun(
            config=config,
            metrics=metrics,
            loads=loads,
            gradients=gradients,
            weights=weights,
            uncast=uncast,
            overflow=overflow,
            moved=moved,
            unequal=_unequal(state),
            rows=_rows(program),
            sums=[] if config.bitwise else sums_in_other_dtypes(program, whole.jaxpr),
            operand_dtype=operand_dtype,
        )


def drawn_weights(program: Program, seed: int = 0) -> Any:
    """Canonical weights, the same on every mesh and in every precision, of realistic sizes. No bias is zero and no
    scale is one, so that omitting one or applying it twice is noticed."""
    rng, size = np.random.default_rng(seed), program.config.model.init_std

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean, deviation = {"scale": (1.0, size), "bias": (0.0, size / 10)}.get(path[-1].key, (0.0, size))
        return rng.normal(mean, deviation, leaf.shape).astype(np.float32).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, program.layout.canonical_shapes.params)


def drawn_state(program: Program) -> TrainState:
    """The canonical state before the first step, with these weights, and others as their average, if there is one."""
    layout = program.layout
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), layout.canonical_shapes)
    average = None if zeros.average is None else layout.trained(drawn_weights(program, seed=1))
    return dataclasses.replace(zeros, params=drawn_weights(program), average=average)


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
    """Copies of weights or gradients in canonical form: steps donate their state."""
    return named_leaves(program.layout.canonical_weights(jax.tree.map(np.array, tree)))


def _scalars(figures: dict[str, jax.Array]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if value.ndim == 0}


def _overflown(
    step: Callable[..., Any], before: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, float], list[str]]:
    """Run a step with an infinite loss scale, so that no gradient is finite: the state after it with its old scale, the
    step's scalar metrics, and the leaves of the state that it changed."""
    old, scale = _bits(before), np.asarray(before.loss_scale.scale)
    after, figures, _ = step(_with_scale(before, np.float32(math.inf)), batch)
    new = _bits(after)
    return _with_scale(after, scale), _scalars(figures), [name for name in old if old[name] != new[name]]


def _with_scale(state: TrainState, scale: Any) -> TrainState:
    placed = jax.device_put(scale, state.loss_scale.scale.sharding)
    return dataclasses.replace(state, loss_scale=dataclasses.replace(state.loss_scale, scale=placed))


def _bits(state: TrainState) -> dict[str, bytes]:
    """The bits of every leaf, except the loss scale's, by its path."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in beside_the_scale(state).items()}


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
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if differs(leaf)]


def _uncast(program: Program, state: TrainState) -> list[str]:
    """Trained leaves of `params` that are not bitwise equal to the main weights cast to the compute dtype."""
    layout = program.layout
    params = named_leaves(jax.device_get(layout.trained(state.params)))
    computed = named_leaves(jax.device_get(layout.computed(jax.device_get(state.main))))
    return [name for name, leaf in params.items() if leaf.tobytes() != computed[name].tobytes()]
