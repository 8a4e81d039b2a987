"""Files and folders that appear whole, and what lies beside them."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from megajax.core.errors import UserError
from megajax.host.files import file_atomically, folder_atomically, is_marked, mark, put_back, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class Killed(BaseException):
    """What nobody expects."""


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    write_atomically(tmp_path / "new" / "a.txt", "one")
    with pytest.raises(Killed), file_atomically(tmp_path / "new" / "a.txt") as new:
        new.write_text("two")
        raise Killed
    assert names(tmp_path) == ["new", "new/a.txt"] and (tmp_path / "new" / "a.txt").read_text() == "one"
    write_atomically(tmp_path / "new" / "a.txt", "three")
    assert (tmp_path / "new" / "a.txt").read_text() == "three"


@pytest.mark.parametrize("kind", ["file", "folder", "empty folder", "link"])
def test_what_has_the_temporary_name_stays(kind, tmp_path):
    """A file, a folder: it is neither written nor removed."""
    for name in ("a.txt", "folder"):
        there = tmp_path / f"{name}.partial"
        if kind == "link":
            there.symlink_to("nowhere")
        elif kind == "empty folder":
            there.mkdir()
        else:
            write_atomically(there / "notes" if kind == "folder" else there, "mine")
    before = names(tmp_path)
    write_atomically(tmp_path / "a.txt", "ours")
    with folder_atomically(tmp_path / "folder") as new:
        (new / "b").write_text("ours")
    assert names(tmp_path) == sorted([*before, "a.txt", "folder", "folder/b"])
    with pytest.raises(Killed), folder_atomically(tmp_path / "other") as new:
        raise Killed
    assert names(tmp_path) == sorted([*before, "a.txt", "folder", "folder/b"])
    if kind == "file":
        assert (tmp_path / "a.txt.partial").read_text() == "mine"


def test_what_a_killed_process_left_is_removed(tmp_path):
    place = tmp_path / "folder.partial"
    with folder_atomically(tmp_path / "folder") as new:
        assert is_marked(place)
        shutil.copytree(place, tmp_path / "copy")
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "copy").rename(place)
    (place / "folder" / "b").write_text("half")
    with folder_atomically(tmp_path / "folder") as new:
        assert not list(new.iterdir())
        (new / "c").write_text("whole")
    assert names(tmp_path) == ["folder", "folder/c"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_only_what_is_ours_is_replaced(kind, tmp_path):
    """Seen before anything is done, and again at the end."""
    (tmp_path / "elsewhere").mkdir()
    there = tmp_path / "folder"
    with pytest.raises(UserError, match="not made by megajax"), folder_atomically(there):
        if kind == "link":
            there.symlink_to(tmp_path / "elsewhere")
        elif kind == "file":
            there.write_text("mine")
        else:
            write_atomically(there / "notes", "mine")
    before = names(tmp_path)
    with pytest.raises(UserError, match="not made by megajax"), folder_atomically(there):
        pytest.fail()
    assert names(tmp_path) == before and "folder" in before
    if kind == "folder":
        with folder_atomically(there, ours=lambda there: (there / "notes").exists()) as new:
            (new / "b").write_text("ours")
        assert names(tmp_path) == ["elsewhere", "folder", "folder/b"]


def test_an_empty_folder_that_may_not_be_moved_stays(tmp_path, monkeypatch):
    """It is somebody else's: one line, and what was to take its place is removed."""
    there, rename = tmp_path / "folder", Path.rename
    there.mkdir()

    def refuse(path: Path, target: Path) -> Path:
        if path == there:
            raise PermissionError(errno.EACCES, "Permission denied", str(path), None, str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with (
        pytest.raises(UserError, match=rf"^{there}: cannot be written: Permission denied; valid: "),
        folder_atomically(there) as new,
    ):
        (new / "a").write_text("ours")
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("made", [True, False])
def test_nothing_stays_where_the_disk_is_full(made, tmp_path, monkeypatch):
    """Though even the mark of the temporary folder, or its text, cannot be written."""

    def full(path, text):
        if made:
            path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(tmp_path / "new", "x")
    assert not names(tmp_path)


def test_killed_while_replacing(tmp_path):
    """Between the two names nothing is lost: the earlier folder comes back."""
    place = tmp_path / "folder.partial"
    (place / ".earlier").mkdir(parents=True)
    (place / ".earlier" / "b").write_text("earlier")
    put_back(tmp_path / "folder")
    assert not (tmp_path / "folder").exists(), "this one has no mark"
    mark(place)
    put_back(tmp_path / "folder")
    assert (tmp_path / "folder" / "b").read_text() == "earlier"
    with folder_atomically(tmp_path / "folder", ours=lambda _: True) as new:
        (new / "c").write_text("ours")
    assert names(tmp_path) == ["folder", "folder/c"]
