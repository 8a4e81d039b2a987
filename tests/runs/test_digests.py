"""Damage of any file is found by its digest."""

import json
from pathlib import Path

import pytest

from megajax.runs.digests import FILES, problem_of, write_digests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files with their digests."""
    (tmp_path / "state").mkdir()
    for name, content in (("a", b"one"), ("state/b", bytes(range(256))), ("state/empty", b"")):
        (tmp_path / name).write_bytes(content)
    write_digests(tmp_path)
    return tmp_path


def test_what_was_written_is_whole(folder: Path) -> None:
    """Also when the digests are written again, and where there are none; a file more is nobody's."""
    assert problem_of(folder) == ""
    write_digests(folder)
    assert json.loads((folder / FILES).read_text())["sha256"].keys() == {"a", "state/b", "state/empty"}
    (folder / "more").write_text("")
    assert problem_of(folder) == ""
    (folder / "a").write_bytes(b"two")
    (folder / FILES).unlink()
    assert problem_of(folder) == ""


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("state/b", bytes(255), "state/b has 255 bytes, not 256 as it was written"),
        ("state/b", bytes([*range(255), 254]), "state/b has other bytes than were written"),
        ("state/b", None, "state/b is missing"),
        ("state/empty", b"0", "state/empty has 1 bytes, not 0 as it was written"),
        (FILES, b"", f"{FILES} cannot be read"),
        (FILES, b"[]", f"{FILES} cannot be read"),
        (FILES, b'{"sha256": {"a": [1e999, "0"]}}', f"{FILES} cannot be read"),
        (FILES, b'{"sha256": {"a": 1}}', f"{FILES} cannot be read"),
        (FILES, b'{"sha256": {"../a": [3, "0"]}}', f"{FILES} cannot be read"),
        (FILES, b"[" * 100_000, f"{FILES} cannot be read"),
        (FILES, b'{"sha256": {"a\\u0000": [3, "0"]}}', "a\0 is missing"),
    ],
)
def test_damage_is_named(folder: Path, name: str, content: bytes | None, problem: str) -> None:
    """The first file that differs, and how."""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    assert problem_of(folder) == problem


def test_a_folder_in_the_place_of_a_file(folder: Path) -> None:
    """Is not read."""
    for name in ("a", FILES):
        (folder / name).unlink()
        (folder / name).mkdir()
        assert problem_of(folder) in ("a is missing", f"{FILES} cannot be read")
