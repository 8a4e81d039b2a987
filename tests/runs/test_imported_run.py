"""A run directory at step 0: nothing is trained yet, so more may change than later."""

import dataclasses
from pathlib import Path

import pytest
from tiny import tiny_config

from megajax.config import Config, to_toml
from megajax.data.config import DataConfig, TokenizerConfig
from megajax.data.indexed import IndexedWriter
from megajax.data.tokenizers import train_tokenizer
from megajax.errors import UserError
from megajax.evaluation.pretrained import evaluate_perplexity
from megajax.runs.directory import check_claim
from megajax.runs.ownership import mark


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What an import leaves behind, as far as it is looked at here."""
    run = tmp_path / "run"
    (run / "checkpoints" / "0").mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(tiny_config()))
    mark(run)
    return run


def with_data(path: object, tokenizer: object = "") -> Config:
    data, folder = DataConfig(path=str(path)), TokenizerConfig(path=str(tokenizer))
    return dataclasses.replace(tiny_config(global_batch=24), seed=3, data=data, tokenizer=folder)


def test_batch_and_seed_are_free_until_a_step_is_trained(run: Path) -> None:
    """The model is not, and after a step they are not either."""
    train_tokenizer(["text"], 280).save(run / "data" / "tokenizer")
    check_claim(run, with_data("text.txt"))
    with pytest.raises(UserError, match=r"model\.num_layers 4, not 5"):
        check_claim(run, dataclasses.replace(with_data("text.txt"), model=tiny_config(num_layers=5).model))
    (run / "checkpoints" / "5").mkdir()
    with pytest.raises(UserError, match="holds a run with seed 0, not 3"):
        check_claim(run, with_data("text.txt"))


def test_text_needs_the_tokenizer_of_the_weights(run: Path, tmp_path: Path) -> None:
    """Without one none is trained on the corpus: its ids would mean nothing to the weights. Tokens are taken."""
    with pytest.raises(UserError, match=r"--tokenizer\.path missing: .*valid: its folder, or a tokenized dataset"):
        check_claim(run, with_data("text.txt"))
    check_claim(run, with_data("text.txt", tokenizer="given"))
    with IndexedWriter(tmp_path / "tokens", 101) as writer:
        writer.add_document([1, 2, 3])
    check_claim(run, with_data(tmp_path / "tokens"))


def test_there_is_no_validation_split_yet(run: Path) -> None:
    with pytest.raises(UserError, match=r"--data missing: .* has no corpus yet"):
        evaluate_perplexity(run, step="latest", data="", overrides={})
