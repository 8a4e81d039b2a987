"""The tokenizer of a run fits its model, or one line says why not."""

import pytest
from tiny import tiny_config

from megajax.data.tokenizers import train_tokenizer
from megajax.errors import UserError
from megajax.runs.trained import evaluation_config, run_tokenizer


def test_the_tokenizer_of_a_run(tmp_path):
    """Its ids are the model's, whose padding has no more of them."""
    with pytest.raises(UserError, match=r"^--checkpoint .* has no tokenizer for text; valid: a run with .*tokenizer$"):
        run_tokenizer(tmp_path, tiny_config())
    train_tokenizer(["ab ab"], 300).save(tmp_path / "data" / "tokenizer")
    assert run_tokenizer(tmp_path, tiny_config(vocab_size=258)).size == 258
    with pytest.raises(UserError, match=r"^--checkpoint .*: the tokenizer in .*tokenizer has 258 ids; .* 257$"):
        run_tokenizer(tmp_path, tiny_config(vocab_size=257))


def test_no_run(tmp_path):
    with pytest.raises(UserError, match=r"^--checkpoint .*no-run: no config\.toml there; valid: "):
        evaluation_config(tmp_path / "no-run", {})
