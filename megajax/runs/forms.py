"""Forms of attention and products for a run's devices: measured at the first start, kept in the run directory."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.core.backend import Backend
from megajax.core.program.measured import FormQuestion, answer
from megajax.core.program.one_layer import Forms, OneLayer
from megajax.core.program.program import Program
from megajax.data.samples.base import EndlessSamples
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.host.processes import on_first_process, say
from megajax.host.transcript import tell
from megajax.runs.ownership import FORMS

SECONDS = 180.0  # for compiling, all questions together, at a run's first start: one kernel took 56 s of CPU time
_RESERVED = 30.0  # of them for each question still to come


def measured_backend(
    program: Program, samples: EndlessSamples, run_dir: Path, candidates: Mapping[str, Forms]
) -> Backend:
    """The program's backend with the forms that are fastest here. All processes call this; process 0 measures, or reads
    what an earlier start measured. `samples` are the training data."""
    if not candidates:
        return program.backend
    if program.config.deterministic:
        say("forms: not measured, for --deterministic; those of megajax/core/backend.py are taken")
        return program.backend
    layer = OneLayer(program, _rows(samples, program.config.train.microbatch))
    questions = layer.questions(candidates)
    numbers = on_first_process(lambda: [*_numbers(questions, run_dir / FORMS)])
    backend = program.backend
    for question, number in zip(questions, numbers, strict=True):
        if number < len(question.forms):
            backend = dataclasses.replace(backend, **candidates[question.name][list(question.forms)[number]])
        else:  # our kernels may be wrong here, or have ended an earlier start
            backend = backend.without_kernel(question.name, asked=program.config.model.attention == "kernel")
    return backend


def _rows(samples: EndlessSamples, count: int) -> dict[str, np.ndarray]:
    first = [samples[number] for number in range(count)]
    return {name: np.stack([sample[name] for sample in first]) for name in first[0]}


def _numbers(questions: list[FormQuestion], file: Path) -> list[int]:
    """For each question the number of the form that is taken; the number of its forms if none is."""
    kept = kept_forms(file)
    found: dict[str, Any] = {}
    device = {"device": jax.local_devices()[0].device_kind, "jax": jax.__version__}
    numbers, end = [], time.monotonic() + SECONDS
    for count, question in enumerate(questions, 1):
        of = device | {"what": question.what, "forms": [*question.forms]}
        earlier = kept.get(question.name)
        if isinstance(earlier, dict) and earlier.get("of") == of and earlier.get("taken") in ("", *question.forms):
            record = earlier
            ended = "milliseconds" not in record
            why = "because an earlier start died while measuring" if ended else "as measured before"
            tell(f"{question.name}: {record['taken'] or 'the default'} is taken, {why} ({file})")
        else:
            _write(file, kept | found | {question.name: {"of": of, "taken": ""}})  # a kernel may end the process
            result = answer(question, end - time.monotonic() - _RESERVED * (len(questions) - count))
            tell("\n".join(result.lines(question)))
            record = {"of": of} | dataclasses.asdict(result)
        found[question.name] = record
        numbers.append([*question.forms, ""].index(record["taken"]))
    _write(file, kept | found)
    return numbers


def _write(file: Path, found: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(found, indent=1) + "\n")


def kept_forms(file: Path) -> dict[str, Any]:
    """What an earlier start kept; nothing if that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        kept = reading.parse_json(reading.read_bytes(file).decode())
        return kept if isinstance(kept, dict) else {}
    return {}
