"""Measurements in turn, A B A B, so that both sides see the same machine: each side is a process that works when told.

A side may be several processes of one run. A worker calls `serve`; the benchmark talks to it through a `Side`. Whoever
imports this finds the repository's `megajax`, installed or not.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.core.batch import pairs_form
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES
from megajax.settings.config import Config
from megajax.settings.flags import parse

BENCHMARKS = Path(__file__).resolve().parent
DEFAULT = str(BENCHMARKS / "gpt-4x512.toml")

# glibc keeps what PyTorch frees on a CPU: a few percent of a step. (`megajax.start.launch` has it do so for us.)
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}

# Several sides on one GPU: none takes memory that it does not need, and ours at most this share.
SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_CLIENT_MEM_FRACTION": "0.45"}

_MARK = "paired: "  # starts the lines of a worker's standard output that are answers


class Failed(Exception):
    """A worker ended before it answered."""


def serve(step: Callable[[], Any], others: Mapping[str, Callable[[], dict]], *, warm_up: int = 2, **about: Any) -> None:
    """Be a worker: warm up, say so, then answer requests on standard input until it closes.

    Args:
        step: starts one training step and returns its loss, as a number or as what becomes one when it is there. As in
            training, a step is awaited only after the next one has been started; where that takes until the step's end,
            the first time is of two steps and the last nothing, so medians count.
        others: further things that can be asked for, by name.
        about: what the worker says of itself when it is ready.
    """

    def steps(number: int) -> dict:
        seconds, losses = [], []
        start, running = time.perf_counter(), step()
        for left in reversed(range(number)):
            running, started = step() if left else None, running
            losses.append(float(started))
            start, before = time.perf_counter(), start
            seconds.append(start - before)
        return {"seconds": seconds, "losses": losses}

    start = time.perf_counter()
    first = steps(warm_up)
    say(about | {"warm_up_seconds": time.perf_counter() - start, "losses": first["losses"]})
    for line in sys.stdin:
        name, *arguments = line.split()
        say(steps(int(arguments[0])) if name == "steps" else others[name]())


def say(answer: dict) -> None:
    """Answer, as a worker."""
    print(_MARK + json.dumps(answer), flush=True)


class Side:
    """One side of the comparison: a command, or one for each process of a run.

    Args:
        commands: of the processes; the first one's answers count.
        cores: process `i` is pinned to the i-th of these lists of cores; None: not pinned.
        environment: variables set for the processes.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        *,
        cores: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.name = name
        self.processes = []
        for number, command in enumerate(commands):
            pin = ["taskset", "--cpu-list", cores[number]] if cores is not None else []
            self.processes.append(
                subprocess.Popen(
                    [*pin, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | dict(environment or {}),
                )
            )
        self.about = self._answer()

    def ask(self, request: str) -> dict:
        """The first process's answer to a request that all processes get."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: its answer will be missing
                process.stdin.write(request + "\n")
                process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        answers = [self._line(process) for process in self.processes]
        return json.loads(answers[0].removeprefix(_MARK))

    def _line(self, process: subprocess.Popen) -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(_MARK):
                return line
        self.close()
        raise Failed(f"{self.name}: a process ended with exit code {process.wait()}")

    def cpu_seconds(self) -> float:
        """CPU time that the processes have taken so far."""
        ticks = 0
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def own_flags(**options: Any) -> tuple[argparse.Namespace, list[str], str]:
    """A benchmark's own flags from the command line, the others, and the usage.

    Args:
        options: defaults by name: False is a switch, a tuple the choices (the first, which may be None, is the
            default), a type that of a flag without a default.

    Raises:
        UserError: one is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, value in options.items():
        given: dict[str, Any] = {"type": type(value), "default": value}
        if value is False:
            given = {"action": "store_true"}
        elif isinstance(value, tuple):
            given = {"choices": [each for each in value if each], "default": value[0]}
        elif isinstance(value, type):
            given = {"type": value}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    try:
        own, flags = parser.parse_known_args()
    except argparse.ArgumentError as error:
        raise UserError(str(error).removeprefix("argument ")) from None
    return own, flags, " ".join([Path(sys.argv[0]).name, *parser.format_usage().split()[2:]])


def command_line(
    doc: str | None, default: str = DEFAULT, **options: Any
) -> tuple[argparse.Namespace, list[str], Config]:
    """A benchmark's own flags (`own_flags`), those of train.py, and the configuration that these give; `default` is the
    preset where none is given, if there is one. Raises `UserError`."""
    own, flags, usage = own_flags(**options)
    if default and (not flags or flags[0].startswith("--")):
        flags = [default, *flags]
    return own, flags, parse(flags, str(doc).partition("\n")[0], usage)


def this_run() -> dict[str, str]:
    """The command, the day and the machine."""
    script = Path(sys.argv[0]).resolve().relative_to(BENCHMARKS.parent)
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    command = " ".join(["python", str(script), *sys.argv[1:]])
    return {"command": command, "date": datetime.date.today().isoformat(), "machine": machine}


def free_address() -> str:
    """HOST:PORT for processes on this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def in_turn(sides: Sequence[Side], rounds: int, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of a step (median of `steps`) of every side in every round, [side][round], the sides in turn; and CPU
    seconds (mean of `steps`), user's and system's of all threads."""
    seconds: list[list[float]] = [[] for _ in sides]
    cpu_seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, wall, cpu in zip(sides, seconds, cpu_seconds, strict=True):
            before = side.cpu_seconds()
            wall.append(statistics.median(side.ask(f"steps {steps}")["seconds"]))
            cpu.append((side.cpu_seconds() - before) / steps)
    return seconds, cpu_seconds


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round, `times` by `others`."""
    return [time / other for time, other in zip(times, others, strict=True)]


def random_arrays(config: Config, step: int) -> dict[str, np.ndarray]:
    """Arrays of a global batch, int32, the same for every side and process: text with its next tokens, or pairs of
    segments of seven eighths of the sequence and more, with a seventh of the tokens masked."""
    rng = np.random.default_rng((config.seed, step))
    rows, length, vocabulary = config.train.global_batch, config.model.sequence_length, config.model.vocab_size
    if FAMILIES[config.model.family].samples == "text":
        tokens = rng.integers(0, vocabulary, (rows, length + 1), np.int32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    length_B1 = rng.integers(length * 7 // 8, length + 1, (rows, 1), np.int32)
    ids, place_T = rng.integers(0, vocabulary, (rows, length), np.int32), np.arange(length)
    arrays = pairs_form().padding(rows, tokens=length) | {
        "tokens": np.where(place_T < length_B1, ids, 0),
        "token_types": (place_T < length_B1) & (place_T >= length // 2),
        "length": length_B1[:, 0],
        "order": rng.integers(0, 2, rows),
    }
    for row, count in enumerate(length_B1[:, 0] // 7):
        places = np.sort(rng.choice(int(length_B1[row, 0]), count, replace=False))
        arrays["places"][row, :count], arrays["targets"][row, :count] = places, ids[row, places]
        arrays["tokens"][row, places] = 4
    return {name: array.astype(np.int32) for name, array in arrays.items()}
