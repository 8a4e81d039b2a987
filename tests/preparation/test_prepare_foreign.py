"""A preparation replaces and removes only what a preparation made, and never its input."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from test_prepare_command import TEXTS, jsonl, run

from megajax.core.errors import UserError


def entries(folder: Path) -> dict[str, object]:
    """Everything below a folder, links as what they lead to."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def check_refused(folder: Path, capsys: pytest.CaptureFixture[str], message: str, *arguments: object) -> None:
    """With and without `--overwrite`, and nothing changes."""
    before = entries(folder)
    for flags in (), ("--overwrite",):
        with pytest.raises(UserError, match=message):
            run(capsys, *arguments, *flags)
    assert entries(folder) == before


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The prefix of a dataset made of `a.jsonl`."""
    run(capsys, jsonl(tmp_path / "a.jsonl", *TEXTS[:5]), "--output", tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("place", ["c.bin", "c.idx", "c.tokenizer/notes", "c.report.json", "c.work/notes"])
def test_what_no_preparation_made_stays(tmp_path, capsys, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("{}")
    message = rf"^--output \S+c: \S+{Path(place).parts[0]} .*; valid: another PREFIX$"
    check_refused(tmp_path, capsys, message, jsonl(tmp_path / "a.jsonl", *TEXTS), "--output", tmp_path / "c")


INPUTS = [  # where the input lies, PREFIX being `c`
    "c.bin",
    "c.idx",
    "c.report.json",
    "c.tokenizer/a.txt",
    "c.work/a.txt",
    "c.work",
    "c.work.discarded/a.txt",
    "c.partial/a.txt",
]


@pytest.mark.parametrize("place", INPUTS)
def test_the_input_is_never_an_output(tmp_path, capsys, place):
    """Also in a folder with the mark of this program, which removes such."""
    file = tmp_path / place
    if len(Path(place).parts) > 1:
        file.parent.mkdir()
        if place != "c.tokenizer/a.txt":
            (file.parent / ".temporary-of-megajax").touch()
    jsonl(file, *TEXTS)
    message = r"valid: (another PREFIX|a copy of it elsewhere)"
    check_refused(tmp_path, capsys, message, file, "--output", tmp_path / "c")


@pytest.mark.parametrize("kind", ["input", "link", "hard link", "folder", "test set", "tokenizer"])
def test_by_whatever_name(tmp_path, capsys, made, kind):
    """With `--overwrite` an earlier result would be replaced, unless it is what is read now."""
    name = str(tmp_path / "other.txt")
    other = jsonl(tmp_path / "b.jsonl", *TEXTS[5:9])
    if "link" in kind:
        (os.symlink if kind == "link" else os.link)(f"{made}.bin", name)
    arguments = {
        "input": (f"{made}.report.json",),
        "link": (name,),
        "hard link": (name,),
        "folder": (f"{made}.tokenizer",),
        "test set": (other, "--decontaminate", f"{made}.bin"),
        "tokenizer": (other, "--tokenizer", f"{made}.tokenizer"),
    }[kind]
    message = r"--output \S+c: \S+ is (INPUT|--\w+) .*; valid: another PREFIX"
    check_refused(tmp_path, capsys, message, *arguments, "--output", made, "--min-tokens", "0")


@pytest.mark.parametrize("name", ["c", "..c", "sub/c", "../link/c"])
@pytest.mark.parametrize("flag", ["INPUT", "--decontaminate"])
def test_the_output_may_not_lie_in_a_folder_that_is_read(tmp_path, capsys, flag, name):
    """By whatever name; a link may lead there."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    jsonl(folder / "a.jsonl", *TEXTS)
    arguments = [folder] if flag == "INPUT" else [jsonl(tmp_path / "b.jsonl", *TEXTS), flag, folder]
    message = r"is in the folder .* that is read; valid: a place outside"
    check_refused(tmp_path, capsys, message, *arguments, f"--output={folder}/{name}")


@pytest.mark.parametrize("kind", ["bin", "idx", "link", "tokenizer", "tokenizer as a link"])
def test_overwrite_replaces_only_what_the_report_is_of(tmp_path, capsys, made, kind):
    """Beside the report of a preparation something else has taken the place of one of its files."""
    if kind in ("bin", "idx"):
        Path(f"{made}.{kind}").write_bytes(b"another one")
    elif kind == "tokenizer":
        Path(f"{made}.tokenizer", "notes.txt").write_text("mine")
    else:
        suffix = ".bin" if kind == "link" else ".tokenizer"
        shutil.move(f"{made}{suffix}", tmp_path / "moved")
        os.symlink(tmp_path / "moved", f"{made}{suffix}")
    message = r"c\.\w+ exists and was not made by a preparation; valid: another PREFIX$"
    check_refused(tmp_path, capsys, message, tmp_path / "a.jsonl", "--output", made, "--min-tokens", "5")


def test_a_report_with_other_values(tmp_path, capsys, made):
    """It is shown or refused in one line; a dataset that does not have its number of tokens is not replaced."""
    file, line = tmp_path / "c.report.json", (tmp_path / "a.jsonl", "--output", made)
    whole, refused = json.loads(file.read_text()), set()
    for key, value in itertools.product(whole.keys() - {"plan"}, ({}, [], None, "x", -1)):
        file.write_text(json.dumps(whole | {key: value}))
        try:
            run(capsys, *line)
        except UserError as error:
            assert str(error) == f"{file}: damaged; valid: another PREFIX, or --overwrite"
            refused.add(key)
    assert {"tokens", "documents", "dropped", "contaminated", "broken_lines", "seconds", "workers"} <= refused
    for tokens in {}, None, "x", whole["tokens"] + 1:
        file.write_text(json.dumps(whole | {"tokens": tokens}))
        with pytest.raises(UserError, match=r"c\.bin exists and was not made by a preparation; valid: another PREFIX$"):
            run(capsys, *line, "--overwrite")


@pytest.mark.parametrize("kind", ["link", "lock"])
def test_a_work_folder_of_somebody_else(tmp_path, capsys, kind):
    """A link to an empty folder, and a folder with a lock that holds something."""
    file, work = jsonl(tmp_path / "a.jsonl", *TEXTS), tmp_path / "c.work"
    (tmp_path / "empty").mkdir()
    if kind == "link":
        work.symlink_to(tmp_path / "empty")
    else:
        work.mkdir()
        (work / "lock").write_text("process 12")
    message = r"c\.work (is a link|holds lock and no .*); valid: another PREFIX"
    check_refused(tmp_path, capsys, message, file, "--output", tmp_path / "c")
