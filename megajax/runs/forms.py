"""Fused forms of attention and experts that are wrong or fail on a run's devices: found by comparing each with plain
code at the first start, and kept in the run directory."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from megajax.core.backend import Backend
from megajax.core.program.program import Program
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.host.processes import on_first_process
from megajax.host.transcript import tell
from megajax.runs.ownership import FORMS
from megajax.start.form_comparison import FormComparison
from megajax.start.fused_forms import comparisons

_RIGHT, _ENDED = "right", "an earlier start ended while it was tried"


def backend_without_wrong_forms(program: Program, run_dir: Path) -> Backend:
    """The program's backend without what is wrong or fails here. All processes call this; process 0 compares what no
    earlier start has compared."""
    compared, backend = comparisons(program), program.backend
    if not compared:
        return backend
    right = iter(on_first_process(lambda: _which_are_right(compared, run_dir / FORMS)))
    for comparison in compared:
        for form in comparison.forms:
            if not next(right):
                experts = comparison.name == "experts"
                backend = replace(backend, expert_kernel=False) if experts else backend.without(form)
    return backend


def _which_are_right(compared: list[FormComparison], file: Path) -> list[int]:
    """1 for every form that is right, 0 for the others, which are named."""
    kept, right = kept_forms(file), []
    device = {"device": jax.local_devices()[0].device_kind, "jax": jax.__version__}
    for comparison in compared:
        of, entry = device | {"what": comparison.what}, kept.get(comparison.name)
        if not (isinstance(entry, dict) and entry.get("of") == of and isinstance(entry.get("forms"), dict)):
            entry = kept[comparison.name] = {"of": of, "forms": {}}
        results = entry["forms"]
        for form in comparison.forms:
            if form not in results:
                results[form] = _ENDED  # unless it does not: a kernel may end the process
                _write(file, kept)
                results[form] = comparison.problem(form) or _RIGHT
                _write(file, kept)
                if results[form] == _RIGHT:
                    tell(f"{comparison.name}: {form} is right, {comparison.what}")
            if results[form] != _RIGHT:
                tell(f"{comparison.name}: {form} is left out: {results[form]} ({file})")
            right.append(int(results[form] == _RIGHT))
    return right


def _write(file: Path, kept: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(kept, indent=1) + "\n")


def kept_forms(file: Path) -> dict[str, Any]:
    """What earlier starts kept; nothing if that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        kept = reading.parse_json(reading.read_bytes(file).decode())
        return kept if isinstance(kept, dict) else {}
    return {}
