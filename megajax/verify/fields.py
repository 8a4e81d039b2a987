"""A configuration's step in numbers that are never rounded (`jaxequal`): nothing is compiled, and no devices are
needed."""

import zlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxequal import numbers
from jaxequal.comparison import factor
from jaxequal.interpreter import Interpreter
from jaxequal.numbers import PRIMES, Value, elements, is_float, seeded
from megajax.core.backend import CPU, Backend
from megajax.core.precision import OPERAND_DTYPE
from megajax.core.program.communication import Collective, collectives_of
from megajax.core.program.loss import loss_of
from megajax.core.program.program import Program
from megajax.core.program.state import StateLayout, TrainState
from megajax.core.program.train_step import train_step_with_gradients
from megajax.data.synthetic import random_batch
from megajax.settings.config import Config
from megajax.verify.comparison import beside_the_scale, named_leaves, named_parts
from megajax.verify.recording import Activation, Recording
from megajax.verify.run import in_precision, traced

_UPDATES = 20  # that the state has seen: enough for the median of gradient norms to count

Values = dict[str, Value]  # by name


@dataclass(frozen=True)
class Outcome:
    """What a step returns and leaves, if its branches are taken in one way."""

    metrics: Values
    state: dict[str, Values]  # in canonical form, by part
    average: Values  # the moving average by its definition, from that before and the new weights


@dataclass(frozen=True)
class ExactStep:
    """A step from random weights, moments and averages, the same on every mesh."""

    config: Config  # the configuration that ran
    backend: Backend
    taken: Outcome
    otherwise: Outcome  # where comparisons of scalars have the other result: clipping, spikes
    gradients: Values  # in canonical form
    skipped: list[str]  # what a step whose numbers are not finite changes, though only the loss scale may change
    unequal: list[str]  # results whose replicas differ between devices
    collectives: list[Collective]
    in_plan: bool  # whether the plan knows all of these


class Drawn:
    """A configuration's program, and random numbers for its state.

    Attributes:
        machine: what runs it.
        scale: of the estimates; without one (NaN), numbers have a random order, in which any difference shows.
        canonical: the state in canonical form, the same on every mesh.
        state: the state on the mesh's stages.
    """

    def __init__(self, config: Config, backend: Backend = CPU, seed: int = 0, scale: float = 1.0):
        self.program, self.machine, self.seed = Program.abstract(config, backend), Interpreter(seed, scale), seed
        layout = self.program.layout
        with seeded(seed, scale):
            self.canonical = jax.tree_util.tree_map_with_path(_state_value, layout.canonical_shapes)
        self.state = self.run(layout.pipelined, (layout.canonical_shapes, self.canonical))

    @property
    def weights(self) -> tuple[Any, Any]:
        """Types and values of the weights for forward-only programs."""
        layout = self.program.layout
        if not layout.gathers_late:
            return layout.computed_shapes, self.state.params
        return self.typed(layout.params_on_stages, (layout.canonical_shapes.params, self.canonical.params))

    def run(self, function: Any, *arguments: tuple[Any, Any]) -> Any:
        """The result of a function, given the types and values of its arguments."""
        return self.typed(function, *arguments)[1]

    def typed(self, function: Any, *arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        """The types and values of a function's result.

        Raises:
            TracingError: it cannot be traced.
        """
        types, values = zip(*arguments, strict=True)
        with traced():
            program, out = jax.make_jaxpr(function, return_shape=True)(*types)
        return out, jax.tree.unflatten(jax.tree.structure(out), self.machine(program, jax.tree.leaves(values)))

    @property
    def batch(self) -> Values:
        """A random batch."""
        found = random_batch(self.program.config, self.seed).items()
        with seeded(self.seed):
            return {name: _drawn(name, x) if is_float(x.dtype) else x[None, None] for name, x in found}


def recorded_step(config: Config, backend: Backend = CPU, seed: int = 0) -> Recording:
    """Every activation of a step."""
    recording = Recording()
    with recording.taken():
        run_step(config, backend, seed, branches=False)
    return recording


def run_step(config: Config, backend: Backend = CPU, seed: int = 0, *, branches: bool = True) -> ExactStep:
    """Run the step of a valid configuration on its mesh, with its other `branches` or without.

    Raises:
        TracingError: it cannot be traced or run.
    """
    with in_precision(config), traced():
        drawn = Drawn(config, backend, seed)
        program, machine, types = drawn.program, drawn.machine, drawn.program.layout.shapes
        step = train_step_with_gradients(program).trace(types, program.batch_types)
        layout, inputs = program.layout, jax.tree.leaves((drawn.state, drawn.batch))

        def result() -> tuple[TrainState, Values, Any]:
            return jax.tree.unflatten(jax.tree.structure(step.out_info), machine(step.jaxpr, inputs))

        def outcome(after: TrainState, metrics: Values) -> Outcome:
            canonical = drawn.run(layout.canonical, (types, after))
            return Outcome(metrics, named_parts(canonical), _averaged(drawn, canonical, bool(metrics["skipped"].all())))

        after, metrics, gradients = result()
        taken = outcome(after, metrics)
        canonical = drawn.run(layout.canonical_weights, (step.out_info[2], gradients))
        unequal = [str(each.shape) for each in machine.disagreeing]
        otherwise, skipped = taken, list[str]()
        if branches:
            machine.flipped = True
            otherwise = outcome(*result()[:2])
            machine.flipped, machine.finite = False, False
            after, metrics, _ = result()
            skipped = _changed(drawn.state, after) + ([] if metrics["skipped"].all() else ["the metric `skipped`"])
    return ExactStep(
        config=config,
        backend=backend,
        taken=taken,
        otherwise=otherwise,
        gradients=named_leaves(canonical),
        skipped=skipped,
        unequal=unequal,
        collectives=collectives_of(step.jaxpr),
        in_plan=_in_plan(config, layout),
    )


def _in_plan(config: Config, layout: StateLayout) -> bool:
    """Whether the plan knows what a step communicates: not for a user's loss, or an optimizer of whole weights; and in
    8 bits not how many rows experts that drop nothing compute, which are rounded up to whole blocks."""
    rounded_up = config.precision in OPERAND_DTYPE and config.model.num_experts and not config.model.expert_capacity
    return loss_of(config) is None and not (layout.mixing or rounded_up)


def _state_value(path: Any, leaf: jax.ShapeDtypeStruct) -> Value:
    """Random numbers for a leaf of the canonical state; counters are those after some updates."""
    if not is_float(leaf.dtype):
        return np.full((1, 1, *leaf.shape), _UPDATES, leaf.dtype)
    return _drawn(jax.tree_util.keystr(path), leaf)


def _drawn(name: str, leaf: Any) -> Value:
    return numbers.drawn(leaf.shape, zlib.crc32(name.encode()))


def _averaged(drawn: Drawn, after: TrainState, skipped: bool) -> Values:
    """The moving average after a step, given the canonical state, by its definition; empty if there is none."""
    layout, old = drawn.program.layout, drawn.canonical.average
    if old is None or skipped:
        return named_leaves(old)
    share = numbers.constant(1.0 - drawn.program.config.train.ema, layout.main_dtype)

    def moved(old: Value, new: Value) -> Value:
        step = numbers.subtract(new, old)
        return numbers.add(old, numbers.multiply(share.reshape(len(share), *[1] * (step.ndim - 1)), step))

    return named_leaves(jax.tree.map(moved, old, layout.trained(after.params)))


def _changed(before: TrainState, after: TrainState) -> list[str]:
    """Leaves that differ, except the loss scale's."""
    new = beside_the_scale(after)
    return [name for name, old in beside_the_scale(before).items() if (elements(old) != elements(new[name])).any()]


def unequal(expected: Value, actual: Value) -> str:
    """How a value differs from another, in words; empty if it does not."""
    if expected.shape != actual.shape:
        return f"shape {actual.shape[2:]} instead of {expected.shape[2:]}"
    expected, actual = elements(expected), elements(actual)
    return "" if np.array_equal(expected, actual) else _how(expected, actual)


def _how(expected: np.ndarray, actual: np.ndarray) -> str:
    times = factor(actual.reshape(len(actual), -1), expected.reshape(len(expected), -1))
    return "different numbers" if times is None else f"{times} times what it should be"


def unlike(expected: Activation, actual: Activation) -> str:
    """The same of a recorded activation."""
    if actual.value.shape != expected.value.shape:
        return f"shape {actual.value.shape} instead of {expected.value.shape}"
    if not actual.agree and expected.agree:
        return "replicas, or a recomputation, disagree"
    if ((expected.value < 0) != (actual.value < 0)).any():
        return "different columns are masked"
    if (expected.value % PRIMES[0] == actual.value % PRIMES[0]).all():
        return ""
    return _how(*(each.value.astype(np.int64)[None] for each in (expected, actual)))
