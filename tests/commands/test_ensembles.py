"""Several checkpoints are one: the mean of their probabilities."""

import json
import shutil
from pathlib import Path

import pytest
from finetuning import Finetuning, assert_same_figures
from mistakes import one_line
from processes import Finished
from tiny import full


def evaluate(tuning: Finetuning, task: str, *runs: Path) -> Finished:
    """eval.py of several runs on the dev file."""
    return tuning.commands.run("eval.py", task, "--checkpoint", *runs, "--data", tuning.file(task, "dev"))


@pytest.mark.parametrize("task", [*map(full, ["mnli", "qqp", "squad1", "race"]), "squad2"])
def test_of_a_run_with_itself(tuning: Finetuning, task: str, tmp_path: Path) -> None:
    """Gives the run's figures and answers, exactly."""
    run, data = tuning.run(task), ("--data", tuning.file(task, "dev"))
    one, three = (tuning.commands.evaluate(task, run, *others, *data) for others in ((), (run, run)))
    assert three.pop("step") == [one.pop("step")] * 3
    assert three == one
    assert tuning.predictions(task, tmp_path / "three", run, run, run) == tuning.predictions(task, tmp_path / "1", run)


@pytest.mark.parametrize("task", ["mnli", full("squad2"), full("race")])
def test_the_order_of_runs_does_not_matter(tuning: Finetuning, task: str, tmp_path: Path) -> None:
    """Also where every run has a tokenizer of its own, of pairs and exams."""
    other, run = tmp_path / "other", tuning.run(task)
    words = () if task == "squad2" else ("--data.train", tuning.file(task, "other"))
    tuning.train(task, other, *words, "--train.steps", 2)
    vocabularies = [(folder / "data" / "tokenizer" / "tokenizer.json").read_text() for folder in (run, other)]
    assert (vocabularies[0] != vocabularies[1]) == (task != "squad2")
    assert_same_figures(tuning.figures(task, run, other), tuning.figures(task, other, run))
    one = tuning.predictions(task, tmp_path / "one", run, other)
    assert one == tuning.predictions(task, tmp_path / "two", other, run)


def test_spans_of_other_tokenizers_are_refused(tuning: Finetuning, tmp_path: Path) -> None:
    other = shutil.copytree(tuning.run("squad2"), tmp_path / "other")
    vocabulary = other / "data" / "tokenizer" / "tokenizer.json"
    content = json.loads(vocabulary.read_text())
    ids = content["model"]["vocab"]
    first, second = list(ids)[-2:]
    ids[first], ids[second] = ids[second], ids[first]
    vocabulary.write_text(json.dumps(content))
    line = one_line(evaluate(tuning, "squad2", tuning.run("squad2"), other))
    assert f"--checkpoint {other}: another tokenizer, model.sequence_length" in line


@pytest.mark.parametrize("setting", ["doc_stride = 4", "question_tokens = 3"])
def test_spans_of_other_windows_are_refused_or_cut_as_the_first_runs(
    tuning: Finetuning, tmp_path: Path, setting: str
) -> None:
    """Runs that were trained with another stride have no windows in common."""
    other = shutil.copytree(tuning.run("squad2"), tmp_path / "other")
    preset, name = other / "config.toml", setting.split()[0]
    old = next(line for line in preset.read_text().splitlines() if line.startswith(name))
    preset.write_text(preset.read_text().replace(old, setting))
    done = evaluate(tuning, "squad2", tuning.run("squad2"), other)
    assert done.code == 0 or one_line(done).startswith(f"error: --checkpoint {other}"), done.err
