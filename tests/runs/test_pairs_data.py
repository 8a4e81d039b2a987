"""The data of a run whose family reads pairs of segments, and what is refused to it and to one that reads text."""

import dataclasses
import itertools
import json

import pytest
from tiny import tiny_config

from megajax.batch import pairs_form
from megajax.config import Config
from megajax.data.config import DataConfig, Source, TokenizerConfig, ValidationSet
from megajax.data.encoding import split_sentences
from megajax.data.indexed import IndexedWriter
from megajax.data.pairs import TrainPairs
from megajax.data.tokenizers import load_tokenizer, train_tokenizer
from megajax.errors import UserError
from megajax.models.registry import FAMILIES, Entry
from megajax.runs.data import make_run_data, open_run_data

TEXTS = [" ".join(f"Word {n} has {k} and {n * k}." for k in range(1 + n % 7)) for n in range(60)]


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "pairs", Entry("nothing", samples="pairs", tokenizer="wordpiece"))


@pytest.fixture
def source(tmp_path) -> str:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(tmp_path / "a.jsonl")


def config_of(family: str = "pairs", tokenizer: str = "", length: int = 32, vocab_size: int = 150, **data) -> Config:
    data = DataConfig(**{"validation_fraction": 0.1} | data)
    config = tiny_config(family=family, sequence_length=length, vocab_size=vocab_size)
    return dataclasses.replace(config, data=data, tokenizer=TokenizerConfig(path=tokenizer))


def made(config: Config, folder):
    make_run_data(config, folder)
    return open_run_data(config, folder)


def test_text_becomes_pairs(source, tmp_path):
    """Cut in sentences, with a WordPiece vocabulary trained on it; later opened as it was made."""
    data = made(config_of(path=source), tmp_path / "data")
    assert isinstance(data.train, TrainPairs) and data.validation.form == pairs_form()
    report = data.corpora[0].report
    assert report.sentences == sum(len(split_sentences(text)) for text in TEXTS) > report.documents == 60
    assert report.single_sentence_documents == 9
    assert (tmp_path / "data" / "tokenizer" / "tokenizer.json").is_file()
    again = made(config_of(path=source), tmp_path / "data")
    assert all((again.train[5][name] == array).all() for name, array in data.train[5].items())


def test_blends_and_validation_sets(source, tmp_path):
    train_tokenizer(TEXTS, 150, "wordpiece").save(tmp_path / "given")
    sources = Source(path=source, weight=0.75), Source(path=source, weight=0.25)
    sets = (ValidationSet(name="all", path=source),)
    config = config_of(tokenizer=str(tmp_path / "given"), sources=sources, validation=sets)
    data = made(config, tmp_path / "data")
    assert data.train[3]["tokens"].shape == (32,)
    assert len(data.validation_sets["all"]) > len(data.validation) > 1
    assert data.validation_sets["all"].form == data.validation.form == pairs_form()


def prepared(prefix, tokenizer, sentences: bool, save: bool = True) -> str:
    with IndexedWriter(prefix, tokenizer.size) as writer:
        for text in TEXTS:
            parts = [tokenizer.encode(part) for part in split_sentences(text)]
            writer.add_document(*(parts if sentences else [list(itertools.chain.from_iterable(parts))]))
    if save:
        tokenizer.save(f"{prefix}.tokenizer")
    return str(prefix)


def test_prepared_datasets(tmp_path):
    """Megatron-LM's form for BERT is trained on as it is; that for GPT is refused, and the reverse."""
    pieces, bytes_ = train_tokenizer(TEXTS, 150, "wordpiece"), train_tokenizer(TEXTS, 280)
    cut, plain = prepared(tmp_path / "cut", pieces, True), prepared(tmp_path / "plain", pieces, False)
    assert made(config_of(path=cut), tmp_path / "a").corpora[0].report.sentences > 60
    with pytest.raises(
        UserError, match=r"--data\.path: every document of .*plain is one sequence; .*--split-sentences"
    ):
        make_run_data(config_of(path=plain), tmp_path / "b")
    with pytest.raises(UserError, match=r"--data\.path: the documents of .*cut are cut in sentences, which only BERT"):
        make_run_data(config_of("gpt2", path=cut), tmp_path / "b")
    made(config_of("gpt2", path=plain), tmp_path / "c")
    sources = (Source(path=plain, weight=1.0),)
    with pytest.raises(UserError, match=r"--data\.sources: every document of .*plain is one sequence"):
        make_run_data(config_of(sources=sources), tmp_path / "d")
    with pytest.raises(UserError, match=r"the tokenizer of .* has no \[CLS\] and no \[SEP\] .*; valid: a WordPiece"):
        make_run_data(
            config_of(path=prepared(tmp_path / "gpt", bytes_, True), vocab_size=280, length=16), tmp_path / "b"
        )
    with pytest.raises(UserError, match=r"--tokenizer\.path: the tokenizer of .* is missing, and words"):
        make_run_data(config_of(path=prepared(tmp_path / "none", pieces, True, save=False)), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_text_that_does_not_do(source, tmp_path):
    for length in 1, 4:
        with pytest.raises(UserError, match=rf"--model\.sequence-length {length}: too short .*; valid: 5 or more"):
            make_run_data(config_of(path=source, length=length), tmp_path / "b")
    (tmp_path / "single.jsonl").write_text('{"text": "One sentence."}\n' * 9)
    with pytest.raises(UserError, match=r"all 9 documents are of a single .*megajax prepare --split-sentences"):
        make_run_data(config_of(path=str(tmp_path / "single.jsonl")), tmp_path / "b")
    train_tokenizer(TEXTS, 280).save(tmp_path / "gpt")
    with pytest.raises(UserError, match=r"has no \[CLS\]"):
        make_run_data(config_of(path=source, tokenizer=str(tmp_path / "gpt"), vocab_size=280), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_data_of_a_run_of_another_family(source, tmp_path):
    """Is refused in one line where it is opened."""
    make_run_data(config_of("gpt2", path=source, vocab_size=280), tmp_path / "gpt")
    with pytest.raises(UserError, match=r"all 60 documents are of a single|has no \[CLS\]"):
        open_run_data(config_of(path=source, vocab_size=280), tmp_path / "gpt")
    assert load_tokenizer(tmp_path / "gpt" / "tokenizer").size <= 280
