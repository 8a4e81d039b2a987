"""Paths that a command line names: what cannot be is said in one line that names the flag."""

import os
from pathlib import Path

import pytest

from megajax.errors import UserError
from megajax.host.paths import check_path, check_place


def problem(check, path: object) -> str:
    with pytest.raises(UserError) as caught:
        check(path, "--flag")
    said = str(caught.value)
    assert "\n" not in said and said.startswith("--flag ") and "; valid: " in said
    return said


@pytest.mark.parametrize("check", [check_path, check_place])
def test_paths_that_cannot_be_looked_at(check, tmp_path: Path) -> None:
    """A long one is not repeated in full."""
    (tmp_path / "circle").symlink_to("circle")
    assert "is empty" in problem(check, "")
    assert "null" in problem(check, "a\0b")
    assert "symbolic links" in problem(check, tmp_path / "circle" / "a")
    for path in ("a" * 256, "new/" + "a" * 256 + "/b", "é" * 130, "a/" * 3000):
        assert "too long" in problem(check, str(tmp_path / path)) and len(problem(check, str(tmp_path / path))) < 300


def test_what_is_there_or_may_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (".", *(tmp_path / name for name in ("", "new", "a/b/c", "file", "link/a"))):
        check_path(path, "--flag")
        check_place(path, "--flag")
    check_path(tmp_path / "file" / "a", "--flag")  # nothing is there, which is for the reader to say


def test_places_that_nothing_can_be_made_at(tmp_path: Path) -> None:
    """In a file, in a link to nothing, with a name that leaves no room for a temporary one beside it."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nothing").symlink_to(tmp_path / "new")
    assert f"{tmp_path / 'file'} is no folder" in problem(check_place, tmp_path / "file" / "a" / "b")
    assert f"{tmp_path / 'nothing'} is no folder" in problem(check_place, tmp_path / "nothing" / "a")
    assert "at most 200 bytes" in problem(check_place, tmp_path / ("a" * 201))
    assert "valid: a path in UTF-8" in problem(check_place, tmp_path / os.fsdecode(b"a\xff"))
    check_path(tmp_path / os.fsdecode(b"a\xff"), "--flag")  # it can be read
    check_place(tmp_path / ("a" * 200), "--flag")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folders_that_may_not_be_entered_or_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "read").mkdir(mode=0o555)
    assert "Permission denied" in problem(check_path, tmp_path / "closed" / "a")
    assert "may not be written" in problem(check_place, tmp_path / "read" / "a")
