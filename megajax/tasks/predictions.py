"""Files of predictions for the official scorers: SQuAD's JSON, GLUE's TSV, and a similar TSV for RACE."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax.data.files import write_atomically
from megajax.errors import UserError
from megajax.host.paths import check_place
from megajax.tasks.records import Record
from megajax.tasks.registry import TASKS

_HEADERS = {"classes": "index\tprediction", "choice": "id\tanswer"}


def check_predictions(path: str, records: Sequence[Record]) -> None:
    """Check that predictions for records can be written."""
    check_place(path, "--predictions")
    if os.path.lexists(path):
        raise UserError(f"--predictions {path} is there already; valid: a name that nothing has")
    names = set()
    for record in records:
        if record.name in names:
            valid = "records with names of their own, such as those of one file"
            raise UserError(f"--predictions: two records have the name {record.name[:60]}; valid: {valid}")
        names.add(record.name)


def write_predictions(path: str, task_name: str, records: Sequence[Record], found: Sequence[Any]) -> None:
    """Write the number of every record's class or option, or the text of its answer, to a new file."""
    assert len(found) == len(records), (len(found), len(records))
    check_predictions(path, records)
    task = TASKS[task_name]
    names = [record.name for record in records]
    if task.head == "span":
        text = json.dumps(dict(zip(names, found, strict=True)), indent=4) + "\n"
    else:
        rows = [f"{name}\t{task.labels[int(label)]}" for name, label in zip(names, found, strict=True)]
        text = "\n".join([_HEADERS[task.head], *rows]) + "\n"
    write_atomically(Path(path), text)
