"""Every task's records from its files."""

from collections.abc import Callable, Sequence

from megajax.errors import UserError
from megajax.tasks.glue import read_glue
from megajax.tasks.instructions import read_instructions
from megajax.tasks.race import read_race
from megajax.tasks.records import Records
from megajax.tasks.registry import TASKS, TaskConfig
from megajax.tasks.sources import TaskFile, check_beginning, task_files
from megajax.tasks.squad import read_squad

_READERS: dict[str, Callable[[TaskFile], None]] = {
    "mnli": read_glue,
    "qqp": read_glue,
    "squad1": read_squad,
    "squad2": read_squad,
    "race": read_race,
    "instructions": read_instructions,
}


def read_records(task_name: str, paths: Sequence[str], config: TaskConfig, flag: str, labelled: bool = True) -> Records:
    """The records of a task's files, in their order.

    `paths` are files, and folders where the task has `suffixes`. Unless `labelled`, the right answers may be missing,
    as in test sets.
    """
    records: Records = Records(strict=config.strict)
    valid = TASKS[task_name].files
    for path in task_files(paths, task_name, flag):
        before = len(records.entries)
        file = TaskFile(path, flag, task_name, labelled, records)
        check_beginning(file)
        _READERS[task_name](file)
        if len(records.entries) == before and not TASKS[task_name].suffixes:
            raise UserError(f"{file.place} has no records; valid: {valid}")
    if not records.entries:
        raise UserError(f"{flag}: {paths[0]} has no records; valid: {valid}")
    return records
