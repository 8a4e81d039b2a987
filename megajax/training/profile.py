"""`train.py --profile-pipeline`: what each stage's forward and backward take on this machine, and the bubble that
follows, beside the one predicted from equal stages."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from megajax.config import Config
from megajax.launch import start
from megajax.pipeline.measuring import Part
from megajax.pipeline.timing import StageTimes, bubble_overhead, published_bubble, wall_time
from megajax.processes import is_first_process, of_first_process
from megajax.program.memory import check_memory
from megajax.program.parts import one_part
from megajax.program.program import Program
from megajax.program.synthetic import random_batch
from megajax.program.train_step import loss_and_gradients
from megajax.validation import validate

ROUNDS = 5
SECONDS_PER_MEASUREMENT = 0.2


@dataclass(frozen=True)
class Profile:
    """Measured times in seconds.

    Attributes:
        times: of the stages and their chunks, each measured alone, the others idle.
        step: loss and gradients of a whole step with their reduction, without the optimizer.
        predicted: the step's time that the schedule's table gives for `times`, without the hand-overs.
        predicted_with_hand_over: and with them.
        bubble: share of pause over the busiest stage's work that follows from `times`, without the hand-overs.
        equal_bubble: the same for stages that take equally long.
    """

    times: StageTimes
    step: float
    predicted: float
    predicted_with_hand_over: float
    bubble: float
    equal_bubble: float


def profile_pipeline(config: Config) -> Profile:
    """Measure on random tokens; nothing is trained or written. Prints a table on process 0.

    Raises:
        UserError: the configuration cannot be used.
    """
    start(config)
    validate(config, jax.device_count())
    program = Program.on(config)
    check_memory(program, training=True, rows=config.train.microbatch)
    found = measure(program)
    if is_first_process():
        print("\n".join(_report(program, found)), flush=True)
    return found


def measure(program: Program) -> Profile:
    """Time every chunk of every stage alone, then the whole step."""
    schedule, pipe, chunks = program.schedule, program.config.mesh.pipe, program.config.pipeline.chunks
    params = program.layout.init().params
    rows = program.local_rows
    batch = program.put_batch({name: array[rows] for name, array in random_batch(program.config, 0).items()}, rows)

    def part(name: Part) -> Callable[[int], float]:
        run = one_part(program, name).lower(params, batch, np.int32(0), np.int32(1)).compile()
        return lambda k: _seconds_per_repeat(lambda repeats: run(params, batch, np.int32(k), np.int32(repeats)))

    def of_stages(name: Part) -> np.ndarray:
        seconds = part(name)
        return np.array([seconds(k) for k in range(chunks * pipe)]).reshape(chunks, pipe)

    forward = of_stages("forward")
    backward = np.maximum(of_stages("both") - forward, 0.0)
    parts: tuple[Part, ...] = ("embed", "head", "embed_backward") if program.config.splits_vocabulary else ()
    stages = StageTimes(forward, backward, **{name: part(name)(-1) for name in parts})
    times = dataclasses.replace(stages, hand_over=part("hand_over")(-1) / 2 if pipe > 1 else 0.0)
    whole = loss_and_gradients(program).lower(params, batch, np.int32(0)).compile()
    step = [_seconds(lambda: whole(params, batch, np.int32(0))) for _ in range(1 + ROUNDS)][1:]
    predicted = wall_time(schedule, stages), wall_time(schedule, times)
    return Profile(
        times, statistics.median(step), *predicted, bubble_overhead(schedule, stages), bubble_overhead(schedule)
    )


def _seconds(run: Callable[[], jax.Array]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def _seconds_per_repeat(run: Callable[[int], jax.Array]) -> float:
    """Time of one repeat, without what a call costs by itself."""
    _seconds(lambda: run(1))
    once = max(1e-6, _seconds(lambda: run(2)) / 2)
    # All processes have to agree on it.
    repeats = of_first_process(max(1, round(SECONDS_PER_MEASUREMENT / once)))
    pairs = [(_seconds(lambda: run(1 + repeats)), _seconds(lambda: run(1))) for _ in range(ROUNDS)]
    return statistics.median(max(0.0, long - short) / repeats for long, short in pairs)


def _report(program: Program, found: Profile) -> list[str]:
    config, schedule, times = program.config, program.schedule, found.times
    pipe, chunks = config.mesh.pipe, config.pipeline.chunks
    lines = [
        f"{config.pipeline.schedule}, {pipe} stages, {chunks} chunks each, {schedule.num_microbatches} microbatches of "
        f"{config.train.microbatch}, remat {config.train.remat}, vocabulary "
        + ("split" if config.splits_vocabulary else "replicated"),
        f"{'stage':<6} {'chunk':<6} {'layers':<7} {'forward ms':>11} {'backward ms':>12}",
    ]
    layers = (program.layout.placement.layer_index >= 0).sum(-1)
    for stage in range(pipe):
        for chunk in range(chunks):
            forward, backward = 1e3 * times.forward[chunk, stage], 1e3 * times.backward[chunk, stage]
            lines.append(f"{stage:<6} {chunk:<6} {layers[chunk, stage]:<7} {forward:>11.3f} {backward:>12.3f}")
    if config.splits_vocabulary:
        lines.append(
            f"all stages together: embedding {1e3 * times.embed:.3f} ms, head and loss {1e3 * times.head:.3f} ms, "
            f"embedding backward {1e3 * times.embed_backward:.3f} ms"
        )
    published = published_bubble(config.pipeline.schedule, pipe, schedule.num_microbatches, chunks)
    lines += [
        f"bubble over ideal  {found.bubble:.4f} from the measured times, {found.equal_bubble:.4f} predicted for equal "
        f"stages ({'none published' if published is None else f'published (p-1)/(v*m) = {published:.4f}'})",
        f"loss and gradients {1e3 * found.step:.1f} ms measured, {1e3 * found.predicted:.1f} ms from the table and the "
        f"stages' times, ratio {found.step / found.predicted:.3f}",
    ]
    if pipe > 1:
        lines.append(
            f"hand-over          {1e3 * times.hand_over:.3f} ms to a neighbour, {2 * schedule.num_ticks} a step; "
            f"with them {1e3 * found.predicted_with_hand_over:.1f} ms, "
            f"ratio {found.step / found.predicted_with_hand_over:.3f}"
        )
    if config.simulate_devices > 1 and pipe > 1:
        lines.append("simulated devices share this machine's cores: a measured step is not that of a real pipe")
    return lines
