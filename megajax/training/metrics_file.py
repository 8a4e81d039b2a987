"""Writing metrics.jsonl, a line at a time."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megajax.data.files import write_atomically
from megajax.errors import RunError
from megajax.training.tracker import Tracker


class MetricsFile(Tracker):
    """The figures of a run, a JSON line for each record. If it cannot be written the run ends, because a resumed run
    reads it. `records` are those of earlier starts.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, run_dir: Path, records: Iterable[Mapping[str, Any]]):
        self._path = run_dir / "metrics.jsonl"
        self.name = str(self._path)
        write_atomically(self._path, "".join(map(_line, records)))
        self._file = self._path.open("ab", buffering=0)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a line.

        Raises:
            RunError: it cannot be written.
        """
        line = _line({"step": step, **figures}).encode()
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise RunError(f"{self._path} cannot be written: {problem}; the same command goes on") from None

    def close(self, *, finished: bool) -> None:
        self._file.close()


def _line(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, floats in full; infinite numbers and NaN become null, since JSON has none."""
    plain = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
