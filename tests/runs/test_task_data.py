"""The data of a fine-tuning run and of one whose family reads pairs of segments; the tokenizer of the run that it
begins with; what is refused."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from tiny import tiny_config, user_error

from megajax.core.batch import pairs_form
from megajax.core.errors import UserError
from megajax.core.models.registry import FAMILIES, FamilyEntry
from megajax.data.config import DataConfig, Source, TokenizerConfig, ValidationSet
from megajax.data.samples.pairs import TrainPairs
from megajax.data.text.encoding import split_sentences
from megajax.data.text.indexed import IndexedWriter
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.runs.data import make_run_data, open_run_data
from megajax.runs.init import keep_init_tokenizer
from megajax.runs.task_data import make_task_data, open_task_data
from megajax.settings.config import Config
from megajax.settings.presets import resolve

CONTEXT = "the cat sat on the mat, and the dog sat there, too"


def squad(folder: Path, name: str, starts: list[int]) -> str:
    """A file of questions, whose answer "cat" is said to begin at these characters."""
    questions = [
        {"id": f"{name}-{start}-{n}", "question": "who?", "answers": [{"text": "cat", "answer_start": start}]}
        for n, start in enumerate(starts)
    ]
    path = folder / name
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": questions}]}]}))
    return str(path)


def pairs(folder: Path) -> str:
    rows = [f"{n}\tis it {n}?\tis that {n}?\t{n % 2}" for n in range(40)]
    path = folder / "train.tsv"
    path.write_text("\n".join(["id\tquestion1\tquestion2\tis_duplicate", *rows]) + "\n")
    return str(path)


def configuration(task: str, **values: object) -> Config:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "sequence_length": 32, "vocab_size": 300}
    preset = {"model.family": "bert", "task.name": task, "task.doc_stride": 4, "train.epochs": 1}
    preset |= {"train.global_batch": 2, "train.microbatch": 2, "optimizer.learning_rate": 1e-3}
    return resolve(preset | {f"model.{name}": size for name, size in sizes.items()} | values)


def test_the_first_record_may_be_one_that_is_not_trained_on(tmp_path: Path) -> None:
    train, dev = squad(tmp_path, "train", [9, 4, 4]), squad(tmp_path, "dev", [4])
    config = configuration("squad1", **{"data.train": [train], "data.dev": [dev]})
    make_task_data(config, tmp_path / "data")
    assert len(open_task_data(config, tmp_path / "data").train_samples) == 2
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=(squad(tmp_path, "no", [9]),)))
    make_task_data(config, tmp_path / "other")
    with pytest.raises(UserError, match=r"^--data\.train: none of its 1 records has an answer at its stated offset"):
        open_task_data(config, tmp_path / "other")


def test_all_seeds_hold_out_the_same_records_and_have_one_tokenizer(tmp_path: Path) -> None:
    held_out, tokenizers = [], []
    for seed in range(3):
        config = configuration("qqp", seed=seed, **{"data.train": [pairs(tmp_path)], "data.validation_fraction": 0.2})
        make_task_data(config, tmp_path / str(seed))
        data = open_task_data(config, tmp_path / str(seed))
        held_out.append([record.name for record in data.validation.records])
        tokenizers.append(data.tokenizer)
    assert held_out[0] and held_out[0] == held_out[1] == held_out[2]
    assert tokenizers[0] == tokenizers[1] == tokenizers[2]


def test_corpora_are_tokenized_as_the_run_of_init_has_it(tmp_path: Path) -> None:
    config = configuration("qqp", **{"data.train": [pairs(tmp_path)], "data.validation_fraction": 0.2})
    make_task_data(config, tmp_path / "run" / "data")
    values = {"init": str(tmp_path / "run"), "data.path": str(tmp_path / "text.txt"), "train.steps": 1}
    pretraining = configuration("pretraining", **values, **{"train.epochs": 0, "optimizer.decay_steps": 1})
    keep_init_tokenizer(pretraining, tmp_path / "new")
    kept = (tmp_path / "run" / "data" / "tokenizer" / "tokenizer.json").read_bytes()
    assert (tmp_path / "new" / "tokenizer" / "tokenizer.json").read_bytes() == kept
    keep_init_tokenizer(pretraining, tmp_path / "new")
    (tmp_path / "new" / "tokenizer" / "tokenizer.json").write_bytes(kept.replace(b'"##a"', b'"##~"'))
    with pytest.raises(UserError, match=r"^--init .*run: not the tokenizer in .*new; valid: another --run-dir$"):
        keep_init_tokenizer(pretraining, tmp_path / "new")
    (tmp_path / "bare").mkdir()
    other = dataclasses.replace(pretraining, init=str(tmp_path / "bare"))
    with pytest.raises(UserError, match=r"^--init .*bare has no tokenizer; valid: --tokenizer\.path with the"):
        keep_init_tokenizer(other, tmp_path / "third")


def test_a_start_that_trained_nothing_decides_nothing(tmp_path: Path) -> None:
    """Neither records nor tokenizer: the next one may have other files, or begin with the weights of a run."""
    folder, questions, train = tmp_path / "data", squad(tmp_path, "squad", [4]), pairs(tmp_path)
    make_task_data(configuration("squad1", **{"data.train": [questions], "data.dev": [questions]}), folder)
    config = configuration("qqp", **{"data.train": [train], "data.dev": [train]})
    with pytest.raises(UserError, match=r"^--data\.train: the records have changed since the run began"):
        make_task_data(config, folder)
        open_task_data(config, folder)
    before = load_tokenizer(folder / "tokenizer")
    make_task_data(config, folder, again=True)
    assert open_task_data(config, folder).tokenizer != before


@pytest.mark.parametrize("kind", ["train", "dev"])
def test_other_records_are_refused(kind: str, tmp_path: Path) -> None:
    """Of another label or text, fewer, or in another order."""
    for name in ("train", "dev"):
        (tmp_path / name).mkdir()
    config = configuration("qqp", **{f"data.{name}": [pairs(tmp_path / name)] for name in ("train", "dev")})
    make_task_data(config, tmp_path / "data")
    open_task_data(config, tmp_path / "data")
    header, first, second, *rows = (tmp_path / kind / "train.tsv").read_text().splitlines()
    label, text = f"{first[:-1]}{1 - int(first[-1])}", first.replace("it", "she")
    for changed in ([label, second, *rows], [text, second, *rows], [first, *rows], [second, first, *rows]):
        (tmp_path / kind / "train.tsv").write_text("\n".join([header, *changed]) + "\n")
        said = user_error(open_task_data, config, tmp_path / "data")
        assert said.startswith(f"--data.{kind}: the records have changed since the run began")


TEXTS = [" ".join(f"Word {n} has {k} and {n * k}." for k in range(1 + n % 7)) for n in range(60)]


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(FAMILIES, "pairs", FamilyEntry("nothing", samples="pairs", tokenizer="wordpiece"))


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
    pieces = train_tokenizer(TEXTS, 150, "wordpiece")
    cut, plain = prepared(tmp_path / "cut", pieces, True), prepared(tmp_path / "plain", pieces, False)
    assert made(config_of(path=cut), tmp_path / "a").corpora[0].report.sentences > 60
    with pytest.raises(UserError, match=r"--data\.path: every document of .*plain is a single sequence;"):
        make_run_data(config_of(path=plain), tmp_path / "b")
    with pytest.raises(UserError, match=r"--data\.path: the documents of .*cut are split into sentences, which only"):
        make_run_data(config_of("gpt2", path=cut), tmp_path / "b")
    made(config_of("gpt2", path=plain), tmp_path / "c")
    sources = (Source(path=plain, weight=1.0),)
    with pytest.raises(UserError, match=r"--data\.sources: every document of .*plain is a single sequence"):
        make_run_data(config_of(sources=sources), tmp_path / "d")
    with pytest.raises(UserError, match=r"--tokenizer\.path: the tokenizer of .* is missing, which whole-word"):
        make_run_data(config_of(path=prepared(tmp_path / "none", pieces, True, save=False)), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_text_that_does_not_do(source, tmp_path):
    for length in 1, 4:
        with pytest.raises(UserError, match=rf"--model\.sequence-length {length}: too short .*; valid: 5 or more"):
            make_run_data(config_of(path=source, length=length), tmp_path / "b")
    (tmp_path / "single.jsonl").write_text('{"text": "One sentence."}\n' * 9)
    with pytest.raises(UserError, match=r"all 9 documents are single .*megajax prepare --split-sentences"):
        make_run_data(config_of(path=str(tmp_path / "single.jsonl")), tmp_path / "b")
    train_tokenizer(TEXTS, 280).save(tmp_path / "gpt")
    with pytest.raises(UserError, match=r"has no \[CLS\]"):
        make_run_data(config_of(path=source, tokenizer=str(tmp_path / "gpt"), vocab_size=280), tmp_path / "b")
    assert not (tmp_path / "b").exists()
