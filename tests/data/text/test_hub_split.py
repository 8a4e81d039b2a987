"""Datasets in the hub's format, `hf://…`, from a local folder; tokenizers by the hub's names, from a local cache."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megajax.core.errors import UserError
from megajax.data.samples.making import make_corpus
from megajax.data.text.corpus import open_corpus
from megajax.data.text.hub_split import HubSplit
from megajax.data.text.inputs import check_input, identity
from megajax.data.text.records import TextDocuments, TextFiles
from megajax.data.text.tokenizers import learn_byte_pair, named_tokenizer

pytestmark = pytest.mark.skipif(not find_spec("datasets"), reason="the extra `datasets` is not installed")

TEXTS = [f"Document {number} of the split, number {number * 7}." for number in range(12)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a cache of its own. `datasets`, which takes seconds to import, reads the variable when it is imported."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if "datasets" in sys.modules:
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of two splits, the first in two files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = tmp_path / "texts" / "data"
    data.mkdir(parents=True)
    numbers = list(range(6))
    for part, name in enumerate(("train-00000-of-00002", "train-00001-of-00002")):
        texts = TEXTS[6 * part : 6 * part + 6]
        pq.write_table(pa.table({"number": numbers, "text": texts}), data / f"{name}.parquet")
    other = pa.table({"number": [1, 2], "text": ["valid", None]})
    pq.write_table(other, data / "validation-00000-of-00001.parquet")
    return tmp_path / "texts"


@pytest.mark.full  # the package takes seconds to import
def test_the_rows_in_their_order(folder: Path) -> None:
    """An interrupted preparation goes on only with the same files, which are known."""
    assert list(TextDocuments(f"hf://{folder}")) == TEXTS
    documents = TextDocuments(f"hf://{folder}:validation")
    assert [place for place, _ in documents.placed()] == [f"hf://{folder}:validation:1"]  # the second has no text
    lines = [f'{{"title": "title {number}", "body": "body {number}"}}' for number in range(3)]
    (folder / "lines").mkdir()
    (folder / "lines" / "test.jsonl").write_text("\n".join(lines))
    assert list(TextDocuments(f"hf://{folder}/lines:test#title")) == ["title 0", "title 1", "title 2"]
    assert list(TextDocuments(f"hf://{folder}/lines:test", key="body")) == ["body 0", "body 1", "body 2"]
    first, second = (identity(TextFiles([f"hf://{folder}"], "INPUT").files[0]) for _ in range(2))
    (folder / "data" / "train-00001-of-00002.parquet").unlink()
    assert first == second != identity(TextFiles([f"hf://{folder}"], "INPUT").files[0])


@pytest.mark.full  # the package takes seconds to import
def test_a_corpus_of_it(folder: Path, tmp_path: Path) -> None:
    """It is read once: later starts find the tokens that were made, also where the dataset is gone."""
    corpus = make_corpus(f"hf://{folder}", "", 300, tmp_path / "run")
    tokenizer = corpus.tokenizer
    assert tokenizer is not None and corpus.report.source == f"hf://{folder}"
    assert corpus.tokens.num_documents == 12
    assert tokenizer.decode(corpus.tokens.document(3)[:-1]) == TEXTS[3]
    folder.rename(tmp_path / "elsewhere")
    again = make_corpus(f"hf://{folder}", "", 300, tmp_path / "run")
    assert again.tokens.num_tokens == corpus.tokens.num_tokens
    with pytest.raises(UserError, match=r"was made from 'hf://.*valid: that source, or a new --run-dir"):
        make_corpus(f"hf://{folder}:validation", "", 300, tmp_path / "run")


@pytest.mark.full  # the package takes seconds to import
def test_one_line_for_each_mistake(folder: Path) -> None:
    for url, problem in {
        "hf://": "hf://; valid: hf://NAME",
        f"hf://{folder}:train[:3]": "; valid: hf://NAME",
        "hf://a/b/c/d": "neither a folder nor the name of a dataset; valid",
        f"hf://{folder}:test": "Available splits: .*'validation'.*; valid",
        f"hf://{folder}#body": 'no column "body"; valid: #COLUMN with one of number, text',
        f"hf://{folder}#number": 'column "number" holds int; valid: #COLUMN with text',
        "hf://some-body/some-texts": "the dataset cannot be opened: .*; valid",
    }.items():
        with pytest.raises(UserError, match=problem) as raised:
            list(TextDocuments(url, flag="--data.path"))
        assert str(raised.value).startswith("--data.path hf://") and "\n" not in str(raised.value)


def test_names_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, parts in {
        "hf://allenai/c4/en:validation#text": ("allenai/c4", "en", "validation", "text"),
        "hf://imdb": ("imdb", "", "train", ""),
    }.items():
        split = HubSplit.parse(url, "--data.path")
        assert (split.name, split.configuration, split.split, split.column) == parts
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"datasets is not installed; valid: pip install 'megajax\[datasets\]'"):
        check_input("hf://imdb", "--data.path")


def test_a_tokenizer_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = learn_byte_pair(TEXTS, 270, "")
    model = tmp_path / "cache" / "models--some-body--some-model"  # as the hub's library leaves what it has downloaded
    tokenizer.save(model / "snapshots" / "0123456789abcdef")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123456789abcdef")
    assert named_tokenizer("some-body/some-model") == tokenizer
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXTS))
    corpus = make_corpus(str(text), "some-body/some-model", 300, tmp_path / "run")
    assert (corpus.tokenizer, corpus.report.tokenizer_source) == (tokenizer, "some-body/some-model")
    again = make_corpus(str(text), "some-body/some-model", 300, tmp_path / "run")
    assert again.tokenizer == open_corpus(tmp_path / "run", 300).tokenizer
    other = learn_byte_pair(TEXTS, 262, "")
    other.save(tmp_path / "some-body" / "some-model")
    monkeypatch.chdir(tmp_path)
    assert named_tokenizer("some-body/some-model") == other  # a local folder wins


def test_a_tokenizer_that_the_hub_does_not_give(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--tokenizer.path: no/such is not a folder, and it cannot be read from the"):
        named_tokenizer("no/such")
    (tmp_path / "cache" / "models--em--pty" / "snapshots" / "0").mkdir(parents=True)
    (tmp_path / "cache" / "models--em--pty" / "refs").mkdir()
    (tmp_path / "cache" / "models--em--pty" / "refs" / "main").write_text("0")
    with pytest.raises(UserError, match="the model em/pty of the Hugging Face hub has no tokenizer"):
        named_tokenizer("em/pty")
    with pytest.raises(UserError, match=r"a/b/c is not a folder; valid: .*, or a model of the hub"):
        named_tokenizer("a/b/c")
