"""Planted copies and leaks are found; the result depends neither on the workers nor on interruptions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from planted import Planted, plant

from megajax.data.indexed import IndexedDataset
from megajax.data.tokenizers import load_tokenizer
from megajax.preparation.options import PrepareOptions
from megajax.preparation.plan import Task
from megajax.preparation.prepare import prepare_dataset
from megajax.preparation.progress import Show

SUFFIXES = (".bin", ".idx", ".tokenizer/tokenizer.json")
QUIET = Show(shown=False)
OPTIONS = PrepareOptions(tokenizer="bpe", vocab_size=400)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Planted:
    return plant(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def prefix(planted, tmp_path_factory) -> str:
    prefix = str(tmp_path_factory.mktemp("prepared") / "corpus")
    task = Task([str(planted.corpus)], prefix, OPTIONS, [str(planted.test_set)])
    prepare_dataset(task, workers=1, overwrite=False, show=QUIET)
    return prefix


def files(prefix: str) -> list[bytes]:
    return [Path(prefix + suffix).read_bytes() for suffix in SUFFIXES]


def report(prefix: str) -> dict:
    return json.loads(Path(prefix + ".report.json").read_text())


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
    assert found["duplicate_index"]["bytes_per_document"] == 304


def test_several_workers_give_the_same_files(planted, prefix, tmp_path):
    task = Task([str(planted.corpus)], str(tmp_path / "again"), OPTIONS, [str(planted.test_set)])
    prepare_dataset(task, workers=2, overwrite=False, show=QUIET)
    assert files(task.output) == files(prefix)
    different = {"output", "seconds", "throughput"}
    once, again = report(prefix), report(task.output)
    assert {key for key in once if once[key] != again[key]} <= different


@pytest.mark.parametrize("stage", ["clean-000001.npz", pytest.param("pairs.done", marks=pytest.mark.full)])
def test_killed_and_resumed(planted, prefix, tmp_path, stage):
    output = tmp_path / "killed"
    command = [sys.executable, "-m", "megajax", "prepare", planted.corpus, "--output", output, "--vocab-size", "400"]
    command += ["--decontaminate", planted.test_set, "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    work = Path(f"{output}.work")
    while not (work / stage).exists() and process.poll() is None:
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
    before = {file: file.stat().st_mtime_ns for file in work.iterdir() if file.suffix == ".npz"}
    assert before
    task = Task([str(planted.corpus)], str(output), OPTIONS, [str(planted.test_set)])
    found = prepare_dataset(task, workers=1, overwrite=False, show=QUIET)
    assert found["resumed"] and files(task.output) == files(prefix)
    assert {file.name for file in tmp_path.iterdir()} == {
        f"killed{s}" for s in (".bin", ".idx", ".tokenizer", ".report.json")
    }


def test_done_is_done(planted, prefix):
    task = Task([str(planted.corpus)], prefix, OPTIONS, [str(planted.test_set)])
    stamps = [Path(prefix + suffix).stat().st_mtime_ns for suffix in SUFFIXES]
    assert prepare_dataset(task, workers=1, overwrite=False, show=QUIET) == report(prefix)
    assert [Path(prefix + suffix).stat().st_mtime_ns for suffix in SUFFIXES] == stamps


@pytest.mark.full
def test_a_small_index_gives_the_same(planted, prefix, tmp_path, monkeypatch):
    """Sorted in many parts instead of at once."""
    monkeypatch.setattr("megajax.preparation.duplicates._ENTRIES", 100)
    monkeypatch.setattr("megajax.preparation.duplicates._PART", 64)
    monkeypatch.setattr("megajax.preparation.duplicates._CACHED_GRAMS", 1)
    task = Task([str(planted.corpus)], str(tmp_path / "small"), OPTIONS, [str(planted.test_set)])
    prepare_dataset(task, workers=1, overwrite=False, show=QUIET)
    assert files(task.output) == files(prefix)


def test_overlap_is_reported_without_dropping(planted, prefix, tmp_path):
    options = PrepareOptions(tokenizer=prefix + ".tokenizer", duplicates="keep", contaminated="report")
    task = Task([str(planted.corpus)], str(tmp_path / "kept"), options, [str(planted.test_set)])
    found = prepare_dataset(task, workers=1, overwrite=False, show=QUIET)
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
    assert IndexedDataset(task.output).num_documents == len(np.unique(np.arange(len(planted.texts))))
