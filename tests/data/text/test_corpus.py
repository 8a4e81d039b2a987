"""From a source to a corpus in a run directory, and back again on resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.data.samples.making import make_corpus
from megajax.data.text.corpus import Corpus, evaluation_tokens, open_corpus
from megajax.data.text.indexed import IndexedWriter
from megajax.data.text.records import TextDocuments
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer

TEXTS = [f"Document {n}: " + " ".join(str(n * m) for m in range(50)) for n in range(40)]


@pytest.fixture
def source(tmp_path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    (folder / "latin.txt").write_bytes(b"\xe9")
    return str(folder)


@pytest.fixture
def small_tokenizer(tmp_path) -> str:
    train_tokenizer(TEXTS, 280).save(tmp_path / "given")
    return str(tmp_path / "given")


def texts_of(corpus: Corpus) -> list[str]:
    assert corpus.tokenizer is not None
    documents = [corpus.tokens.document(number).tolist() for number in range(corpus.tokens.num_documents)]
    assert all(ids[-1] == corpus.tokenizer.end_of_text for ids in documents)
    return [corpus.tokenizer.decode(ids[:-1]) for ids in documents]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_text_is_tokenized_with_a_trained_tokenizer(source, tmp_path):
    corpus = make_corpus(source, "", 400, tmp_path / "run")
    assert texts_of(corpus) == TEXTS
    assert corpus.tokenizer is not None and corpus.tokenizer.size <= 400
    report = corpus.report
    assert (report.documents, report.skipped_files) == (40, 1)
    assert report.text_bytes == sum(map(len, TEXTS))
    assert report.tokens == corpus.tokens.num_tokens
    assert report.tokenizer_seconds > 0 and report.encoding_seconds > 0
    files = {f"tokens.{end}" for end in ("bin", "idx", "digests")} | {"tokenizer/tokenizer.json"}
    found = content(tmp_path / "run")
    assert found.keys() == files | {"report.json"}
    assert texts_of(open_corpus(tmp_path / "run", 400)) == TEXTS
    make_corpus(source, "", 400, tmp_path / "again")
    assert all(content(tmp_path / "again")[name] == found[name] for name in files)


def test_a_given_tokenizer_is_used_and_copied(source, small_tokenizer, tmp_path):
    """A resumed run needs neither it nor the source."""
    message = r"--tokenizer\.path: the tokenizer in .*given has 280 ids; valid: at most --model\.vocab-size 279"
    with pytest.raises(UserError, match=message):
        make_corpus(source, small_tokenizer, 279, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert texts_of(make_corpus(source, small_tokenizer, 300, tmp_path / "run")) == TEXTS
    assert content(Path(small_tokenizer)) == content(tmp_path / "run" / "tokenizer")
    before = content(tmp_path / "run")
    shutil.rmtree(source)
    shutil.rmtree(small_tokenizer)
    assert texts_of(make_corpus(source, small_tokenizer, 300, tmp_path / "run")) == TEXTS
    assert content(tmp_path / "run") == before


def test_the_tokenizer_of_imported_weights(source, small_tokenizer, tmp_path):
    """One that lies in the folder already is used; another is refused, and nothing changes."""
    folder = tmp_path / "run"
    load_tokenizer(small_tokenizer).save(folder / "tokenizer")
    train_tokenizer(TEXTS[:3], 270).save(tmp_path / "other")
    before = content(folder)
    with pytest.raises(UserError, match=r"--tokenizer\.path .*other: not the tokenizer of the weights"):
        make_corpus(source, str(tmp_path / "other"), 300, folder)
    with pytest.raises(UserError, match=r"--data\.path"):
        make_corpus(str(tmp_path / "nothing"), "", 300, folder)
    assert content(folder) == before
    corpus = make_corpus(source, "", 300, folder)
    assert texts_of(corpus) == TEXTS and corpus.tokenizer == load_tokenizer(small_tokenizer)
    assert texts_of(make_corpus(source, "", 300, folder)) == TEXTS


def test_another_source_or_tokenizer_in_the_same_run_directory(source, small_tokenizer, tmp_path, monkeypatch):
    make_corpus(source, "", 300, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    make_corpus("texts", "", 300, tmp_path / "run")  # the same folder by another name
    with pytest.raises(UserError, match=r"--data\.path 'python-stdlib': .* was made from .*texts'; valid"):
        make_corpus("python-stdlib", "", 300, tmp_path / "run")
    with pytest.raises(UserError, match=r"--tokenizer\.path .*given': .* was made from ''"):
        make_corpus(source, small_tokenizer, 300, tmp_path / "run")


@pytest.fixture
def prefix(small_tokenizer, tmp_path) -> str:
    tokenizer = load_tokenizer(small_tokenizer)
    (tmp_path / "prepared").mkdir()
    with IndexedWriter(tmp_path / "prepared" / "corpus.v1", tokenizer.size) as writer:
        for text in TEXTS:
            writer.add_document([*tokenizer.encode(text), tokenizer.end_of_text])
    return str(tmp_path / "prepared" / "corpus.v1")


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_prepared_dataset_is_used_where_it_lies(prefix, small_tokenizer, tmp_path, suffix):
    """Later by any of its names; the tokenizer may lie beside it."""
    corpus = make_corpus(prefix + suffix, small_tokenizer, 300, tmp_path / "run")
    assert texts_of(corpus) == TEXTS
    assert corpus.tokens.name == prefix + ".bin"
    assert not list(tmp_path.glob("run/tokens*"))
    assert corpus.report.documents == 40
    for name in prefix, prefix + ".idx":
        assert texts_of(make_corpus(name, small_tokenizer, 300, tmp_path / "run")) == TEXTS
    assert make_corpus(prefix, "", 300, tmp_path / "without").tokenizer is None
    load_tokenizer(small_tokenizer).save(Path(prefix).parent)
    assert texts_of(make_corpus(prefix, "", 300, tmp_path / "with")) == TEXTS


def test_a_prepared_dataset_that_is_beyond_the_vocabulary_or_changed_or_half(prefix, tmp_path):
    beyond = r"corpus\.v1\.bin: token id \d+ at position \d+ .*--model\.vocab-size 270"
    with pytest.raises(UserError, match=beyond):
        make_corpus(prefix, "", 270, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    make_corpus(prefix, "", 280, tmp_path / "run")
    with pytest.raises(UserError, match=beyond):
        make_corpus(prefix, "", 270, tmp_path / "run")
    with IndexedWriter(prefix, 300) as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(UserError, match=r"corpus\.v1\.bin: missing, or changed since it was written"):
        make_corpus(prefix, "", 300, tmp_path / "run")
    Path(prefix + ".idx").unlink()
    for name in prefix, prefix + ".bin", prefix + ".idx":
        with pytest.raises(UserError, match=r"--data\.path: only one of .*\.bin and .*\.idx exists; valid: both"):
            make_corpus(name, "", 300, tmp_path / "new")


def test_damaged_report(source, tmp_path):
    make_corpus(source, "", 300, tmp_path / "run")
    message = r"report\.json: not the report of a corpus; valid: the file as it was, or no .*run"
    for bad in "", "{}", "[1]", '{"x": 1}':
        (tmp_path / "run" / "report.json").write_text(bad)
        with pytest.raises(UserError, match=message):
            make_corpus(source, "", 300, tmp_path / "run")


def test_an_error_or_a_kill_while_tokenizing(tmp_path, small_tokenizer, monkeypatch):
    """A process that dies at its worst moment leaves nothing that a later run would take for a corpus."""
    monkeypatch.setattr("megajax.data.text.encoding._BATCH_CHARACTERS", 1 << 12)
    lines = [json.dumps({"text": "word "})] * 1000 + ["broken"]  # more than one batch
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"a\.jsonl:1001"):
        make_corpus(str(tmp_path / "a.jsonl"), small_tokenizer, 300, tmp_path / "run")
    assert content(tmp_path / "run") == {}
    (tmp_path / "a.txt").write_text("some words\n\n" * 500)
    script = (
        "import os, signal, sys; from pathlib import Path; from megajax.data.samples.making import make_corpus\n"
        "Path.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
        "make_corpus(*sys.argv[1:3], 300, sys.argv[3])"
    )
    arguments = [str(tmp_path / "a.txt"), small_tokenizer, str(tmp_path / "run")]
    assert subprocess.run([sys.executable, "-c", script, *arguments]).returncode == -signal.SIGKILL
    assert content(tmp_path / "run.partial") and not (tmp_path / "run").exists()
    corpus = make_corpus(*arguments[:2], 300, arguments[2])
    assert "".join(texts_of(corpus)) == "some words\n\n" * 500
    assert not (tmp_path / "run.partial").exists()


def test_a_corpus_that_is_not_what_is_needed_is_not_kept(tmp_path, source, small_tokenizer):
    """Nor are the folders that were made for it."""

    def check(corpus):
        assert corpus.tokens.num_tokens > 0
        raise UserError("too short")

    with pytest.raises(UserError, match="too short"):
        make_corpus(source, small_tokenizer, 300, tmp_path / "new" / "run" / "data", check=check)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        make_corpus(source, "", 300, tmp_path / "file" / "run")


def test_large_corpus_trains_the_tokenizer_on_a_part(source, tmp_path, monkeypatch):
    used: list[str] = []

    def record(documents, vocab_size, kind):
        used.extend(documents)
        return train_tokenizer(used, vocab_size, kind)

    monkeypatch.setattr("megajax.data.samples.making.train_tokenizer", record)
    monkeypatch.setattr("megajax.data.text.tokenizers.TRAINING_BYTES", TextDocuments(source).size // 4)
    assert texts_of(make_corpus(source, "", 300, tmp_path / "run")) == TEXTS
    numbers = [TEXTS.index(text) for text in used]
    assert set(np.diff(numbers)) <= {4, 5}  # about a quarter, at even distances


def test_evaluation_of_any_text_and_of_a_prepared_dataset(prefix, small_tokenizer, tmp_path):
    tokenizer = load_tokenizer(small_tokenizer)
    text = "Document 1\n\n" * 1000
    (tmp_path / "a.txt").write_text(text)
    tokens = evaluation_tokens(str(tmp_path / "a.txt"), tokenizer, tokenizer.size)
    assert tokens.num_documents == 1 and tokens.tokens.dtype == np.int32
    assert tokenizer.decode(tokens.tokens) == text + "<|endoftext|>"
    assert evaluation_tokens(prefix, None, tokenizer.size).num_documents == 40
    with pytest.raises(UserError, match="beyond the vocabulary"):
        evaluation_tokens(prefix, None, 260)
    os.remove(prefix + ".bin")
    with pytest.raises(UserError, match=r"--data: only one of .* exists; valid: both"):
        evaluation_tokens(prefix, None, tokenizer.size)
    with pytest.raises(UserError, match=r"--data: .*nowhere does not exist"):
        evaluation_tokens("nowhere", tokenizer, tokenizer.size)
