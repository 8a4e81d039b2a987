"""Choose among several forms of a computation: the fastest that is correct on this device.

Each form's results and gradients are compared with the reference in fp32, and the correct forms are timed in turn. A
form that is wrong or fails (a kernel may not compile for this GPU) is left out with a log line; it is never an error.
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
from jax import Array, lax
from jax.stages import Wrapped

from megajax.core.backend import Backend

LIMIT = 0.02  # largest distance of a row from the reference, relative to its norm plus the rows' root mean square
_OWN_ROUNDING = 3  # or this many times the distance of the reference itself in the run's precision
_ROUNDS, _LEAST, _MOST = 5, 0.005, 100  # measurements of each form; seconds and calls of one, at least and at most
# The reference is not timed, so its compiler need not try every way to multiply matrices.
_NOT_TUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
_LONGEST_REASON = 160  # characters

Compute = Callable[..., Sequence[Array]]
Repeated = Callable[..., Sequence[Array]]  # (how often, *inputs)


@dataclass(frozen=True)
class FormQuestion:
    """Something that several forms compute."""

    name: str
    what: str  # what is computed, with its sizes
    outputs: Sequence[str]  # names of what is computed
    forms: Mapping[str, Backend]
    reference: Backend  # of the form known to be correct
    function: Callable[[Backend], Compute]  # of the inputs
    inputs: Callable[[], Sequence[Array]]  # makes them


@dataclass
class FormAnswer:
    """The form to take, and why."""

    taken: str = ""  # a form; empty: none is correct
    milliseconds: dict[str, float] = field(default_factory=dict)  # of each correct form
    left_out: dict[str, str] = field(default_factory=dict)  # every other form, with the reason

    def lines(self, question: FormQuestion) -> list[str]:
        """For the log: what was compared and taken, and a line for each form left out."""
        times = ", ".join(f"{name} {time_:.3f} ms" for name, time_ in self.milliseconds.items())
        taken = f"{self.taken} is taken" if self.taken else "the default is taken"
        compared = f"{question.name}: {taken}; compared, {question.what}: {times or 'nothing'}"
        return [compared, *(f"{question.name}: {name} is left out: {why}" for name, why in self.left_out.items())]


def answer(question: FormQuestion, seconds: float) -> FormAnswer:
    """Compare the forms, which compile in parallel; those not compiled after this many seconds are left out."""
    found, end = FormAnswer(), time.monotonic() + seconds
    try:
        inputs = question.inputs()
        compiling = {name: _compiling(question.function(each), inputs) for name, each in question.forms.items()}
        right, allowed = _right(question, inputs)
    except Exception as error:  # whatever a compiler or a device raises
        found.left_out = dict.fromkeys(question.forms, f"the reference fails: {_reason(error)}")
        return found
    computes: dict[str, Repeated] = {}
    for name, future in compiling.items():
        if not wait([future], max(0.0, end - time.monotonic())).done:
            found.left_out[name] = f"not compiled after {seconds:.3g} s"
            continue
        try:
            compute = future.result()
            if wrong := _too_far(question.outputs, _distances(compute(1, *inputs), right), allowed):
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


def repeated(function: Compute) -> Wrapped:
    """The function, called so many times in one program, since a call from Python can take longer than the GPU's work.
    Every call after the first sees first numbers of the last one's results in its inputs: otherwise XLA would compute
    once what does not change."""

    def repeat(times: Array, *inputs: Array) -> Sequence[Array]:
        def call(_: Array, carry: tuple[Sequence[Array], Sequence[Array]]) -> tuple[Sequence[Array], Sequence[Array]]:
            found = tuple(function(*carry[0]))
            firsts = [each[(0,) * each.ndim].astype(found[0].dtype) for each in found]
            number = sum(firsts[1:], start=firsts[0])
            return tuple(_with_first(x, number) for x in carry[0]), found

        nothing = [jnp.zeros(type_.shape, type_.dtype) for type_ in jax.eval_shape(function, *inputs)]
        return lax.fori_loop(0, times, call, (inputs, tuple(nothing)))[1]

    return jax.jit(repeat)


def _with_first(x: Array, number: Array) -> Array:
    """An array with another first number, from -1 to 1; integers may be places, and stay."""
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    return x.at[(0,) * x.ndim].set(jnp.clip(number, -1, 1).astype(x.dtype)) if floats else x


def _compiling(function: Compute, inputs: Sequence[Array]) -> "Future[Repeated]":
    """Trace a function and compile it in a daemon thread: the process can end even if the compiler hangs."""
    future: Future[Repeated] = Future()
    try:
        lowered = repeated(function).lower(1, *inputs)
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


def _right(question: FormQuestion, inputs: Sequence[Array]) -> tuple[Sequence[Array], list[float]]:
    """What the reference computes in fp32, and how far each output may be from that."""
    compute = question.function(question.reference)
    wide = [_wide(x) for x in inputs]
    with jax.default_matmul_precision("float32"):
        right = jax.jit(compute, compiler_options=_NOT_TUNED)(*wide)
    if all(one is other for one, other in zip(wide, inputs, strict=True)):
        return right, [LIMIT] * len(question.outputs)
    return right, [
        max(LIMIT, _OWN_ROUNDING * each)
        for each in _distances(jax.jit(compute, compiler_options=_NOT_TUNED)(*inputs), right)
    ]


def _wide(x: Array) -> Array:
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if narrow else x


def _distances(found: Sequence[Array], right: Sequence[Array]) -> list[float]:
    return [float(_distance(one, other)) for one, other in zip(found, right, strict=True)]


@jax.jit
def _distance(found: Array, right: Array) -> Array:
    """The largest distance of a row (the last dim), relative to its norm plus the rows' root mean square, so that it is
    defined for rows of zeros."""
    right = right.reshape(-1, right.shape[-1])
    off_N = jnp.linalg.norm(found.reshape(right.shape).astype(right.dtype) - right, axis=1)
    size_N = jnp.linalg.norm(right, axis=1)
    return jnp.max(off_N / (size_N + jnp.sqrt(jnp.mean(size_N**2)) + jnp.finfo(right.dtype).tiny))


def _too_far(outputs: Sequence[str], distances: Sequence[float], allowed: Sequence[float]) -> str:
    """The first output that is too far off, in words; empty if none is."""
    for name, distance, limit in zip(outputs, distances, allowed, strict=True):
        if not distance <= limit:  # nor is NaN
            return f"wrong here: a row of {name} is {distance:.2%} off, more than {limit:.2%}"
    return ""


def _reason(error: Exception) -> str:
    """An error in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_REASON]


def milliseconds(computes: Mapping[str, Repeated], inputs: Sequence[Any]) -> dict[str, float]:
    """The median time of each form (see `repeated`); forms are measured in turn."""
    calls = {}
    for name, compute in computes.items():
        _seconds(compute, inputs, 1)
        calls[name] = max(1, min(_MOST, int(_LEAST / _seconds(compute, inputs, 1))))
    times: dict[str, list[float]] = {name: [] for name in computes}
    for _ in range(_ROUNDS):
        for name, compute in computes.items():
            times[name].append(_seconds(compute, inputs, calls[name]))
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def _seconds(compute: Repeated, inputs: Sequence[Any], calls: int) -> float:
    """Seconds per call, of this many calls in one program."""
    began = time.perf_counter()
    jax.block_until_ready(compute(calls, *inputs))
    return (time.perf_counter() - began) / calls
