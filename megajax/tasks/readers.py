"""Every task's records from its files."""

from collections.abc import Sequence
from typing import Any

from megajax.tasks.config import TaskConfig
from megajax.tasks.glue import read_mnli, read_qqp
from megajax.tasks.instructions import read_instructions
from megajax.tasks.race import read_race
from megajax.tasks.records import Records
from megajax.tasks.registry import TASKS
from megajax.tasks.squad import read_squad


def read_records(
    task_name: str, paths: Sequence[str], config: TaskConfig, flag: str, labelled: bool = True
) -> Records[Any]:
    """The records of a task's files, in their order.

    Args:
        task_name: one of `TASKS`.
        paths: its files; of RACE and instructions also folders of them.
        config: whether odd records end the reading.
        flag: that named the paths, for error messages.
        labelled: whether the right answers must be there.

    Raises:
        UserError: a file cannot be used, or a record in it.
    """
    assert task_name in TASKS, task_name
    if TASKS[task_name].head == "span":
        return read_squad(task_name, paths, config, flag, labelled=labelled)
    read: Any = {"mnli": read_mnli, "qqp": read_qqp, "race": read_race, "instructions": read_instructions}[task_name]
    return read(paths, config, flag, labelled=labelled)
