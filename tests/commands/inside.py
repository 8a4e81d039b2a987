"""A command in the tests' own process, as if it were one of its own.

A process takes seconds to start and compiles what the one before it compiled. Here are neither; what cannot be seen
here (signals, several processes, what C++ prints, the end of the process itself) is tested by real processes.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import jax

from megajax import ending, launch

ROOT = Path(__file__).parents[2]


class _Ended(BaseException):
    """In place of the process's end."""


def call(script: str, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `python SCRIPT ARGUMENTS...` in the repository's root."""
    main = _main(script, [str(argument) for argument in arguments])
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
        mock.patch.object(ending, "last_words", lambda text: print(text, file=err)),
        contextlib.suppress(_Ended, SystemExit),
    ):
        ending.run(main)
    return code, out.getvalue(), err.getvalue()


def _main(script: str, arguments: Sequence[str]) -> Callable[[], None]:
    if script == "-m":
        from megajax import cli

        assert arguments[0] == "megajax"
        return lambda: cli.main(arguments[1:])
    if script == "eval.py":
        from megajax.commands import evaluate

        return lambda: evaluate.main(arguments)
    from megajax.commands import train

    assert script == "train.py"
    return lambda: train.main(arguments)


@contextlib.contextmanager
def process_of_its_own() -> Iterator[None]:
    """What `launch.start` sets lasts only as long as this, and there are as many devices as it asks for, else one."""
    devices, number, before = jax.devices(), 1, {}
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
