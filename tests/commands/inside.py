"""A command in the tests' own process, as if it were one of its own.

A process takes seconds to start and compiles what the one before it compiled. Here are neither: commands of one
configuration share what is compiled. What cannot be seen here (several processes, what C++ prints, the end of the
process itself) is tested by real processes.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import jax
from jax.sharding import Mesh

from megajax.core.backend import Backend
from megajax.core.program.program import Program
from megajax.core.program.state import StateLayout, TrainState
from megajax.core.program.transfer import Transfer
from megajax.host import ending
from megajax.host.files import file_atomically
from megajax.host.transcript import transcript
from megajax.plan.costs import StepCost
from megajax.plan.memory import Memory, memory
from megajax.plan.traced import step_cost
from megajax.runs import checkpoint
from megajax.runs import init as runs_init
from megajax.settings.config import Config
from megajax.start import launch
from megajax.training import begin, describe, plot

ROOT = Path(__file__).parents[2]


class _Ended(BaseException):
    """In place of the process's end."""


def call(script: str, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `python SCRIPT ARGUMENTS...` in the repository's root."""
    words = [str(argument) for argument in arguments]
    main = _main(script, words)
    out, err = io.StringIO(), io.StringIO()
    code = 0

    def leave(number: int) -> NoReturn:
        nonlocal code
        code = number
        raise _Ended

    with (
        process_of_its_own(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(os, "_exit", leave),
        mock.patch.object(sys, "argv", [script, *words]),
        mock.patch.object(ending, "print_final_error", lambda text: print(text, file=err)),
        mock.patch.object(Program, "on", _program_on),
        mock.patch.object(Program, "with_batch", _with_batch),
        mock.patch.object(begin, "Program", _Programs()),
        mock.patch.object(checkpoint, "Transfer", _transfer),
        mock.patch.object(runs_init, "Transfer", _transfer),
        mock.patch.object(StateLayout, "init", _init),
        mock.patch.object(describe, "memory", _memory),
        mock.patch.object(plot, "plot_loss", _plot_loss),
        contextlib.suppress(_Ended, SystemExit),
    ):
        ending.run(main)
    return code, out.getvalue(), err.getvalue()


def _main(script: str, arguments: Sequence[str]) -> Callable[[], None]:
    from megajax import __main__ as cli

    words = {"-m": arguments[1:], "eval.py": ["eval", *arguments], "train.py": ["train", *arguments]}[script]
    return lambda: cli.main(words)


def _plot_loss(path: Path, *_: object) -> None:
    """In place of drawing, which takes half a second and has tests of its own (tests/training)."""
    with file_atomically(path) as new:
        new.write_bytes(b"\x89PNG\r\n\x1a\n")


_transfer = functools.cache(Transfer)
_make_state = StateLayout.init
_states: dict[Any, TrainState] = {}


def _init(layout: StateLayout, compiler_options: dict[str, Any] | None = None) -> TrainState:
    """`StateLayout.init`, drawn once for each model: no mesh changes it (tests/core/models/test_gpt.py)."""
    config = layout._config
    names = ("seed", "precision", "model", "lora", "loss_scale")
    key = *(getattr(config, name) for name in names), config.train.ema, config.optimizer.name
    if key not in _states:
        state = _make_state(layout)
        _states[key] = jax.device_get(layout.to_canonical(state))
        return state
    return layout.from_canonical(_states[key])


_costs: dict[Any, StepCost] = {}


def _memory(config: Config, backend: Backend) -> Memory:
    """What a run prints, with the layers of the first model of its kind traced; tests/plan has the exact figures."""
    kind = config.model.num_experts > 0, config.lora.rank > 0
    return memory(config, backend, _costs.get(kind) or _costs.setdefault(kind, step_cost(config, backend)))


_on = Program.on
_programs: dict[Any, Program] = {}


def _program_on(config: Config, devices: list[jax.Device] | None = None) -> Program:
    """`Program.on`, with what a command before has traced and compiled for the same programs."""
    return _shared(config, (config.mesh, *(devices or jax.devices())), lambda: _on(config, devices))


_with_another_batch = Program.with_batch


def _with_batch(program: Program, size: int) -> Program:
    """`Program.with_batch`, likewise."""
    config = dataclasses.replace(program.config, train=dataclasses.replace(program.config.train, global_batch=size))
    return _shared(config, (program.mesh,), lambda: _with_another_batch(program, size))


class _Programs:
    """In place of `Program` where a training makes one."""

    on = staticmethod(_program_on)

    def __call__(self, config: Config, mesh: Mesh) -> Program:
        return _shared(config, (mesh,), lambda: Program(config, mesh))


def _shared(config: Config, place: tuple[Any, ...], make: Callable[[], Program]) -> Program:
    names = ("seed", "precision", "sequence_parallel", "model", "lora", "mesh", "pipeline", "loss_scale")
    train = config.train
    batches = train.global_batch, train.microbatch, train.remat, train.ema, train.freeze, config.data.reset_attention
    key = *(getattr(config, name) for name in names), config.optimizer, *batches, *place
    if key not in _programs:
        _programs[key] = make()
    program = copy.copy(_programs[key])
    program.config = config
    return program


@contextlib.contextmanager
def process_of_its_own() -> Iterator[None]:
    """What `launch.start` sets lasts only as long as this, and there are as many devices as it asks for, else one."""
    devices, number, before = jax.devices(), 1, {}
    transcript.end()  # what tests before said
    set_value = jax.config.update

    def update(name: str, value: Any) -> None:
        nonlocal number
        assert name != "jax_cpu_collectives_implementation", "several processes cannot be one"
        if name == "jax_num_cpu_devices":
            assert value <= len(devices)
            number = value
        elif name != "jax_platforms":
            before.setdefault(name, jax.config.values[name])
            set_value(name, value)

    with (
        contextlib.chdir(ROOT),
        mock.patch.dict(os.environ),
        mock.patch.object(launch, "backends_are_initialized", lambda: False),  # of tests before
        mock.patch.object(launch, "_keep_freed_memory"),  # for good, and of all tests of this process
        mock.patch.object(jax, "devices", lambda: devices[:number]),
        mock.patch.object(jax, "device_count", lambda: number),
        mock.patch.object(jax.config, "update", update),
    ):
        try:
            yield
        finally:
            for name, value in before.items():
                set_value(name, value)
