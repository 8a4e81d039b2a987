"""GLUE's files as records."""

import gzip
from collections import Counter
from pathlib import Path

import pytest
from backports import zstd
from real_records import read

from megajax.core.errors import UserError
from megajax.data.tasks.records import Pair
from megajax.data.tasks.registry import TASKS


def write(path: Path, *rows: list[str], end: str = "\n") -> str:
    path.write_bytes("".join("\t".join(row) + end for row in rows).encode())
    return str(path)


ROWS = [
    ["genre", "pairID", "gold_label", "sentence2", "extra", "sentence1", "index"],
    ["fiction", "5e", "entailment", 'He said "no', "", '"A man', "0"],
    ["oup", "6n", "neutral", "\u2028É\x85", "", "B\rb", "1"],
    ["novel", "7c", "contradiction", "D", "", "C", "2"],
]
PAIRS = [
    Pair("0", ('"A man', 'He said "no'), 0, "matched"),
    Pair("1", ("B\rb", "\u2028É\x85"), 1, "mismatched"),
    Pair("2", ("C", "D"), 2, ""),
]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("beginning", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
def test_columns_are_found_by_name_and_nothing_is_quoted(end: str, beginning: bytes, tmp_path: Path) -> None:
    file = tmp_path / "train.tsv"
    write(file, *ROWS, end=end)
    file.write_bytes(beginning + file.read_bytes())
    records = read("mnli", file)
    assert records.entries == PAIRS and not records.odd
    file.write_bytes(file.read_bytes().rstrip())
    assert read("mnli", file).entries == PAIRS
    (tmp_path / "t.gz").write_bytes(gzip.compress(file.read_bytes()))
    (tmp_path / "t.zst").write_bytes(zstd.compress(file.read_bytes()))
    assert read("mnli", tmp_path / "t.gz", tmp_path / "t.zst").entries == PAIRS * 2


@pytest.mark.parametrize(
    ("name", "group"), [("dev_matched.tsv", "matched"), ("MNLI-mismatched", "mismatched"), ("dev.tsv", "")]
)
def test_without_a_genre_the_group_is_in_the_name(name: str, group: str, tmp_path: Path) -> None:
    file = write(tmp_path / name, ["pairID", "sentence1", "sentence2", "label"], ["9n", "A", "B", "neutral"])
    assert read("mnli", file).entries == [Pair("9n", ("A", "B"), 1, group)]


@pytest.mark.parametrize(
    ("task", "rows", "pair", "odd", "valid"),
    [
        (
            "mnli",
            ["sentence1 sentence2 gold_label", "A B -", "C  neutral", "E F -"],
            Pair("1", ("C", ""), 1),
            {'2 pairs labelled "-" (no majority), skipped': 2, "1 pairs with an empty text, kept": 3},
            "a label",
        ),
        (
            "qqp",
            ["id question1 question2 is_duplicate", "1 What-is", " this? 0", "2 Why?  1", "3 A B C 0"],
            Pair("2", ("Why?", ""), 1),
            {"3 rows with a wrong number of columns, skipped": 2, "1 pairs with an empty text, kept": 4},
            "4, as in the first line",
        ),
    ],
)
def test_odd_rows_are_skipped_and_counted(task, rows, pair, odd, valid, tmp_path: Path) -> None:
    """Pairs that nobody agreed on, and rows that QQP's release has cut in two."""
    file = write(tmp_path / "a", *(row.split(" ") for row in rows))
    records = read(task, file)
    assert records.entries == [pair]
    assert records.lines() == [f"{what}, first --data.dev: {file}:{line}" for what, line in odd.items()]
    with pytest.raises(UserError, match=rf"valid: {valid}, or --no-task\.strict$"):
        read(task, file, strict=True)


def test_a_test_set_has_no_labels(tmp_path: Path) -> None:
    file = write(tmp_path / "test.tsv", ["id", "question1", "question2"], ["0", "A", "B"])
    assert read("qqp", file, labelled=False).entries == [Pair("0", ("A", "B"), None)]
    with pytest.raises(UserError, match="has no column is_duplicate, only id, question1, question2; valid: "):
        read("qqp", file)


@pytest.mark.parametrize(
    ("name", "group", "labels"),
    [
        ("MNLI/train.tsv", "matched", (512, 512, 512)),
        ("MNLI/train-15130-noparse.tsv", "matched", (5049, 5029, 5052)),
        ("MNLI/dev_matched.tsv", "matched", (333, 318, 349)),
        ("MNLI/dev_mismatched.tsv", "mismatched", (350, 316, 334)),
        ("QQP/train.tsv", "", (9409, 5591)),
        ("QQP/dev.tsv", "", (1901, 1099)),
    ],
)
def test_the_data_themselves(name: str, group: str, labels: tuple[int, ...], test_data: Path) -> None:
    records = read("mnli" if group else "qqp", test_data / "glue" / name, strict=True).entries
    assert Counter(record.group for record in records) == {group: sum(labels)}
    assert Counter(record.label for record in records) == dict(enumerate(labels))
    if group:
        assert len({record.name for record in records}) == len(records)
    else:
        assert sum(record.texts[0].startswith('"') for record in records) == {15000: 324, 3000: 60}[len(records)]


def test_samples_of_the_original_release(test_data: Path) -> None:
    folder = test_data / "glue-samples"
    (pair,) = read("mnli", folder / "MNLI" / "dev_matched.tsv").entries
    assert pair == Pair(
        "0", ("The new rights are nice enough", "Everyone really likes the newest benefits "), 1, "matched"
    )
    (pair,) = read("qqp", folder / "QQP" / "dev.tsv").entries
    assert pair.name == "201359" and TASKS["qqp"].labels[pair.label or 0] == "0"
