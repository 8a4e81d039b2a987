"""Documents from files, folders, JSONL and the standard library."""

import json
import os
import re
import sysconfig
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.core.errors import UserError
from megajax.data.samples.making import make_corpus
from megajax.data.tasks.sources import task_files
from megajax.data.text.inputs import read_folders
from megajax.data.text.records import DOCUMENT_CHARACTERS, TextDocuments
from megajax.data.text.streams import decoded, pieces


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_single_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    text = "".join(f"paragraph {n}\n" + "word " * (n % 60) + "\n\n" for n in range(1000))
    documents = list(TextDocuments(write(tmp_path / "a.txt", text)))
    assert "".join(documents) == text
    assert len(documents) > 20
    assert all(document.endswith("\n\n") for document in documents)
    assert all(len(document) >= DOCUMENT_CHARACTERS for document in documents[:-1])
    assert list(TextDocuments(tmp_path / "a.txt", cut=False)) == [text]


@pytest.mark.parametrize("content", ["one line\nafter the other\n" * 40, "no line ends " * 60, "x" * 500, "é" * 40])
def test_short_files_without_blank_lines_still_have_several_documents(tmp_path, content):
    documents = list(TextDocuments(write(tmp_path / "a.txt", content)))
    assert "".join(documents) == content
    assert len(documents) >= 2


@given(text=st.text(alphabet="ab \n\r", max_size=300), sizes=st.lists(st.integers(1, 40)), target=st.integers(1, 30))
def test_pieces_depend_on_the_text_only_and_are_bounded(text, sizes, target):
    blocks, rest = [], text
    for size in sizes:
        blocks.append(rest[:size])
        rest = rest[size:]
    found = list(pieces([*blocks, rest], target))
    assert found == list(pieces([text], target))
    assert "".join(found) == text
    assert all(0 < len(piece) <= 4 * target for piece in found)


def test_end_of_text_separates_documents(tmp_path):
    file = write(tmp_path / "a.txt", "\ufeffone\n\n1\n<|endoftext|>\ntwo<|endoftext|>\r\n<|endoftext|>")
    documents = TextDocuments(file)
    assert list(documents) == ["one\n\n1", "two"]
    assert documents.num_documents == 2


@pytest.mark.parametrize(
    ("offset", "end"),
    [*((n, b"\xe9t\xe9" + b"b" * 10) for n in (0, 10, (1 << 20) - 1, (1 << 20) + 5)), (3, b"\xe2\x82")],
)
def test_named_file_that_is_not_utf8_gives_the_offset(tmp_path, offset, end):
    """Of the first byte that is none, or of a character that is cut short at the file's end."""
    file = write(tmp_path / "latin.txt", b"a" * offset + end)
    problem = rf"--data\.path: .*latin\.txt is not UTF-8 text \(byte 0x{end[0]:x} at offset {offset}\)"
    with pytest.raises(UserError, match=problem):
        list(TextDocuments(file))


def test_characters_across_blocks_are_whole(tmp_path):
    text = "€" * (1 << 19)  # 3 bytes each: 1 MiB blocks cut them
    with write(tmp_path / "a.txt", text).open("rb") as content:
        assert "".join(decoded(content, tmp_path / "a.txt", "--data.path")) == text


def test_folder_in_the_order_of_paths(tmp_path, monkeypatch):
    """Whatever the order of the file system is."""
    for name in ["b.txt", "a/z.md", "a/c.txt", "c/x.txt", "b/x.txt", "a.txt", "B.txt", ".hidden", ".git/config"]:
        write(tmp_path / name, name)
    write(tmp_path / "a" / "d.jsonl", '{"text": "d1"}\n{"text": "d2"}\n')
    write(tmp_path / "latin.txt", b"\xe9")
    write(tmp_path / "image.png", b"\x89PNG\r\n\x1a\n\xff")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "blank.txt", " \n\n")
    (tmp_path / ".#a.txt").symlink_to(tmp_path / "nowhere")  # an editor's lock
    documents = TextDocuments(tmp_path)
    expected = ["B.txt", "a/c.txt", "d1", "d2", "a/z.md", "a.txt", "b/x.txt", "b.txt", "c/x.txt"]
    assert list(documents) == expected
    assert list(documents) == expected  # a second pass counts from the start
    assert (documents.num_documents, documents.skipped_files) == (9, 2)
    assert documents.num_bytes == sum(map(len, expected))
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda *args, **kwargs: ((f, s.sort(reverse=True) or s, n) for f, s, n in walk(*args, **kwargs))
    )
    assert list(TextDocuments(tmp_path)) == expected


def test_linked_folders_are_read_once(tmp_path):
    for name in ["text/b/x.txt", "text/a/y.txt", "away/z/1.txt", "away/2.txt", "away/.hidden/3.txt", "text/.old/4.txt"]:
        write(tmp_path / name, name)
    text, away = tmp_path / "text", tmp_path / "away"
    (text / "0").symlink_to(text / "b")  # lies below as well
    (text / "c").symlink_to(away / "z")
    (text / "d").symlink_to(away)
    (text / "e").symlink_to(away)
    (text / "b" / "back").symlink_to(text)
    (away / "z" / "home").symlink_to("..")  # the first link to `away` in the second round, so `d` comes before it
    (text / ".links").symlink_to(away)
    (text / "file.txt").symlink_to(away / "2.txt")
    documents = TextDocuments(text)
    found = [str(file.relative_to(text)) for file in documents._files.files]
    assert found == ["a/y.txt", "b/x.txt", "c/1.txt", "d/2.txt", "file.txt"]
    assert [folder.name for folder in read_folders(str(text), "")] == ["text", "0", "back", "c", "d", "e", "home"]
    with pytest.raises(UserError, match=r"--data\.path .*: this folder is read as data, and .*/away/new/data lies in"):
        make_corpus(str(text), "", 300, away / "new" / "data")
    (tmp_path / "door").symlink_to(text)
    assert list(TextDocuments(tmp_path / "door")) == list(documents)


@pytest.mark.parametrize("target", ["nowhere", "lost.txt"])
def test_a_link_to_nowhere_is_told(tmp_path, target):
    write(tmp_path / "a.txt", "text")
    (tmp_path / "lost.txt").symlink_to(target)  # the second one leads to itself
    problem = rf"^--data\.path: cannot read .*lost\.txt: a link to {target}: .*; valid: files to read$"
    with pytest.raises(UserError, match=problem):
        TextDocuments(tmp_path)


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8")), min_size=1, max_size=8))
def test_jsonl_round_trip(tmp_path_factory, texts):
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in [*texts, "end"])
    file = write(tmp_path_factory.mktemp("jsonl") / "a.jsonl", lines)
    assert list(TextDocuments(file)) == [text for text in texts if text.strip()] + ["end"]
    odd = '\ufeff{"text": "a"}\r\n\r\n{"text": "b\\u00e9"}'  # a byte order mark, Windows' line ends, a blank line
    assert list(TextDocuments(write(file.with_name("A.JSONL"), odd))) == ["a", "bé"]


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"text": "a"', "not JSON: .* at column"),
        (b'{"Text": "a"}', 'no text under the key "text"'),
        (b'{"text": 1}', 'under the key "text" is 1, not text'),
        (b'{"text": null}', 'under the key "text" is null, not text'),
        (b'{"text": null, "more": "%s"}' % (b"a" * (1 << 20)), 'under the key "text" is null, not text'),
        (b'["text"]', 'no text under the key "text"'),
        (b'"text"', 'no text under the key "text"'),
        (b'{"text": "\xe9"}', "utf-8"),
        (rb'{"text": "\ud800"}', "surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("folder", [False, True])
def test_broken_jsonl_names_file_and_line(tmp_path, line, problem, folder):
    file = write(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl:3: .*{problem}.*; valid: ") as caught:
        list(TextDocuments(tmp_path if folder else file))
    assert "\n" not in str(caught.value)


def test_standard_library():
    documents = TextDocuments("python-stdlib")
    texts, library = list(documents), Path(sysconfig.get_path("stdlib"))
    assert documents.num_bytes > 5_000_000
    assert (library / "argparse.py").read_text() in texts
    folders = {part for file in documents._files.files for part in file.relative_to(library).parts[:-1]}
    assert "json" in folders
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert {file.suffix for file in documents._files.files} == {".py"}


@pytest.mark.parametrize("path, problem", [("nowhere", "not exist"), ("", "not given"), ("fifo", "is a named pipe")])
def test_unusable_paths(tmp_path, monkeypatch, path, problem):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with pytest.raises(UserError, match=rf"^--data\.path.*{problem}"):
        TextDocuments(path)


@pytest.mark.parametrize("content", [None, "", " \n", b"\xff", b"a\0b", b"a" * (1 << 20) + b"\0"])
def test_source_without_text(tmp_path, content):
    if content is not None:
        write(tmp_path / "a.txt", content)
    with pytest.raises(UserError, match=r"--data: .* contains no text.*; valid: ") as caught:
        list(TextDocuments(tmp_path, flag="--data"))
    assert ("1 files are not UTF-8" in str(caught.value)) == isinstance(content, bytes)
    for name in "a.txt", "a.jsonl":
        with pytest.raises(UserError, match="contains no text"):
            list(TextDocuments(write(tmp_path / name, "")))


@pytest.mark.parametrize("place", ["a.tar", "a.tar.gz", "a.TGZ", "saved/data-00000-of-00001.arrow"])
def test_other_formats_are_refused_by_name(tmp_path, place):
    """Alone, in a folder, and as a task's records; a NUL is in no text, whatever its file is called."""
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    with tarfile.open(file, "w") as archive:
        archive.add(write(tmp_path / "a.txt", "text"))
    write(file.parent / "dataset_info.json", "{}")
    for path in file, tmp_path:
        for read in TextDocuments, lambda path: task_files([str(path)], "preferences", "--data.path"):
            with pytest.raises(UserError, match=rf"--data\.path: {re.escape(str(file))} is (an archive|Arrow).*valid"):
                read(path)
    with pytest.raises(UserError, match=r"é is not UTF-8 text \(byte 0x00 at offset \d+\); valid"):
        list(TextDocuments(write(tmp_path / "é", b"\xc3\xa9" + file.read_bytes())))
    with pytest.raises(UserError, match=r"line 2 is not UTF-8: a NUL"):
        list(TextDocuments(write(tmp_path / "a.csv", "text\na\0b\n")))


@pytest.mark.parametrize("folder", [False, True])
def test_refused_file(tmp_path, folder, monkeypatch):
    """By the operating system, which refuses nothing to root: so its refusal is simulated."""
    file = write(tmp_path / "secret.txt", "text")

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("megajax.host.reading.open_file", refuse)
    with pytest.raises(UserError, match=r"--data\.path: cannot read .*secret\.txt: Permission denied"):
        list(TextDocuments(tmp_path if folder else file, cut=False))
