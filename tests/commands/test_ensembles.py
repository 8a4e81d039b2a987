"""Several checkpoints are one: the mean of their probabilities."""

import json
import re
import shutil
from pathlib import Path

import pytest
from finetuning import Finetuning
from mistakes import one_line
from tiny import full


@pytest.mark.full
@pytest.mark.parametrize("task", ["mnli", "squad2"])
def test_of_a_run_with_itself(tuning: Finetuning, task: str, tmp_path: Path) -> None:
    """Gives the run's figures and answers, exactly."""
    run, data = tuning.run(task), ("--data", tuning.file(task, "dev"))
    one, three = (tuning.commands.evaluate(task, run, *others, *data) for others in ((), (run, run)))
    assert three.pop("step") == [one.pop("step")] * 3
    assert three == one
    assert tuning.predictions(task, tmp_path / "three", run, run, run) == tuning.predictions(task, tmp_path / "1", run)


@pytest.mark.parametrize("setting", [full("tokenizer"), "doc_stride = 4", "question_tokens = 3"])
@pytest.mark.slow
def test_spans_of_other_tokenizers_or_windows(tuning: Finetuning, tmp_path: Path, setting: str) -> None:
    """Of other tokenizers they are refused; other windows are refused, or cut as the first run's."""
    run, other = tuning.run("squad2"), shutil.copytree(tuning.run("squad2"), tmp_path / "other")
    file = other / ("data/tokenizer/tokenizer.json" if setting == "tokenizer" else "config.toml")
    text = file.read_text()
    if setting == "tokenizer":
        content = json.loads(text)
        ids = content["model"]["vocab"]
        first, second = list(ids)[-2:]
        ids[first], ids[second] = ids[second], ids[first]
        file.write_text(json.dumps(content))
    else:
        changed, count = re.subn(rf"^{setting.split()[0]} = .*", setting, text, flags=re.M)
        assert count == 1
        file.write_text(changed)
    data = ("--data", tuning.file("squad2", "dev"))
    done = tuning.commands.run("eval.py", "squad2", "--checkpoint", run, other, *data)
    if setting == "tokenizer" or done.code:
        said = ": another tokenizer, model.sequence_length" if setting == "tokenizer" else ""
        assert one_line(done).startswith(f"error: --checkpoint {other}{said}")
