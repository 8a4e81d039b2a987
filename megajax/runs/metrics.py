"""Read the metrics of a run: `metrics.jsonl` in its directory."""

import math
from pathlib import Path
from typing import Any

from megajax.errors import UserError
from megajax.host import reading

_LINE_BYTES = 1 << 16  # the usual line has a few hundred
_BROKEN = 1000  # lines that crashes may leave


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records in a run's metrics.jsonl; empty if there is none. Incomplete lines are skipped."""
    file = run_dir / "metrics.jsonl"
    if not reading.kind(file):
        return []
    records, broken = [], 0
    try:
        with reading.open_file(file) as content:
            for line in reading.lines(content, _LINE_BYTES):
                if (record := _record(line)) is not None:
                    records.append(record)
                elif line.endswith(b"\n") and (broken := broken + 1) > _BROKEN:
                    raise UserError(f"{file}: more than {_BROKEN} of its lines are not metrics of a run; {_ADVICE}")
    except reading.TooLong as error:
        raise UserError(f"{file}: {error}; {_ADVICE}") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; {_ADVICE}") from None
    if broken and not records:
        raise UserError(f"{file}: contains no metrics of a run; {_ADVICE}")
    return records


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


_ADVICE = "valid: the metrics.jsonl of a run, or no file"


def _record(line: bytes) -> dict[str, Any] | None:
    """The figures in a complete line; None if it has none."""
    try:
        record = reading.parse_json(line.decode()) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict) or not all(map(_is_figure, record.values())):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 1 << 63 and len(record) > 1 else None


def _is_figure(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and math.isfinite(value))
