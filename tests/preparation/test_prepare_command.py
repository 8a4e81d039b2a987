"""The command: what its steps do to a small corpus, and what it says about input that cannot be used."""

import errno
import fcntl
import gzip
import json
import os
import resource
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from saved_tokenizers import write_saved

from megajax.commands.prepare import main
from megajax.core.errors import UserError
from megajax.data.samples.making import make_corpus
from megajax.data.text.indexed import IndexedDataset
from megajax.data.text.tokenizers import load_tokenizer
from megajax.host import files

pytestmark = pytest.mark.slow

WORDS = "the first quick brown fox jumps over a lazy dog while nobody looks at all".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[(n * k) % len(WORDS)] + str(n * k % 89) for k in range(60)) for n in range(1, 41)]


def jsonl(file: Path, *texts: str, key: str = "text") -> str:
    file.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return str(file)


def run(capsys, *arguments) -> dict:
    """The report of one process without the defaults that need long documents."""
    main([str(argument) for argument in ("--json", "--workers", "1", "--vocab-size", "300", *arguments)])
    return json.loads(capsys.readouterr().out)


def decoded(prefix) -> list[str]:
    dataset, tokenizer = IndexedDataset(prefix), load_tokenizer(f"{prefix}.tokenizer")
    return [tokenizer.decode(dataset.document(number)[:-1]) for number in range(dataset.num_documents)]


def test_every_format_in_one_call(tmp_path, capsys):
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "a.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[:5]).encode())
    )
    pq.write_table(pa.table({"text": TEXTS[5:9]}), inputs / "b.parquet")
    (inputs / "c.txt").write_text(TEXTS[9])
    (inputs / "d.bin").write_bytes(b"\xff\xfe")
    named = tmp_path / "named.txt"
    named.write_text("<|endoftext|>".join(TEXTS[10:12]))
    found = run(capsys, inputs, named, "--output", tmp_path / "out" / "all")
    assert decoded(tmp_path / "out" / "all") == TEXTS[:12]
    assert found["documents_in"] == 12 and found["skipped_files"] == 1
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "all.bin", "all.idx", "all.report.json", "all.tokenizer",
    ]  # fmt: skip


def test_each_step_can_be_left_out(tmp_path, capsys):
    messy = "âœ” schÃ¶n  \r\n\r\n\r\n\r\n" + TEXTS[0]
    file = jsonl(tmp_path / "a.jsonl", messy, TEXTS[1], "short", " \n", TEXTS[1], TEXTS[1].upper())
    run(capsys, file, "--output", tmp_path / "all")
    assert decoded(tmp_path / "all") == ["✔ schön\n\n" + TEXTS[0], TEXTS[1]]
    steps = {
        "--no-fix-unicode": ["âœ” schÃ¶n\n\n" + TEXTS[0], TEXTS[1]],
        "--no-clean-newlines": ["✔ schön  \n\n\n\n" + TEXTS[0], TEXTS[1]],
        "--min-tokens 0": ["✔ schön\n\n" + TEXTS[0], TEXTS[1], "short"],
        "--duplicates exact": ["✔ schön\n\n" + TEXTS[0], TEXTS[1], TEXTS[1].upper()],
        "--duplicates keep": ["✔ schön\n\n" + TEXTS[0], TEXTS[1], TEXTS[1], TEXTS[1].upper()],
    }
    for number, (flags, expected) in enumerate(steps.items()):
        run(capsys, file, "--output", tmp_path / str(number), *flags.split())
        assert decoded(tmp_path / str(number)) == expected, flags


def test_tokenizers_are_trained_and_used(tmp_path, capsys):
    file = jsonl(tmp_path / "a.jsonl", *TEXTS)
    found = run(capsys, file, "--output", tmp_path / "a", "--tokenizer=wordpiece", "--min-tokens=0")
    assert (tmp_path / "a.tokenizer" / "tokenizer.json").exists() and found["tokenizer_size"] <= 300
    assert found["documents"] == len(TEXTS) and decoded(tmp_path / "a")[0] == TEXTS[0]
    run(capsys, file, "--output", tmp_path / "b", "--vocab-size", "290")
    corpus = make_corpus(str(tmp_path / "b"), "", 300, tmp_path / "run" / "b")
    assert corpus.tokenizer is not None and corpus.tokenizer.size == 290
    flags = file, "--output", tmp_path / "c", "--tokenizer", write_saved(tmp_path / "saved", "llama3")
    found = run(capsys, *flags)  # begin tokens count, too
    assert found["tokens"] == IndexedDataset(tmp_path / "c").num_tokens
    assert run(capsys, *flags, "--overwrite", "--min-tokens", "0")["documents"] == len(TEXTS)


def test_broken_lines_are_counted_up_to_a_limit(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[3:3] = ['{"text": "no end', '{"body": "other key"}', "[1]"]
    file.write_text("\n".join(lines))
    found = run(capsys, file, "--output", tmp_path / "a", "--max-broken", "3")
    assert found["broken_lines"]["count"] == 3 and found["broken_lines"]["first"].startswith(f"{file}:4: not JSON: ")
    assert found["documents"] == len(TEXTS)
    long = jsonl(tmp_path / "long.jsonl", "a " * (1 << 19))
    found = run(capsys, long, file, "--output", tmp_path / "e", "--max-document", "1")["broken_lines"]
    assert found["count"] == 4 and found["first"] == f"{long}:1: more than 1 MiB as one text; valid: at most that"
    with pytest.raises(UserError, match=r"a\.jsonl:4: not JSON: .* more than --max-broken 2 lines are broken"):
        run(capsys, file, "--output", tmp_path / "b", "--max-broken", "2")
    assert not list(tmp_path.glob("b.[bi]*"))
    assert run(capsys, file, "--output", tmp_path / "b", "--max-broken", "3")["resumed"]
    with pytest.raises(UserError, match="--max-broken 2 lines"):
        run(capsys, file, "--output", tmp_path / "c", "--max-broken", "2")
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    assert not run(capsys, file, "--output", tmp_path / "c", "--max-broken", "2")["resumed"], (
        "corrected, it begins anew"
    )


def test_files_whose_names_are_not_utf8(tmp_path, capsys):
    """They are read, and the report names them by escapes, so that it is the same when it is read again."""
    folder = tmp_path / os.fsdecode(b"in\xff")
    folder.mkdir()
    jsonl(folder / os.fsdecode(b"a\xfe.jsonl"), *TEXTS[:3], TEXTS[0])
    flags = (folder, "--output", tmp_path / "a", "--min-tokens", "0")
    found = run(capsys, *flags)
    assert found["documents"] == 3 and found["dropped"]["exact duplicate"]["examples"][0]["place"].endswith(
        "a\udcfe.jsonl:4"
    )
    assert run(capsys, *flags) == found
    main([str(argument) for argument in flags] + ["--vocab-size", "300", "--workers", "1"])
    assert "written: " in capsys.readouterr().out


def test_wrong_key(tmp_path, capsys):
    file = jsonl(tmp_path / "a.jsonl", *TEXTS, key="body")
    with pytest.raises(UserError, match=r'no text in .*a\.jsonl:1: no text under the key "text"; there are "body"'):
        run(capsys, file, "--output", tmp_path / "a")
    assert run(capsys, file, "--output", tmp_path / "b", "--text-key", "body")["documents"] == len(TEXTS)


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("empty.txt", r"INPUT: no text in empty\.txt"),
        ("short.jsonl", "none of the 2 documents is left: 2 too short; valid: a lower --min-tokens than 128"),
        ("a.jsonl --decontaminate broken.jsonl", r"broken\.jsonl:1: not JSON: "),
        ("a.jsonl --output a/..", r"--output 'a/\.\.'; valid: a path without a suffix"),
        ("", "INPUT missing"),
    ],
)
def test_unusable_input(tmp_path, capsys, monkeypatch, flags, problem):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", *TEXTS)
    jsonl(tmp_path / "short.jsonl", "a", "b")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(UserError, match=problem) as caught:
        run(capsys, "--output", "out", *flags.split())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out*")), "nothing is left that the corrected command would stumble over"


def test_another_preparation_at_the_same_place(tmp_path, capsys):
    file = jsonl(tmp_path / "a.jsonl", *TEXTS)
    prefix = tmp_path / "a"
    run(capsys, file, "--output", prefix)
    with pytest.raises(UserError, match=r"a\.idx exists and was made from other input .* or --overwrite"):
        run(capsys, file, "--output", prefix, "--min-tokens", "5")
    before = Path(f"{prefix}.bin").read_bytes()
    assert run(capsys, file, "--output", prefix, "--min-tokens", "5", "--overwrite")["documents"] == len(TEXTS)
    jsonl(tmp_path / "a.jsonl", *TEXTS[1:])
    with pytest.raises(UserError, match="made from other input"):
        run(capsys, file, "--output", prefix, "--min-tokens", "5")
    assert Path(f"{prefix}.bin").read_bytes() == before
    Path(f"{tmp_path}/busy.work").mkdir()
    with open(f"{tmp_path}/busy.work/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is preparing it"):
            run(capsys, file, "--output", tmp_path / "busy")
        with pytest.raises(UserError, match="another process is preparing it"):
            run(capsys, file, "--output", tmp_path / "busy", "--overwrite")


@pytest.mark.parametrize("name", ["a.bin.partial", "a.partial", "a.work.discarded", "a.tokenizer.partial"])
def test_what_lies_beside_stays(tmp_path, capsys, name):
    file = jsonl(tmp_path / "a.jsonl", *TEXTS)
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes").write_text("mine")
    run(capsys, file, "--output", tmp_path / "a")
    assert (tmp_path / name / "notes").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 6, "nothing else is left"


def test_what_appears_while_it_works_stays(tmp_path, capsys, monkeypatch):
    """Once it is gone, the same command goes on; an interrupted --overwrite does so without the flag, too."""
    file = jsonl(tmp_path / "a.jsonl", *TEXTS)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("megajax.preparation.prepare.begin_writing", stop)
        with pytest.raises(KeyboardInterrupt):
            run(capsys, file, "--output", tmp_path / "a")
    (tmp_path / "a.bin").write_text("mine")
    with pytest.raises(UserError, match=r"a\.bin exists and was not made by a preparation"):
        run(capsys, file, "--output", tmp_path / "a")
    assert (tmp_path / "a.bin").read_text() == "mine"
    (tmp_path / "a.bin").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("megajax.preparation.stages.encode_texts", stop)  # its shards are done
        assert run(capsys, file, "--output", tmp_path / "a")["resumed"]
    with monkeypatch.context() as patch:
        patch.setattr("megajax.preparation.writing.publish", stop)
        with pytest.raises(KeyboardInterrupt):
            run(capsys, file, "--output", tmp_path / "a", "--min-tokens", "5", "--overwrite")
    found = run(capsys, file, "--output", tmp_path / "a", "--min-tokens", "5")
    assert found["resumed"] and found["documents"] == len(TEXTS) and len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize("form", ["NFD", "ligatures", "mojibake", "wide", "entities"])
def test_a_test_set_is_found_however_it_is_written(tmp_path, capsys, form):
    plain = "L’été dernier, « finir » fut la fin d’une belle affaire très étrange à propos de rien"
    written = {
        "NFD": unicodedata.normalize("NFD", plain),
        "ligatures": plain.replace("fi", "ﬁ"),
        "mojibake": plain.encode().decode("windows-1252"),
        "wide": "".join(chr(ord(c) + 0xFEE0) if "a" <= c <= "z" else c for c in plain),
        "entities": plain.replace("é", "&eacute;"),
    }[form]
    file = jsonl(tmp_path / "a.jsonl", *TEXTS[:3], f"{TEXTS[3]} {written} {TEXTS[4]}")
    test_set = jsonl(tmp_path / "test.jsonl", written, key="body")
    flags = ("--decontaminate", test_set, "--test-key", "body", "--min-tokens", "0")
    found = run(capsys, file, "--output", tmp_path / "a", *flags)
    assert found["contaminated"] == {
        "dropped": 0,
        "cut": 1,
        "pieces": 1,
        "characters": found["contaminated"]["characters"],
    }
    assert found["test_sets"][0]["overlap"] == 1 and found["test_sets"][0]["overlap_kept"] == 0
    before, after = decoded(tmp_path / "a")[3:]
    assert TEXTS[3].startswith(before) and TEXTS[4].endswith(after), "and no more is cut out than 200 characters"
    assert 0 <= 200 - (len(TEXTS[3]) - len(before)) < 20 and 0 <= len(TEXTS[4]) - len(after) - 200 < 20


def test_work_that_was_half_removed_is_not_taken_for_whole(tmp_path, capsys, monkeypatch):
    """Killed at the end, or stopped by input that cannot be read: the same command does what it did."""
    file = jsonl(tmp_path / "a.jsonl", *TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda folder, **_: [entry.unlink() for entry in list(folder.glob("clean-*"))])
        expected = run(capsys, file, "--output", tmp_path / "a")
    assert run(capsys, file, "--output", tmp_path / "a") == expected
    broken = tmp_path / "b.jsonl.gz"
    broken.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes())[:-9])
    with pytest.raises(UserError, match=r"b\.jsonl\.gz: truncated"):
        run(capsys, broken, "--output", tmp_path / "b")
    broken.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert run(capsys, broken, "--output", tmp_path / "b")["documents"] == len(TEXTS)


def test_a_disk_without_room_for_the_mark(tmp_path, capsys, monkeypatch):
    """The first file that has content: the folder and an empty lock need no block of the disk."""
    file = jsonl(tmp_path / "a.jsonl", *TEXTS)

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"a\.work cannot be written: No space left on"):
        patch.setattr(files, "mark", full)
        run(capsys, file, "--output", tmp_path / "a")
    assert run(capsys, file, "--output", tmp_path / "a")["documents"] == len(TEXTS)


def run_on_full_disk(capsys, size: int, *arguments) -> str:
    """The error where no file may be larger than `size`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(
            UserError, match=r"cannot be written: File too large; .* rerun the command to resume$"
        ) as ended:
            run(capsys, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(ended.value)


def test_a_full_disk_loses_nothing(tmp_path, capsys):
    file = jsonl(tmp_path / "a.jsonl", *TEXTS)
    expected = tmp_path / "expected"
    run(capsys, file, "--output", expected)
    for size in np.unique([2000, 8000, Path(f"{expected}.bin").stat().st_size - 1]).tolist():
        run_on_full_disk(capsys, size, file, "--output", tmp_path / "a")
        assert not list(tmp_path.glob("a.[bitr]*"))
    run(capsys, file, "--output", tmp_path / "a")
    assert Path(f"{tmp_path}/a.bin").read_bytes() == Path(f"{expected}.bin").read_bytes()


def test_a_disk_that_is_full_when_the_tokenizer_is_saved(tmp_path, capsys):
    arguments = jsonl(tmp_path / "a.jsonl", *TEXTS[:3]), "--output", tmp_path / "a"
    assert "tokenizer.json" in run_on_full_disk(capsys, 4000, *arguments)
    assert run(capsys, *arguments)["resumed"]
