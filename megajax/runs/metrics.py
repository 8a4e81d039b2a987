"""The figures of a run, `metrics.jsonl` in its directory."""

import json
from pathlib import Path
from typing import Any


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; empty if there is none. Lines that are not whole are left out."""
    try:
        lines = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]  # what has no newline was not finished
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
