"""`train.py --profile-pipeline`: measured times of each stage's forward and backward, the resulting bubble next to the
one predicted for equal stages, and what deferring weight gradients would change."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.measuring import Part
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.pipeline.timing import StageTimes, published_bubble, step_time, wall_time
from megajax.core.program.memory import factor_bytes, residual_bytes
from megajax.core.program.program import Batch, Program
from megajax.core.program.synthetic import placed_batch
from megajax.core.program.train_step import computed_weights, loss_and_gradients, one_part
from megajax.host.phases import phase, watched
from megajax.host.processes import is_first_process, of_first_process
from megajax.plan.time import unit_of_times
from megajax.settings.config import Config
from megajax.start.launch import start
from megajax.training.begin import checked_program, with_layers
from megajax.training.display import Display

ROUNDS = 5
SECONDS_PER_MEASUREMENT = 0.4


@dataclass(frozen=True)
class Profile:
    """Measured times in seconds. Predictions combine the schedule's table with the times of the passes."""

    times: StageTimes  # of every chunk, measured while the others are idle; `backward` includes weight gradients
    apart: StageTimes | None  # the same with weight gradients separate from `backward`; None with one stage
    step: float  # loss and reduced gradients of a whole step, without the optimizer
    predicted: float  # prediction of `step` without transfers between stages
    predicted_with_transfers: float
    bubble: float  # idle time divided by the busiest stage's work, without transfers
    equal_bubble: float  # the same for stages that take equally long


def profile_pipeline(config: Config) -> Profile:
    """Measure on random tokens and print a table on process 0; nothing is trained or written."""
    start(config)
    config = with_layers(config)
    program = checked_program(config)
    display = Display(is_first_process())
    with watched(functools.partial(display.phase, announced=False)):
        found = measure(program)
    if is_first_process():
        print("\n".join(_report(config, program, found)), flush=True)
    return found


def measure(program: Program) -> Profile:
    """Time every chunk of every stage separately, then the whole step."""
    schedule, batch = program.schedule, placed_batch(program, 0)
    params = computed_weights(program, program.layout.init())
    passes = Passes(program, params, batch)
    with phase("measuring the passes"):
        times, apart = passes.measure(ROUNDS)
    with phase("compiling the step"):
        whole = loss_and_gradients(program).lower(params, batch, np.int32(0)).compile()
    step = [_seconds(lambda: whole(params, batch, np.int32(0))) for _ in range(1 + ROUNDS)][1:]
    own = times if schedule.deferral is None or apart is None else apart
    without = dataclasses.replace(own, p2p_transfer=0.0)
    predicted = wall_time(schedule, without), wall_time(schedule, own)
    bubbles = step_time(schedule, without).bubble, step_time(schedule).bubble
    return Profile(times, apart, statistics.median(step), *predicted, *bubbles)


class Passes:
    """The passes of a step, compiled so that they can be repeated."""

    def __init__(self, program: Program, params: Any, batch: Batch):
        self.pipe, self.chunks = program.config.mesh.pipe, program.config.pipeline.chunks
        together, deferred = with_weight_gradients(program, "together"), with_weight_gradients(program, "deferred")
        stages = range(self.chunks * self.pipe)
        self.timers: dict[str, list[Callable[[], float]]] = {}

        def add(name: str, part: Part, of: Program = together, stages: Iterable[int] = stages) -> None:
            with phase("compiling the passes"):
                run = one_part(of, part).lower(params, batch, np.int32(0), np.int32(1)).compile()

            def timer(k: int) -> Callable[[], float]:
                return _timer(lambda repeats: run(params, batch, np.int32(k), np.int32(repeats)))

            self.timers[name] = [timer(k) for k in stages]

        add("forward", "forward")
        add("both", "both")
        parts: tuple[Part, ...] = ("embed", "head", "embed_backward") if program.config.splits_vocabulary else ()
        parts += ("p2p_transfer",) if self.pipe > 1 else ()
        for part in parts:
            add(part, part, stages=[-1])
        if self.pipe > 1:
            add("both_apart", "both", deferred)
            add("all", "all", deferred)

    def measure(self, rounds: int) -> tuple[StageTimes, StageTimes | None]:
        """`Profile.times` and `Profile.apart`: medians over rounds of all passes, so all see the same conditions."""
        samples = [{name: [timer() for timer in row] for name, row in self.timers.items()} for _ in range(rounds)]
        found = {name: np.median([sample[name] for sample in samples], axis=0) for name in self.timers}
        shape = self.chunks, self.pipe
        ends = {name: float(found[name][0]) for name in ("embed", "head", "embed_backward") if name in found}
        forward, both = found["forward"].reshape(shape), found["both"].reshape(shape)
        times = StageTimes(forward, np.maximum(both - forward, 0.0), **ends)
        if self.pipe == 1:
            return times, None
        times = dataclasses.replace(times, p2p_transfer=float(found["p2p_transfer"][0]) / 2)
        both, everything = (found[name].reshape(shape) for name in ("both_apart", "all"))
        input_gradient, weight_gradient = np.maximum(both - forward, 0.0), np.maximum(everything - both, 0.0)
        return times, dataclasses.replace(times, backward=input_gradient, weight_gradient=weight_gradient)


def with_weight_gradients(program: Program, when: Literal["together", "deferred"]) -> Program:
    """`program` with weight gradients together or deferred."""
    pipeline = dataclasses.replace(program.config.pipeline, weight_gradients=when)
    return Program(dataclasses.replace(program.config, pipeline=pipeline), program.mesh)


def _seconds(run: Callable[[], jax.Array]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def _timer(run: Callable[[int], jax.Array]) -> Callable[[], float]:
    """A function that measures one repeat of `run`, without the overhead of a call."""
    _seconds(lambda: run(1))
    once = max(1e-6, _seconds(lambda: run(2)) / 2)
    # All processes must use the same number.
    repeats = of_first_process(max(1, round(SECONDS_PER_MEASUREMENT / once)))
    return lambda: max(0.0, _seconds(lambda: run(1 + repeats)) - _seconds(lambda: run(1))) / repeats


def _report(config: Config, program: Program, found: Profile) -> list[str]:
    schedule, times = program.schedule, found.times
    pipe, chunks = config.mesh.pipe, config.pipeline.chunks
    unit, scale, _ = unit_of_times(found.step)
    said = lambda seconds: f"{scale * seconds:.3f} {unit}"  # noqa: E731
    passes = {f" forward {unit}": times.forward, f" backward {unit}": times.backward}
    if found.apart is not None:
        passes[f" input gradient {unit}"] = found.apart.backward
        passes[f" weight gradient {unit}"] = np.asarray(found.apart.weight_gradient)
    lines = [
        f"{config.pipeline.schedule}, {pipe} stages, {chunks} chunks each, {schedule.num_microbatches} microbatches of "
        f"{config.train.microbatch}, remat {config.train.remat}, vocabulary "
        + ("split" if config.splits_vocabulary else "replicated"),
        f"{'stage':<6} {'chunk':<6} {'layers':<7} {' '.join(passes)}",
    ]
    layers = program.layout.placement.counts
    for stage in range(pipe):
        for chunk in range(chunks):
            row = "".join(f" {scale * seconds[chunk, stage]:>{len(title)}.3f}" for title, seconds in passes.items())
            lines.append(f"{stage:<6} {chunk:<6} {layers[chunk, stage]:<7}{row}")
    if config.splits_vocabulary:
        lines.append(
            f"summed over stages: embedding {said(times.embed)}, head and loss {said(times.head)}, embedding backward "
            f"{said(times.embed_backward)}"
        )
    published = published_bubble(config.pipeline.schedule, pipe, schedule.num_microbatches, chunks)
    by_paper = "none published" if published is None else f"published (p-1)/(v*m) = {published:.4f}"
    lines += [
        f"bubble             {found.bubble:.4f} of the ideal time by the measured times, {found.equal_bubble:.4f} "
        f"predicted for equal stages ({by_paper})",
        f"loss and gradients {said(found.step)} measured, {said(found.predicted)} from the table and the stages' times,"
        f" ratio {found.step / found.predicted:.3f}",
    ]
    if pipe > 1:
        lines.append(
            f"p2p transfer       {said(times.p2p_transfer)} to a neighbouring stage, {2 * schedule.num_ticks} "
            f"per step; with them {said(found.predicted_with_transfers)}, "
            f"ratio {found.step / found.predicted_with_transfers:.3f}"
        )
    lines += _deferral(program, found)
    if config.simulate_devices > 1 and pipe > 1:
        lines.append("simulated devices share this machine's cores, so this is not the timing of a real pipeline")
    return lines


def _deferral(program: Program, found: Profile) -> list[str]:
    """What deferring weight gradients would change, for several limits."""
    if found.apart is None:
        return ["--pipeline.weight-gradients deferred has no effect with a single stage"]
    pipeline, pipe = program.config.pipeline, program.config.mesh.pipe
    deferred = with_weight_gradients(program, "deferred")
    residuals, factors = residual_bytes(deferred) / 2**20, factor_bytes(deferred) / 2**20
    unit, scale, _ = unit_of_times(found.step)
    lines = [
        f"weight gradients   deferred, a chunk keeps {factors:,.1f} MiB of factors until they are "
        f"computed, beside {residuals:,.1f} MiB until its backward; from the table and the "
        "passes' times, with p2p transfers:",
        f"{'':<13} {f'step {unit}':>8} {'of together':>12} {'factors MiB':>12} {'residuals MiB':>14}",
    ]
    together = 0.0
    for most in (None, "deferred"):
        deferring = None if most is None else PassTimes()
        table = make_schedule(pipeline.schedule, pipe, program.num_microbatches, pipeline.chunks, deferring)
        seconds = wall_time(table, found.times if most is None else found.apart)
        together = together or seconds
        lines.append(
            f"{'together' if most is None else most:<13} {scale * seconds:>8.3f} {seconds / together:>12.3f} "
            f"{table.num_factor_slots * factors:>12.2f} {table.num_slots * residuals:>14.2f}"
        )
    return lines
