"""The tokenizer of a model in the library: that of its weights, whatever it is trained on afterwards."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_config

import megajax
from megajax.config import Config
from megajax.data.tokenizers import load_tokenizer, train_tokenizer
from megajax.library import beginning
from megajax.models.config import LoraConfig

TEXT = "\n\n".join(f"The quick brown fox jumps over {number} lazy dogs." for number in range(60))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run keeps beside its weights. These are none: they are restored in tests/commands/test_init.py."""
    run = tmp_path / "run"
    train_tokenizer(["sphinx of black quartz, judge my vow " * 20], 280, "bpe").save(run / "data" / "tokenizer")
    monkeypatch.setattr(beginning, "check_first_weights", lambda config: None)
    monkeypatch.setattr(beginning, "first_state", lambda program: ({}, ""))
    return run


def config_of(tmp_path: Path, **others: object) -> Config:
    (tmp_path / "text.txt").write_text(TEXT)
    config = tiny_config(num_layers=1, vocab_size=300, global_batch=1)
    data = dataclasses.replace(config.data, path=str(tmp_path / "text.txt"))
    return dataclasses.replace(config, data=data, **others)


def test_of_the_run_whose_weights_a_model_begins_with(run: Path, tmp_path: Path) -> None:
    """Its data is tokenized with that as well, and with no other."""
    theirs, config = load_tokenizer(run / "data" / "tokenizer"), config_of(tmp_path, init=str(run))
    model = megajax.init(config)
    assert model.tokenizer == theirs
    batch = next(model.batches(tmp_path / "tokens"))
    assert model.tokenizer == theirs == load_tokenizer(tmp_path / "tokens" / "tokenizer")
    assert theirs.decode(np.ravel(batch["tokens"])) in f"{TEXT}<|endoftext|>{TEXT}"
    next(model.batches(tmp_path / "tokens"))  # found as it was made
    train_tokenizer([TEXT], 290, "bpe").save(tmp_path / "other")
    config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=str(tmp_path / "other")))
    with pytest.raises(megajax.UserError, match=r"other: not the tokenizer of --init .*run; valid: that, or none"):
        megajax.init(config)
    model.tokenizer = load_tokenizer(tmp_path / "other")
    with pytest.raises(megajax.UserError, match=r"tokenizer of the model: not the tokenizer in .*; valid: another fol"):
        model.batches(tmp_path / "tokens")


def test_a_run_without_one(run: Path, tmp_path: Path) -> None:
    model = megajax.init(config_of(tmp_path, init=str(tmp_path / "none")))
    assert model.tokenizer is None
    with pytest.raises(megajax.UserError, match=r"--init .*none has no tokenizer; valid: --tokenizer\.path"):
        model.batches(tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


def test_adapters_of_fresh_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(megajax.UserError, match=r"--lora.rank 2 without --init: .*; valid: --init"):
        megajax.init(config_of(tmp_path, lora=LoraConfig(rank=2)))
