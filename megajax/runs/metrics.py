"""Read the metrics of a run: `metrics.jsonl` in its directory."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megajax.core.errors import Damaged
from megajax.core.models.router import LOAD
from megajax.host import reading
from megajax.host.files import file_atomically

_LINE_BYTES = 1 << 22  # the usual line has a few hundred, the loads of many experts in many layers a megabyte
_BROKEN = 1000  # lines that crashes may leave


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records in a run's metrics.jsonl; empty if there is none. Lines that are no records are skipped."""
    return [record for _, record in _lines(run_dir / "metrics.jsonl") if record is not None]


def cut_metrics(run_dir: Path, last: int) -> Iterator[dict[str, Any]]:
    """Remove the records of steps after `last` from a run's metrics.jsonl, and a record at its end that was only half
    written; everything else stays as it is. Yields the records that stay; the file is replaced after the last one."""
    file = run_dir / "metrics.jsonl"
    run_dir.mkdir(parents=True, exist_ok=True)
    with file_atomically(file) as new, new.open("wb") as kept:
        for line, record in _lines(file):
            if record is not None and record["step"] <= last:
                yield record
            elif record is not None or _is_torn(line):
                continue
            kept.write(line if line.endswith(b"\n") else line + b"\n")
        kept.flush()
        os.fsync(kept.fileno())


def _is_torn(line: bytes) -> bool:
    """Whether it is the beginning of a record that a crash left."""
    begins = b'{"step": '
    return not line.endswith(b"\n") and (line.startswith(begins) or begins.startswith(line))


def _lines(file: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a metrics.jsonl, with their records; None for a line that is none."""
    if not reading.kind(file):
        return
    records = broken = 0
    try:
        with reading.open_file(file) as content:
            for line in reading.lines(content, _LINE_BYTES):
                value = _parsed(line)
                is_record = _is_record(value)
                yield line, value if is_record else None
                records += is_record
                broken += line.endswith(b"\n") and not isinstance(value, dict)
                if broken > _BROKEN:
                    break
    except (reading.TooLong, OSError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise Damaged(file, reason, _ADVICE) from None
    if broken > _BROKEN or (broken and not records):
        raise Damaged(file, "its lines are not metrics of a run", _ADVICE)


def validation_losses(run_dir: Path) -> dict[int, float]:
    """The finite validation losses of a run, by step."""
    return {
        record["step"]: record["validation_loss"]
        for record in read_metrics(run_dir)
        if record.get("validation_loss") is not None  # null: it was not finite
    }


DEV = "dev/"  # prefix of a task's figures on its dev records


def is_of_dev(record: dict[str, Any]) -> bool:
    """Whether a record has a task's figures on its dev records."""
    return any(name.startswith(DEV) for name in record)


_ADVICE = "the metrics.jsonl of a run, or no file"


def _parsed(line: bytes) -> Any:
    """The value of a complete line of JSON; None if it is not one."""
    try:
        return reading.parse_json(line.decode()) if line.endswith(b"\n") else None
    except ValueError:
        return None


def _is_record(value: Any) -> bool:
    """Whether it is a step with figures: numbers, null where they were not finite, and the loads of experts."""
    if not isinstance(value, dict) or len(value) < 2:
        return False
    step = value.get("step")
    if type(step) is not int or not 0 <= step < 1 << 63:
        return False
    return all((_is_load if name == LOAD else _is_figure)(each) for name, each in value.items())


def _is_figure(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))


def _is_load(value: Any) -> bool:
    """Whether it is a matrix of counts, [L, E]."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return False
    counts = [count for row in value for count in row]
    whole = all(type(count) is int and 0 <= count < 1 << 31 for count in counts)
    return whole and len(counts) > 0 and len({len(row) for row in value}) == 1
