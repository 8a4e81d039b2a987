"""A disk that is full, really (16 MB in memory): what each command says, and that nothing is lost.

Some kB are left when a command starts, from none to a megabyte; for training it is also filled at random moments. Each
time there is one line or none, and what has a final name is whole; then there is space again, and the same command ends
with the losses, or the files, of one that was not disturbed.
"""

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from disturbed import Disturbed, check_run, remove, told
from processes import finish

pytestmark = pytest.mark.full

SPACE = [4096 * n for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]  # bytes


@pytest.fixture
def disk(whole: Disturbed, tmp_path: Path) -> Iterator[Disturbed]:
    """The commands on a file system of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode == 0:
            (folder / "made").mkdir()
            yield replace(whole, folder=folder)
            subprocess.run(["umount", "-l", folder], check=True)
            return
    pytest.skip("no file system can be mounted: needs root on Linux")


def fill(disk: Path, left: int) -> None:
    """Take all space but `left` bytes."""
    place = os.statvfs(disk)
    size = place.f_bavail * place.f_frsize - left
    if size > 0:
        with (disk / "filler").open("ab") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), file.tell(), size)


def files(made: Path, name: str) -> dict[str, bytes]:
    """What begins with a name, but work folders and reports, which hold times and paths."""
    left_out = ".work", ".partial", "report.json", "config.toml", "run.json", "checkpoints"
    found = {str(file.relative_to(made)): file for file in made.rglob("*") if file.is_file()}
    return {
        path: file.read_bytes()
        for path, file in found.items()
        if path.startswith(name) and not any(word in path for word in left_out)
    }


@pytest.mark.parametrize(("name", "target"), [("prepare", "set"), ("export-hf", "hf"), ("import-hf", "back")])
def test_a_command_that_writes_files(disk: Disturbed, rounds: int, name: str, target: str) -> None:
    """Until there was enough space twice; after a failure nothing has the final name."""
    made, expected, codes = disk.folder / "made", files(disk.whole / "made", target), []
    assert expected
    for left in SPACE[:: 1 if rounds > 1 else 4] * 2:
        fill(disk.folder, left)
        done = finish(disk.start(name))
        codes.append(done.code)
        if told(done):
            assert not files(made, target)
            remove(disk.folder / "filler")
            disk.again(name)
        remove(disk.folder / "filler")
        assert files(made, target) == expected
        for path in made.iterdir():
            remove(path)
        if codes.count(0) == 2:
            break
    assert codes[0] != 0, "it wrote nothing where there was no space"


def test_training_that_starts_with_little_space(disk: Disturbed, rounds: int) -> None:
    for left in SPACE[:: 1 if rounds > 1 else 4]:
        fill(disk.folder, left)
        told(finish(disk.start()))
        check_run(disk.run)
        remove(disk.folder / "filler")
        disk.finishes()
        remove(disk.run)


def test_training_that_loses_its_space(disk: Disturbed, rng: random.Random, rounds: int) -> None:
    for left in rng.choices([0, 8192, 100_000, 2_000_000], k=4 * rounds):
        process = disk.start()
        disk.reach(process, rng.randint(1, 90))
        time.sleep(rng.uniform(0, 0.1))
        fill(disk.folder, left)
        told(finish(process))
        check_run(disk.run)
        remove(disk.folder / "filler")
        disk.finishes()
        remove(disk.run)
