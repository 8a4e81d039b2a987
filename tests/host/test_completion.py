"""Completion of `megajax` in a shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megajax.__main__ import COMMANDS
from megajax.commands.evaluate import NAMES
from megajax.core.pipeline.schedule import SCHEDULES
from megajax.plan.machines import MACHINES
from megajax.settings.preset_files import names_in_folders, preset_names

ROOT = Path(__file__).parents[2]
ASK = """\
import argcomplete, json, os, sys
from megajax.__main__ import main
from megajax.commands import train
found = {}
for line in sys.argv[1:]:
    if not (child := os.fork()):  # which ends when it has answered
        asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        asked["_ARGCOMPLETE_COMP_WORDBREAKS"] = " ="
        os.environ |= asked | {"_ARGCOMPLETE_IFS": "\\n", "_ARGCOMPLETE_STDOUT_FILENAME": "../found"}
        main([])
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 0, line
    with open("../found") as answer:
        found[line] = answer.read().split("\\n")
    os.remove("../found")
print(json.dumps(found))
"""


def printed(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(folder: Path, *lines: str) -> dict[str, set[str]]:
    """What completes each line in a working directory, as argcomplete's shell function asks for it."""
    for name in ("mine.toml", "text.txt"):
        (folder / name).touch()
    found = json.loads(printed(folder, sys.executable, "-c", ASK, *lines))
    return {line: {word.strip() for word in words} - {""} for line, words in found.items()}


def test_what_completes_a_line(tmp_path: Path) -> None:
    """Commands, actions, presets, flags, values, files."""
    expected = {
        "megajax ": set(COMMANDS),
        "megajax p": {"plan", "prepare"},
        "megajax --v": {"--version"},
        "megajax convert ": {"import-hf", "export-hf"},
        "megajax convert export-hf --dtype ": {"fp32", "bf16", "fp16"},
        "megajax train ": {*preset_names(), *names_in_folders(), "mine.toml"},
        "megajax verify finetune/squad2-3": {"finetune/squad2-336m", "finetune/squad2-3.9b"},
        "megajax train demo --train.mic": {"--train.microbatch"},
        "megajax train demo --pipeline.schedule ": set(SCHEDULES),
        "megajax train demo --pipeline.schedule=gp": {"gpipe"},
        "megajax train demo --mesh.data ": set(),
        "megajax train demo --data.path ": {"mine.toml", "text.txt"},
        "megajax plan demo --gpu ": set(MACHINES),
        "megajax eval ": {*NAMES, "harness"},
    }
    assert completed(tmp_path, *expected) == expected
