"""Which of several forms of a computation a device takes: the fastest of those that are right there.

Every form is held against the reference in fp32, results and gradients; those that are right are timed in turn. A form
that is wrong or fails, as a kernel may that does not compile for this GPU, is left out in one line and never an error.
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from megajax.backend import Backend
from megajax.host.transcript import printable

LIMIT = 0.02  # how far a row may be from the reference's, as a share of that and of what rows are on average
_OWN_ROUNDING = 3  # or so many times as far as the reference itself is in the precision of the run
_ROUNDS, _LEAST = 5, 0.005  # measurements of a form; seconds of one
_LONGEST_REASON = 160  # characters

Compute = Callable[..., Sequence[Array]]


@dataclass(frozen=True)
class Question:
    """Something that several forms compute."""

    name: str
    what: str  # is computed, with its sizes
    outputs: Sequence[str]  # names of what is computed
    forms: Mapping[str, Backend]
    reference: Backend  # of the form that is known to be right
    function: Callable[[Backend], Compute]  # of the inputs
    inputs: Callable[[], Sequence[Array]]  # made when they are needed


@dataclass
class Answer:
    """What was found."""

    taken: str = ""  # a form; empty: none was right
    milliseconds: dict[str, float] = field(default_factory=dict)  # of every form that is right
    left_out: dict[str, str] = field(default_factory=dict)  # every other form, and why

    def lines(self, question: Question) -> list[str]:
        """All of it, for the log: what was compared and taken, and a line for each form that was left out."""
        times = ", ".join(f"{name} {time_:.3f} ms" for name, time_ in self.milliseconds.items())
        taken = f"{self.taken} is taken" if self.taken else "the default is taken"
        compared = f"{question.name}: {taken}; compared, {question.what}: {times or 'nothing'}"
        return [compared, *(f"{question.name}: {name} is left out: {why}" for name, why in self.left_out.items())]


def answer(question: Question, seconds: float) -> Answer:
    """Compare the forms, which compile side by side; one that has not compiled after so many seconds is left out."""
    found, end = Answer(), time.monotonic() + seconds
    try:
        inputs = question.inputs()
        compiling = {name: _compiling(question.function(each), inputs) for name, each in question.forms.items()}
        right, allowed = _right(question, inputs)
    except Exception as error:  # whatever a compiler or a device raises
        found.left_out = dict.fromkeys(question.forms, f"the reference fails: {_reason(error)}")
        return found
    computes: dict[str, Compute] = {}
    for name, future in compiling.items():
        if not wait([future], max(0.0, end - time.monotonic())).done:
            found.left_out[name] = f"not compiled after {seconds:.3g} s"
            continue
        try:
            compute = future.result()
            if wrong := _too_far(question.outputs, _distances(compute(*inputs), right), allowed):
                found.left_out[name] = wrong
            else:
                computes[name] = compute
        except Exception as error:
            found.left_out[name] = _reason(error)
    del right
    try:
        found.milliseconds = milliseconds(computes, inputs)
    except Exception as error:
        found.left_out |= dict.fromkeys(computes, _reason(error))
    if found.milliseconds:
        found.taken = min(found.milliseconds, key=found.milliseconds.__getitem__)
    return found


def _compiling(function: Compute, inputs: Sequence[Array]) -> "Future[Compute]":
    """A function that is compiled in a thread, for which the end of the process does not wait, should a compiler hang.
    It is traced here."""
    future: Future[Compute] = Future()
    try:
        lowered = jax.jit(function).lower(*inputs)
    except Exception as error:
        future.set_exception(error)
        return future

    def work() -> None:
        try:
            future.set_result(lowered.compile())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _right(question: Question, inputs: Sequence[Array]) -> tuple[Sequence[Array], list[float]]:
    """What the reference computes in fp32; and how far from that every output may be."""
    compute = question.function(question.reference)
    wide = [_wide(x) for x in inputs]
    with jax.default_matmul_precision("float32"):
        right = jax.jit(compute)(*wide)
    if all(one is other for one, other in zip(wide, inputs, strict=True)):
        return right, [LIMIT] * len(question.outputs)
    return right, [max(LIMIT, _OWN_ROUNDING * each) for each in _distances(jax.jit(compute)(*inputs), right)]


def _wide(x: Array) -> Array:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def _distances(found: Sequence[Array], right: Sequence[Array]) -> list[float]:
    return [float(_distance(one, other)) for one, other in zip(found, right, strict=True)]


@jax.jit
def _distance(found: Array, right: Array) -> Array:
    """The largest distance of a row, the last dim, as a share of that row and of the rows' root mean square together:
    rows of zeros have one, too."""
    right = right.reshape(-1, right.shape[-1])
    off_N = jnp.linalg.norm(found.reshape(right.shape).astype(right.dtype) - right, axis=1)
    size_N = jnp.linalg.norm(right, axis=1)
    return jnp.max(off_N / (size_N + jnp.sqrt(jnp.mean(size_N**2)) + jnp.finfo(right.dtype).tiny))


def _too_far(outputs: Sequence[str], distances: Sequence[float], allowed: Sequence[float]) -> str:
    """Which output is further off than it may be; empty if none is."""
    for name, distance, limit in zip(outputs, distances, allowed, strict=True):
        if not distance <= limit:  # nor is NaN
            return f"wrong here: a row of {name} is {distance:.2%} off, more than {limit:.2%}"
    return ""


def _reason(error: Exception) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return printable(f"{type(error).__name__}: {first}")[:_LONGEST_REASON]


def milliseconds(computes: Mapping[str, Compute], inputs: Sequence[Any]) -> dict[str, float]:
    """The median time of every form, measured in turn."""
    calls = {name: max(1, min(100, int(_LEAST / _seconds(compute, inputs, 1)))) for name, compute in computes.items()}
    times: dict[str, list[float]] = {name: [] for name in computes}
    for _ in range(_ROUNDS):
        for name, compute in computes.items():
            times[name].append(_seconds(compute, inputs, calls[name]))
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def _seconds(compute: Compute, inputs: Sequence[Any], calls: int) -> float:
    """Of one of so many calls in a row."""
    began = time.perf_counter()
    for _ in range(calls):
        outputs = compute(*inputs)
    jax.block_until_ready(outputs)
    return (time.perf_counter() - began) / calls
