"""The records of a fine-tuning run, and the tokenizer of the run that it begins with."""

import dataclasses
import json
from pathlib import Path

import pytest

from megajax.config import Config
from megajax.data.tokenizers import load_tokenizer
from megajax.errors import UserError
from megajax.runs.init import keep_init_tokenizer
from megajax.runs.task_data import make_task_data, open_task_data
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
    with pytest.raises(UserError, match=r"^--data\.train: none of its 1 records has an answer that is at its offset"):
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
    with pytest.raises(UserError, match=r"^--init .*bare has no tokenizer; valid: --tokenizer\.path with that of"):
        keep_init_tokenizer(other, tmp_path / "third")


def test_a_start_that_trained_nothing_decides_nothing(tmp_path: Path) -> None:
    """Neither records nor tokenizer: the next one may have other files, or begin with the weights of a run."""
    folder, questions, train = tmp_path / "data", squad(tmp_path, "squad", [4]), pairs(tmp_path)
    make_task_data(configuration("squad1", **{"data.train": [questions], "data.dev": [questions]}), folder)
    config = configuration("qqp", **{"data.train": [train], "data.dev": [train]})
    with pytest.raises(UserError, match=r"^--data\.train: other records than when the run began"):
        make_task_data(config, folder)
        open_task_data(config, folder)
    before = load_tokenizer(folder / "tokenizer")
    make_task_data(config, folder, again=True)
    assert open_task_data(config, folder).tokenizer != before
