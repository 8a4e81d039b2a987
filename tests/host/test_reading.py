"""What is read is bounded, and only regular files are opened; of a path that cannot be, one line names the flag."""

import gzip
import io
import os
import socket
import time
from pathlib import Path

import pytest
from tiny import user_error

from megajax.core.errors import UserError
from megajax.host import reading
from megajax.host.paths import check_path, check_place

pytestmark = pytest.mark.usefixtures("no_waiting")


DEEP = 64


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * (DEEP + 1) + "]" * (DEEP + 1), "nested"),
        ('{"a":' * 100_000, "nested"),
        ("9" * 301, "301 digits"),
        ("[" + "9" * 5000 + "]", "5000 digits"),
        ("[" + "[]," * 200_000 + "1]", "too many lists"),
        ("[" + "0," * (1 << 21) + "0,0]", "too many lists"),
        ("[1,", "Expecting"),
    ],
    ids=lambda value: value[:8],
)
def test_json_that_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        reading.parse_json(text)


def test_json_up_to_the_bounds() -> None:
    """Brackets in strings do not count, also behind quotes that are escaped."""
    assert reading.parse_json("[" * DEEP + "]" * DEEP) is not None
    assert reading.parse_json("9" * 300) == 10**300 - 1
    text = '\\"[[{{' * 1000 + "\\\\"
    assert reading.parse_json(f'{{"a": "{text}", "b": [1]}}') == {"a": '"[[{{' * 1000 + "\\", "b": [1]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = " + "[" * 65, "nested"),
        ("a = " + "{b = " * 1000, "nested"),
        ("a." * 17 + "b = 1", "names"),
        ('"a" . ' * 17 + "b = 1", "names"),
        ("[" + "a." * 30_000 + "b]", "names"),
        ("a = " + "9" * 5000, "digits"),
        ("a = 0x" + "f" * 5000, "digits"),
        ("a = '" + "b" * 70_000 + "'", "characters"),
        ("a = ١", "Invalid value"),
        ("a = 1\na = 2", "overwrite"),
        ("a = 1979-99-99", "Expected newline|date"),
    ],
    ids=lambda value: value[:8],
)
def test_toml_that_is_refused(text: str, problem: str) -> None:
    """Soon: the time that `tomllib` takes grows by the square of a key's names."""
    began = time.perf_counter()
    with pytest.raises(ValueError, match=problem):
        reading.parse_toml(text)
    assert time.perf_counter() - began < 2


def test_toml_up_to_the_bounds() -> None:
    """Brackets and dots in strings and comments do not count."""
    strings = "a = '" + "[.a" * 100 + "'\nb = \"" + '\\"[.a' * 100 + '"\n# ' + "[a." * 100 + "\n"
    several = "c = '''" + "\n[.a'" * 100 + "'''\nd = \"\"\"" + '\n[.a""' * 100 + '"""\n'
    assert reading.parse_toml(strings + several + "e = " + "[" * 64 + "]" * 64).keys() == set("abcde")
    assert reading.parse_toml(".".join("a" * 16) + " = " + "9" * 300) != {}


def test_what_is_no_file(tmp_path: Path) -> None:
    """A named pipe, a socket, a device, a folder, nothing, a link to nothing or to itself, a name too long, a NUL."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
    for path, problem in (
        (tmp_path / "pipe", "a named pipe, not a file"),
        (tmp_path / "to-pipe", "a named pipe, not a file"),
        (tmp_path / "socket", "a socket, not a file"),
        (Path("/dev/zero"), "a device, not a file"),
        (tmp_path, "a folder, not a file"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "nothing", "No such file"),
        (tmp_path / "loop", "symbolic links"),
        (tmp_path / ("n" * 300), "too long"),
        (tmp_path / "a\0b", "null (byte|character)"),
    ):
        with pytest.raises(UserError, match=problem) as caught:
            reading.read_text(path)
        assert len(str(caught.value).splitlines()) == 1 and "\0" not in str(caught.value)
    assert reading.kind(tmp_path / "to-pipe") == "a named pipe" and reading.kind(tmp_path / "nothing") == ""
    for path in (tmp_path / "loop", tmp_path / ("n" * 300), tmp_path / "a\0b"):
        with pytest.raises(UserError, match="valid"):
            reading.is_file(path)


def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    """As nobody, where the tests run as root."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="Permission denied"):
            reading.kind(closed / "inside")
        with pytest.raises(UserError, match="Permission denied"):
            reading.names(closed)
    finally:
        if root:
            os.seteuid(0)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("\ufefftext")
    (tmp_path / "link").symlink_to("file")
    assert reading.read_text(tmp_path / "link") == "text"


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1000)
    assert len(reading.read_bytes(tmp_path / "file", 1000)) == 1000
    with pytest.raises(UserError, match="file: more than 999 bytes"):
        reading.read_bytes(tmp_path / "file", 999)
    assert list(reading.lines(io.BytesIO(b"a\nbc\n\nd"), 3)) == [b"a\n", b"bc\n", b"\n", b"d"]
    with pytest.raises(reading.TooLong, match="line 2 has more than 2 bytes"):
        list(reading.lines(io.BytesIO(b"a\nbc\n"), 2))


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    content = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(b"x" * (1 << 22))))
    with pytest.raises(reading.TooLong):
        reading.whole(content, 1 << 20)  # type: ignore[arg-type]
    assert content.tell() <= (1 << 20) + (1 << 17)


def problem(check, path: object) -> str:
    said = user_error(check, path, "--flag")
    assert said.startswith("--flag ") and "; valid: " in said
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
    assert f"{tmp_path / 'file'} is not a folder" in problem(check_place, tmp_path / "file" / "a" / "b")
    assert f"{tmp_path / 'nothing'} is not a folder" in problem(check_place, tmp_path / "nothing" / "a")
    assert "at most 200 bytes" in problem(check_place, tmp_path / ("a" * 201))
    assert "valid: a path in UTF-8" in problem(check_place, tmp_path / os.fsdecode(b"a\xff"))
    check_path(tmp_path / os.fsdecode(b"a\xff"), "--flag")  # it can be read
    check_place(tmp_path / ("a" * 200), "--flag")


def test_names_in_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locale with ISO-8859-1, where tensorstore would write elsewhere."""
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode("iso8859-1"))
    assert "in ASCII if the locale has another encoding" in problem(check_place, tmp_path / "é")
    check_place(tmp_path / "e", "--flag")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folders_that_may_not_be_entered_or_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "read").mkdir(mode=0o555)
    assert "Permission denied" in problem(check_path, tmp_path / "closed" / "a")
    assert "is not writable" in problem(check_place, tmp_path / "read" / "a")
