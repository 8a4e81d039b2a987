"""Planted copies and leaks are found; the result depends neither on the workers nor on interruptions."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megajax.data.text.indexed import IndexedDataset
from megajax.data.text.tokenizers import load_tokenizer
from megajax.preparation.plan import PreparationTask
from megajax.preparation.prepare import prepare_dataset
from megajax.preparation.prepare_options import PrepareOptions
from megajax.preparation.running import Show
from megajax.preparation.workers import Workers, processes

pytestmark = pytest.mark.slow

SUFFIXES = (".bin", ".idx", ".tokenizer/tokenizer.json")
OPTIONS = PrepareOptions(tokenizer="bpe", vocab_size=400, decontaminate_how="document")
DIFFERENT = {"output", "seconds", "throughput", "workers"}  # in the reports of two preparations of the same
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Planted:
    """A corpus with planted copies and test-set leaks, and an independent reckoning of what should happen to it."""

    corpus: Path
    test_set: Path
    near: dict[int, float]  # documents, and their Jaccard similarity to an earlier one
    leaked: set[int]
    exact: set[int]
    texts: list[str]


def similarity(one: str, other: str) -> float:
    """Jaccard similarity of 5-gram sets, from its definition."""
    sets = [{text[start : start + 5] for start in range(len(text) - 4)} for text in (one.lower(), other.lower())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def plant(folder: Path, documents: int = 600, near: int = 180, leaked: int = 50, exact: int = 20) -> Planted:
    """Write `corpus.jsonl` and `test.jsonl`; no document is alike to another but those that are planted."""
    rng = random.Random(7)

    def words(count: int) -> list[str]:
        return ["".join(rng.choices(LETTERS, k=rng.randint(3, 9))) for _ in range(count)]

    tests = [words(40) for _ in range(leaked)]
    count = documents - near - exact
    originals = [words(rng.randint(150, 200)) for _ in range(count)]
    places = rng.sample(range(count), leaked)
    for test, place in zip(tests, places, strict=True):
        start = rng.randint(0, 130)
        originals[place][start:start] = [word.capitalize() for word in test[5 : 5 + rng.randint(8, 20)]]
    clean = [number for number in range(count) if number not in set(places)]
    texts = [" ".join(text) for text in originals]
    expected, copies = {}, set()
    for _ in range(near):
        source = rng.choice(clean)
        wanted = rng.uniform(0.6, 0.95)
        changed = list(originals[source])
        share = 0.6 * (1 - wanted) / (1 + wanted)  # of the words; a changed word also changes grams around it
        for place in rng.sample(range(len(changed)), round(share * len(changed))):
            changed[place] = words(1)[0]
        expected[len(texts)] = similarity(texts[source], " ".join(changed))
        texts.append(" ".join(changed))
    for _ in range(exact):
        copies.add(len(texts))
        texts.append(texts[rng.choice(clean)])
    corpus, test_set = folder / "corpus.jsonl", folder / "test.jsonl"
    corpus.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)))
    test_set.write_text("".join(json.dumps({"text": ", ".join(test) + "."}) + "\n" for test in tests))
    return Planted(corpus, test_set, expected, set(places), copies, texts)


def prepare(planted: Planted, prefix: object, options: PrepareOptions = OPTIONS, workers: int = 1) -> dict:
    with processes(workers) as running:
        return prepare_with(running, planted, prefix, options)


def prepare_with(workers: Workers, planted: Planted, prefix: object, options: PrepareOptions = OPTIONS) -> dict:
    task = PreparationTask([str(planted.corpus)], str(prefix), options, [str(planted.test_set)])
    return prepare_dataset(task, workers=workers, overwrite=False, show=Show(shown=False))


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Planted:
    return plant(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def prefix(planted, tmp_path_factory) -> str:
    prefix = str(tmp_path_factory.mktemp("prepared") / "corpus")
    prepare(planted, prefix)
    return prefix


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Planted:
    return plant(tmp_path_factory.mktemp("few"), documents=120, near=30, leaked=10, exact=5)


@pytest.fixture(scope="module")
def few_prefix(few, tmp_path_factory) -> str:
    prefix = str(tmp_path_factory.mktemp("prepared") / "few")
    prepare(few, prefix)
    return prefix


def files(prefix: object) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES]


def report(prefix: object) -> dict:
    return json.loads(Path(f"{prefix}.report.json").read_text())


def test_what_is_dropped(planted, prefix):
    tokenizer = load_tokenizer(prefix + ".tokenizer")
    dataset = IndexedDataset(prefix)
    kept = [tokenizer.decode(dataset.document(number)[:-1]) for number in range(dataset.num_documents)]
    assert (dataset.tokens[dataset.document_offsets[1:] - 1] == tokenizer.end_of_text).all()
    dropped = set(range(len(planted.texts))) - {planted.texts.index(text) for text in kept}
    near = {number for number in dropped if number in planted.near}
    assert kept == [text for number, text in enumerate(planted.texts) if number not in dropped]
    assert dropped - near == planted.leaked | planted.exact
    similar = {number for number, value in planted.near.items() if value > 0.8}
    assert len(similar) > 50 and len(near & similar) >= 0.95 * len(similar)
    assert sum(0.6 < value < 0.7 for value in planted.near.values()) > 20
    assert all(planted.near[number] > 0.7 for number in near)
    found = report(prefix)
    counts = {name: rule["count"] for name, rule in found["dropped"].items()}
    assert counts["contaminated"] == len(planted.leaked) and counts["exact duplicate"] == len(planted.exact)
    assert counts["near duplicate"] == len(near) and counts["empty"] == counts["too short"] == 0
    assert (found["documents_in"], found["documents"]) == (len(planted.texts), len(kept))
    assert found["tokens"] == dataset.num_tokens
    example = found["dropped"]["near duplicate"]["examples"][0]
    line = int(example["place"].rpartition(":")[2]) - 1
    assert line == min(near) and example["jaccard"] == pytest.approx(planted.near[line], abs=1e-4)
    assert planted.texts[line].startswith(example["text"])
    (test_set,) = found["test_sets"]
    assert 0.1 < test_set["overlap"] < 0.5 and test_set["overlap_kept"] == 0
    index = found["duplicate_index"]
    assert index["bytes_per_document"] == 36 * (8 + 16) + 16 + 24 and 100 < index["pairs_compared"] < 1000


@pytest.mark.parametrize("stage", ["clean-000000.npz", pytest.param("candidates-000000.npz", marks=pytest.mark.full)])
def test_killed_and_resumed(planted, prefix, tmp_path, stage):
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "megajax", "prepare", planted.corpus, "--output", output, "--vocab-size", "400"]
    command += ["--decontaminate", planted.test_set, "--decontaminate-how", "document", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    work = Path(f"{output}.work")
    while not list(work.glob(f"data-*/{stage}")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir() if "work" not in file.name and "partial" not in file.name] == []
    for _ in range(100):  # its workers end by themselves
        if subprocess.run(["pgrep", "-g", str(process.pid)], stdout=subprocess.DEVNULL).returncode:
            break
        time.sleep(0.05)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("workers outlived the process that started them")
    before = {file: file.stat().st_mtime_ns for file in work.rglob("*.npz")}
    assert before
    assert prepare(planted, output)["resumed"] and files(output) == files(prefix)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"killed{s}" for s in (".bin", ".idx", ".tokenizer", ".report.json")
    }


def test_done_is_done(planted, prefix):
    stamps = [Path(prefix + suffix).stat().st_mtime_ns for suffix in SUFFIXES]
    assert prepare(planted, prefix) == report(prefix)
    assert [Path(prefix + suffix).stat().st_mtime_ns for suffix in SUFFIXES] == stamps


def test_a_small_index_gives_the_same(few, few_prefix, tmp_path, monkeypatch):
    """Sorted in many parts, of many groups, instead of at once."""
    monkeypatch.setattr("megajax.preparation.division.SHARD_BYTES", (1 << 16, 1 << 16, 1 << 16))
    monkeypatch.setattr("megajax.preparation.corpus._GROUP", (16, 64))
    monkeypatch.setattr("megajax.preparation.duplicates._ENTRIES", 100)
    monkeypatch.setattr("megajax.preparation.duplicates._PAIRS", 8)
    monkeypatch.setattr("megajax.preparation.duplicates._CHUNK", 5)
    monkeypatch.setattr("megajax.preparation.writing.PART_BYTES", 1 << 18)
    monkeypatch.setattr("megajax.preparation.similarity._CACHED_GRAMS", 1)
    prepare(few, tmp_path / "small")
    assert files(tmp_path / "small") == files(few_prefix)
    once, again = report(few_prefix), report(tmp_path / "small")
    assert {key for key in once if once[key] != again[key]} <= DIFFERENT | {"plan"}


def test_overlap_is_reported_without_dropping(planted, prefix, tmp_path):
    options = PrepareOptions(tokenizer=prefix + ".tokenizer", duplicates="keep", decontaminate_how="report")
    found = prepare(planted, tmp_path / "kept", options)
    assert found["documents"] == len(planted.texts)
    (test_set,) = found["test_sets"]
    assert test_set["overlap"] == test_set["overlap_kept"] == report(prefix)["test_sets"][0]["overlap"]
    words = [
        line["text"].lower().replace(",", "").rstrip(".").split()
        for line in map(json.loads, planted.test_set.read_text().splitlines())
    ]
    grams = {tuple(text[start : start + 8]) for text in words for start in range(len(text) - 7)}
    corpus = [text.lower().split() for text in planted.texts]
    there = {tuple(text[start : start + 8]) for text in corpus for start in range(len(text) - 7)}
    assert test_set["grams"] == len(grams) and test_set["overlap"] == len(grams & there) / len(grams)
    assert IndexedDataset(tmp_path / "kept").num_documents == len(planted.texts)
