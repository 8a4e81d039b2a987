"""GLUE's files as records."""

import gzip
from collections import Counter
from pathlib import Path

import pytest
from backports import zstd

from megajax.errors import UserError
from megajax.tasks.config import TaskConfig
from megajax.tasks.readers import read_records
from megajax.tasks.records import Pair
from megajax.tasks.registry import TASKS


def write(path: Path, *rows: list[str], end: str = "\n") -> str:
    path.write_bytes("".join("\t".join(row) + end for row in rows).encode())
    return str(path)


def mnli(*paths: str, **change):
    return read_records("mnli", paths, TaskConfig(**change), "--data.train")


def qqp(*paths: str, **change):
    return read_records("qqp", paths, TaskConfig(**change), "--data.train")


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
    records = mnli(str(file))
    assert records.entries == PAIRS and not records.odd
    file.write_bytes(file.read_bytes().rstrip())
    assert mnli(str(file)).entries == PAIRS
    (tmp_path / "t.gz").write_bytes(gzip.compress(file.read_bytes()))
    (tmp_path / "t.zst").write_bytes(zstd.compress(file.read_bytes()))
    assert mnli(str(tmp_path / "t.gz"), str(tmp_path / "t.zst")).entries == PAIRS * 2


@pytest.mark.parametrize(
    ("name", "group"), [("dev_matched.tsv", "matched"), ("MNLI-mismatched", "mismatched"), ("dev.tsv", "")]
)
def test_without_a_genre_the_group_is_in_the_name(name: str, group: str, tmp_path: Path) -> None:
    file = write(tmp_path / name, ["pairID", "sentence1", "sentence2", "label"], ["9n", "A", "B", "neutral"])
    assert mnli(file).entries == [Pair("9n", ("A", "B"), 1, group)]


def test_pairs_without_a_majority_are_skipped(tmp_path: Path) -> None:
    header = ["sentence1", "sentence2", "gold_label"]
    file = write(tmp_path / "a", header, ["A", "B", "-"], ["C", "", "neutral"], ["E", "F", "-"])
    records = mnli(file)
    assert records.entries == [Pair("1", ("C", ""), 1)]
    assert records.lines() == [
        f'2 pairs labelled "-" (no majority), skipped, first --data.train: {file}:2',
        f"1 pairs with an empty text, kept, first --data.train: {file}:3",
    ]
    with pytest.raises(UserError, match=r"valid: a label, or --no-task\.strict$"):
        mnli(file, strict=True)


def test_rows_that_qqp_has_cut_in_two_are_skipped(tmp_path: Path) -> None:
    header = ["id", "question1", "question2", "is_duplicate"]
    rows = [["1", "What is"], ["", "this?", "0"], ["2", "Why?", "", "1"], ["3", "A", "B", "C", "0"]]
    file = write(tmp_path / "a", header, *rows)
    records = qqp(file)
    assert records.entries == [Pair("2", ("Why?", ""), 1)]
    assert records.lines() == [
        f"3 rows with another number of columns, skipped, first --data.train: {file}:2",
        f"1 pairs with an empty text, kept, first --data.train: {file}:4",
    ]
    with pytest.raises(UserError, match=r"valid: 4, as the first line has, or --no-task\.strict$"):
        qqp(file, strict=True)


def test_a_test_set_has_no_labels(tmp_path: Path) -> None:
    file = write(tmp_path / "test.tsv", ["id", "question1", "question2"], ["0", "A", "B"])
    assert read_records("qqp", [file], TaskConfig(), "--data", labelled=False).entries == [Pair("0", ("A", "B"), None)]
    with pytest.raises(UserError, match="has no column is_duplicate, but id, question1, question2; valid: "):
        qqp(file)


@pytest.mark.parametrize(
    ("name", "groups", "labels"),
    [
        ("train.tsv", {"matched": 1536}, (512, 512, 512)),
        ("train-15130-noparse.tsv", {"matched": 15130}, (5049, 5029, 5052)),
        ("dev_matched.tsv", {"matched": 1000}, (333, 318, 349)),
        ("dev_mismatched.tsv", {"mismatched": 1000}, (350, 316, 334)),
    ],
)
def test_mnli_itself(name: str, groups: dict[str, int], labels: tuple[int, ...], test_data: Path) -> None:
    records = mnli(str(test_data / "glue" / "MNLI" / name), strict=True)
    assert Counter(record.group for record in records.entries) == groups
    assert Counter(record.label for record in records.entries) == dict(enumerate(labels))
    assert len({record.name for record in records.entries}) == sum(labels)


def test_the_same_row_of_mnli_in_two_files(test_data: Path) -> None:
    """With parses and without, the texts and labels are the same."""
    with_parses, without = (
        {record.name: record for record in mnli(str(test_data / "glue" / "MNLI" / name)).entries}
        for name in ("train.tsv", "train-15130-noparse.tsv")
    )
    assert with_parses.items() <= without.items()
    assert without["40"].texts[1] == "Japan's new rulers were catching on quickly."


@pytest.mark.parametrize(("name", "labels"), [("glue/QQP/train.tsv", (9409, 5591)), ("glue/QQP/dev.tsv", (1901, 1099))])
def test_qqp_itself(name: str, labels: tuple[int, int], test_data: Path) -> None:
    records = qqp(str(test_data / name), strict=True)
    assert Counter(record.label for record in records.entries) == dict(enumerate(labels))
    assert not any(record.group for record in records.entries)
    with_quotes = sum(record.texts[0].startswith('"') for record in records.entries)
    assert with_quotes == {15000: 324, 3000: 60}[len(records.entries)]


def test_samples_of_the_original_release(test_data: Path) -> None:
    folder = test_data / "glue-samples"
    (pair,) = mnli(str(folder / "MNLI" / "dev_matched.tsv")).entries
    assert pair == Pair(
        "0", ("The new rights are nice enough", "Everyone really likes the newest benefits "), 1, "matched"
    )
    (pair,) = qqp(str(folder / "QQP" / "dev.tsv")).entries
    assert pair.name == "201359" and TASKS["qqp"].labels[pair.label or 0] == "0"
