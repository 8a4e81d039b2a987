"""Folders that somebody else uses, forbids or removes: what each command says, and that nothing is lost or touched."""

import ctypes
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disturbed import Disturbed, check_run, losses, remove, told
from processes import finish

from megajax.runs.lock import ABANDONED_AFTER, NAME, TOUCHED_EVERY

pytestmark = pytest.mark.full

IN_USE = re.compile(r"error: --run-dir \S+ is in use by process (\d+) on (\S+), since \d{4}-\d\d-\d\dT\S+; valid: .*")
NOBODY = 65534
FOLDER = "somebody else's"  # where the run directory was


@pytest.mark.parametrize("part", [".", FOLDER, "checkpoints", "metrics.jsonl", "data", "run.json", NAME])
def test_a_part_that_is_removed_while_it_trains(here: Disturbed, rng: random.Random, rounds: int, part: str) -> None:
    """The run goes on or ends with one line, and nothing is made where the run directory was."""
    whole = part in (".", FOLDER)
    for _ in range(rounds):
        process = here.start()
        here.reach(process, rng.randint(1, 80))
        gone = here.folder / "gone"  # in one instant, also where files are written in it
        (here.run if whole else here.run / part).rename(gone)
        if part == FOLDER:
            here.run.mkdir()
            (here.run / "mine.txt").write_text("mine")
        remove(gone)
        assert bool(told(finish(process))) == (whole or part == NAME)
        if whole:
            found = [path.name for path in here.run.rglob("*")] if here.run.exists() else None
            assert found == (["mine.txt"] if part == FOLDER else None)
        elif part == "metrics.jsonl":  # the figures of what was trained are lost with it
            here.again()
        elif part == "run.json":  # a folder without it may be somebody else's
            refused = finish(here.start())
            assert refused.code == 2 and "instead of a run" in told(refused)
        else:
            here.finishes()
        shutil.rmtree(here.run, ignore_errors=True)


def test_two_starters(here: Disturbed, rng: random.Random, rounds: int) -> None:
    """One trains, the other is refused and told which."""
    for _ in range(3 * rounds):
        first = here.start()
        time.sleep(rng.uniform(0, 2))
        both = [first, here.start()]
        done = [finish(process) for process in both]
        assert sorted(each.code for each in done) == [0, 2], done
        refused = 0 if done[0].code else 1
        found = IN_USE.fullmatch(told(done[refused]))
        assert found and int(found[1]) == both[1 - refused].pid, done
        assert losses(here.run) == losses(here.whole / "run")
        check_run(here.run)
        remove(here.run)


def test_the_lock_of_a_killed_run(here: Disturbed, rng: random.Random) -> None:
    """It is taken over at once; that of another machine after a minute, unless it is touched."""
    process = here.start()
    here.reach(process, rng.randint(1, 50))
    process.kill()
    process.communicate()
    lock = here.run / NAME
    shutil.copytree(here.run, here.folder / "copy")
    here.finishes()
    remove(here.run)
    (here.folder / "copy").rename(here.run)
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"host": "far", "machine": "another"}))
    process = here.start()
    while process.poll() is None:
        os.utime(lock)
        time.sleep(TOUCHED_EVERY)
    found = IN_USE.fullmatch(told(finish(process)))
    assert found and found[2] == "far"
    began = time.monotonic()
    here.finishes()
    assert time.monotonic() - began > ABANDONED_AFTER


def as_anybody() -> None:
    """Give up root's rights over the files of others; what is started has none."""
    for capability in 1, 2, 3:  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def below(folder: Path) -> dict[Path, tuple[int, int, str]]:
    """Kind and rights, owner and content of everything below a folder, of a file also when it was changed."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        look, content = path.lstat(), ""
        if path.is_file():
            content = f"{look.st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        found[path] = look.st_mode, look.st_uid, content
    return found


def forbidden(path: Path, mode: int = 0o755, inside: str = "", of: Path | None = None) -> Path:
    """A folder or a copy, which or a part of which is somebody else's, with these rights of others."""
    if of is None:
        path.mkdir()
    else:
        (shutil.copytree if of.is_dir() else shutil.copy)(of, path)
    if os.geteuid() == 0:
        os.chown(path / inside, NOBODY, NOBODY)
    (path / inside).chmod(mode)
    return path


def _started(here: Disturbed, path: Path) -> Path:
    """A run that has just begun, whose data may not be written."""
    path.mkdir()
    shutil.copy(here.whole / "run" / "run.json", path)
    return forbidden(path / "data").parent


def _train(here: Disturbed, *more: object) -> tuple[object, ...]:
    return (*here.lines["train"], *more)


def _prepare(here: Disturbed, text: Path) -> tuple[object, ...]:
    return (*here.lines["prepare"][:3], text, *here.lines["prepare"][4:])


def _export(here: Disturbed, run: Path, target: Path) -> tuple[object, ...]:
    return (*here.lines["export-hf"][:4], run, target)


def _import(here: Disturbed, target: Path) -> tuple[object, ...]:
    return (*here.lines["import-hf"][:5], target)


# A command, given the commands and where something forbidden may be made.
FORBIDDEN: dict[str, Callable[[Disturbed, Path], tuple[object, ...]]] = {
    "run directory, empty": lambda here, path: _train(here, "--run-dir", forbidden(path)),
    "run directory with a run": lambda here, path: _train(
        here, "--run-dir", forbidden(path, of=here.whole / "run"), "--train.steps", 110
    ),
    "parent of the run directory": lambda here, path: _train(here, "--run-dir", forbidden(path) / "run"),
    "grandparent": lambda here, path: _train(here, "--run-dir", forbidden(path) / "a" / "run"),
    "data of a run that has just begun": lambda here, path: _train(here, "--run-dir", _started(here, path)),
    "text, not readable": lambda here, path: _train(here, "--data.path", forbidden(path, 0o600, of=here.text)),
    "folder of texts, not readable": lambda here, path: _train(here, "--data.path", forbidden(path, 0o700)),
    "output's folder": lambda here, path: (*here.lines["prepare"], "--output", forbidden(path) / "set"),
    "text to prepare, not readable": lambda here, path: _prepare(here, forbidden(path, 0o600, of=here.text)),
    "target of an export, empty": lambda here, path: _export(here, here.whole / "run", forbidden(path)),
    "folder of an export": lambda here, path: _export(here, here.whole / "run", forbidden(path) / "new"),
    "target of an import, empty": lambda here, path: _import(here, forbidden(path)),
    "folder of an import": lambda here, path: _import(here, forbidden(path) / "new"),
    "checkpoints, not readable": lambda here, path: _export(
        here, forbidden(path, 0o700, "checkpoints", here.whole / "run"), here.folder / "made" / "hf"
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_may_not_be_written_or_read(here: Disturbed, name: str) -> None:
    """As root the commands run without root's rights over the files of others. One line names it, and nothing has
    changed."""
    probe = forbidden(here.folder / "probe", 0o555)
    code = f"import os; exit(os.access({str(probe)!r}, os.W_OK))"
    if subprocess.run([sys.executable, "-c", code], preexec_fn=as_anybody).returncode:
        pytest.skip("root's rights cannot be given up, or this user may write everywhere")
    (here.folder / "made").mkdir()
    line = FORBIDDEN[name](here, here.folder / "forbidden")
    before = below(here.folder)
    done = finish(here.commands.start(*line, preexec_fn=as_anybody))
    assert str(here.folder / "forbidden") in told(done) and below(here.folder) == before, done
