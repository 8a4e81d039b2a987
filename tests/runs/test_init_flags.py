"""The weights of another model: the flags that a refusal names are flags, and make this the other's model."""

from pathlib import Path

import pytest
from tiny import LLAMA, QWEN3, tiny_config

from megajax.config import to_toml
from megajax.errors import UserError
from megajax.runs.init import check_init
from megajax.runs.ownership import mark
from megajax.settings.flags import parse

SIZES = {"vocab_multiple": 1024, "scan_layers": "auto"}  # as in the preset


@pytest.mark.parametrize("words", [LLAMA, QWEN3 | {"tied_embedding": False, "rope_theta": 12345.6789012}])
def test_all_that_differs_is_named_as_a_flag(words: dict, tmp_path: Path) -> None:
    """Also what no weight depends on, without which the same weights compute something else."""
    theirs = tiny_config(**SIZES | words)
    mark(tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(theirs))
    started = ["demo", "--init", str(tmp_path)]
    with pytest.raises(UserError) as refused:
        check_init(parse(started, "", ""))
    flags = str(refused.value).split("; valid: ")[1].removesuffix(", or another run").split()
    length = ["--model.sequence-length", str(theirs.model.sequence_length)]
    assert parse([*started, *flags, *length], "", "").model == theirs.model


def test_other_angles_are_no_refusal(tmp_path: Path) -> None:
    """They are told when the run begins (`first_state`)."""
    theirs = tiny_config(**LLAMA)
    mark(tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(theirs))
    (tmp_path / "checkpoints").mkdir()
    flags = ["--init", str(tmp_path), "--model.rope-theta", "500000", "--model.rope-factor", "2"]
    with pytest.raises(UserError, match="holds no checkpoint"):  # the model is not what is refused
        check_init(parse([str(tmp_path / "config.toml"), *flags], "", ""))
