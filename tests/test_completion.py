"""Completion of `megajax` in a shell."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megajax.cli import COMMANDS, main
from megajax.evaluation.options import PRETRAINED
from megajax.pipeline.schedule import SCHEDULES
from megajax.plan.machines import MACHINES
from megajax.presets import names_in_folders, preset_names


@pytest.fixture
def completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What completes a line, as argcomplete's shell function asks for it."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.toml", "text.txt"):
        (tmp_path / name).touch()

    def complete(line: str) -> set[str]:
        found = tmp_path / ".found"
        asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
        for name, value in {**asked, "COMP_TYPE": "9", "_ARGCOMPLETE_STDOUT_FILENAME": str(found)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            main([])
        assert end.value.code == 0
        return {word.strip() for word in found.read_text().split("\n")} - {""}

    return complete


def test_commands_and_actions(completed) -> None:
    assert completed("megajax ") == set(COMMANDS)
    assert completed("megajax p") == {"plan", "prepare"}
    assert completed("megajax --v") == {"--version"}
    assert completed("megajax convert ") == {"import-hf", "export-hf"}
    assert completed("megajax convert export-hf --dt") == {"--dtype"}
    assert completed("megajax convert export-hf --dtype ") == {"fp32", "bf16", "fp16"}


def test_presets_flags_and_values(completed) -> None:
    assert completed("megajax train ") == {*preset_names(), *names_in_folders(), "mine.toml"}
    assert completed("megajax verify finetune/squad2-3") == {"finetune/squad2-336m", "finetune/squad2-3.9b"}
    assert completed("megajax train demo --train.mic") == {"--train.microbatch"}
    assert {"--sequence-parallel", "--seed", "--seeds"} <= completed("megajax train demo --se")
    assert completed("megajax train demo --pipeline.schedule ") == set(SCHEDULES)
    assert completed("megajax train demo --pipeline.schedule=gp") == {"gpipe"}
    assert completed("megajax train demo --mesh.data ") == set()
    assert completed("megajax train demo --data.path ") == {"mine.toml", "text.txt"}
    assert completed("megajax plan demo --gpu ") == set(MACHINES)
    assert set(PRETRAINED) < completed("megajax eval ") and completed("megajax eval squ") == {"squad1", "squad2"}


@pytest.mark.full
def test_in_bash(tmp_path: Path) -> None:
    """The function that the line in the start-up file defines, called as bash does it."""
    folder = Path(sys.executable).parent
    script = (
        f"PATH={shlex.quote(str(folder))}:$PATH\n"
        'eval "$(register-python-argcomplete megajax)"\n'
        'COMP_LINE="megajax gen" COMP_POINT=11 COMP_TYPE=9 COMP_WORDS=(megajax gen) COMP_CWORD=1\n'
        '"$(complete -p megajax | sed "s/.*-F \\([^ ]*\\).*/\\1/")" megajax gen megajax\n'
        'echo "${COMPREPLY[@]}"\n'
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    found = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == "generate", (found.stdout, found.stderr)
