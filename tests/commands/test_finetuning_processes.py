"""Fine-tuning by several processes, which is that of one."""

from pathlib import Path

import pytest
from finetuning import PRESET, SIZE, Finetuning, dev_of
from processes import assert_close_losses, curve
from test_distributed import assert_silent, two_processes
from test_seeds import report

pytestmark = pytest.mark.full


def test_two_processes_with_two_seeds(tuning: Finetuning, tmp_path: Path) -> None:
    """The losses of one process; the second one says nothing."""
    line = ("train.py", PRESET, "--run-dir", tmp_path / "seeds", *SIZE, *tuning.data("mnli"), "--seeds", 2)
    first, second = two_processes(tuning.commands, *line, "--mesh.data", 2, "--simulate-devices", 1)
    assert first.code == second.code == 0, (first, second)
    assert_silent(second)
    assert_close_losses(curve(tmp_path / "seeds" / "seed-0"), curve(tuning.run("mnli")))
    found = report(tmp_path / "seeds")["seeds"]
    assert [entry["accuracy"] for entry in found] == [dev_of(Path(entry["run"]))["accuracy"] for entry in found]
