"""With `--bitwise`: the bits of a run's numbers on its mesh and on one device."""

from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step
from megajax.data.synthetic import placed_batch
from megajax.settings.config import Config
from megajax.verify.comparison import Leaves, beside_the_scale
from megajax.verify.forms import with_axes
from megajax.verify.run import drawn_state
from megajax.verify.verdict import Finding

STEPS = 20  # a lost bit may need ten to show


def same_bits(config: Config, devices: Sequence[jax.Device], steps: int = STEPS) -> Finding:
    """Compare every number of each step on the mesh with what one device has: losses, norms and other metrics, and the
    whole state after it. As in training, the programs are optimized."""
    name = f"{config.precision} bits of {steps} steps"
    return compared(name, *(numbers(each, devices, steps) for each in (with_axes(config, ()), config)))


def compared(name: str, expected: Iterable[Leaves], actual: Iterable[Leaves]) -> Finding:
    """The first step and array with other bits, if any has."""
    count = 0
    for step, (right, here) in enumerate(zip(expected, actual, strict=True), 1):
        count = len(right)
        wrong = {leaf: n for leaf in right if (n := _different(right[leaf], here[leaf]))}
        if wrong:
            first, number = next(iter(wrong.items()))
            return Finding(name, len(wrong), 0, f"step {step}, {first}: {number} of {right[first].size} numbers")
    return Finding(name, 0, 0, f"{count} arrays in each")


def numbers(config: Config, devices: Sequence[jax.Device], steps: int) -> Iterator[Leaves]:
    """Of every step, the metrics and the canonical state after it."""
    program = Program.on(config, list(devices)[: config.mesh.num_devices])
    state, step = program.layout.from_canonical(drawn_state(program)), train_step(program)
    for number in range(steps):
        state, metrics = step(state, placed_batch(program, number))
        # Without the host's copy, XLA for CPUs may wait forever for the collectives of hundreds of small programs.
        leaves = beside_the_scale(program.layout.canonical(jax.device_get(state)))
        leaves = {f"metrics/{name}": value for name, value in metrics.items()} | leaves
        yield {name: np.asarray(leaf) for name, leaf in leaves.items()}


def _different(expected: np.ndarray, actual: np.ndarray) -> int:
    """How many numbers have other bits."""
    kind = f"u{expected.dtype.itemsize}"
    return int(np.sum(np.ascontiguousarray(expected).view(kind) != np.ascontiguousarray(actual).view(kind)))
