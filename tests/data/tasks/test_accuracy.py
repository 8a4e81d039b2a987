"""Accuracy by group, and what is written of predictions."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from real_records import read

from megajax.core.errors import UserError
from megajax.data.tasks.figures import check_predictions, class_figures, predicted_classes, write_predictions
from megajax.data.tasks.records import Exam, Pair, Question
from megajax.data.tasks.registry import TASKS

HOT = np.eye(3)


def pair(name: int, label: int | None, group: str = "") -> Pair:
    return Pair(str(name), ("a", "b"), label, group)


def exam(options: int, label: int | None, group: str = "") -> Exam:
    return Exam(f"e#{options}{group}", "a", "q", tuple("abcd"[:options]), label, group)


def test_accuracy_of_all_and_of_every_group() -> None:
    labels = [(0, "matched"), (1, "matched"), (2, "mismatched"), (None, "mismatched"), (2, "")]
    records = [pair(n, label, group) for n, (label, group) in enumerate(labels)]
    expected = {"accuracy": 75.0, "accuracy_matched": 50.0, "accuracy_mismatched": 100.0, "records": 4}
    assert class_figures(records, HOT[[0, 2, 2, 0, 2]]) == expected
    assert class_figures(records[4:], HOT[[1]]) == {"accuracy": 0.0, "records": 1}
    nothing = class_figures(records[3:4], HOT[[1]])
    assert math.isnan(nothing.pop("accuracy")) and nothing == {"records": 0}
    assert math.isnan(class_figures([], np.zeros((0, 2)))["accuracy"])


def test_an_option_that_is_not_there_is_not_chosen() -> None:
    probabilities_NC = np.array([[0.1, 0.2, 0.3, 0.4], [0.1, 0.3, 0.4, 0.2], [0.1, 0.3, 0.3, 0.3]], np.float32)
    records = [exam(2, 1, "high"), exam(3, 2, "high"), exam(4, 2, "middle")]
    assert predicted_classes(records, probabilities_NC).tolist() == [1, 2, 1]
    expected = {"accuracy": 200 / 3, "accuracy_high": 100.0, "accuracy_middle": 0.0, "records": 3}
    assert class_figures(records, probabilities_NC) == expected


def test_predictions_as_scorers_read_them(tmp_path: Path) -> None:
    pairs, exams = [pair(7, None), pair(9, 0)], [exam(4, 0), exam(3, None)]
    questions = [Question("q1", "Who?", "c", ()), Question('q"2', "Who?", "c", ())]
    written = {
        "mnli": (pairs, [0, np.int64(2)], "index\tprediction\n7\tentailment\n9\tcontradiction\n"),
        "qqp": (pairs, [0, 1], "index\tprediction\n7\t0\n9\t1\n"),
        "race": (exams, [3, 1], "id\tanswer\ne#4\tD\ne#3\tB\n"),
        "squad1": (questions, ["É", ""], '{\n    "q1": "\\u00c9",\n    "q\\"2": ""\n}\n'),
        "squad2": (questions, ["a\tb", ""], '{\n    "q1": "a\\tb",\n    "q\\"2": ""\n}\n'),
    }
    answered = [name for name, task in TASKS.items() if not task.continues_text]
    assert sorted(written) == sorted(answered)
    for task, (records, found, text) in written.items():
        path = tmp_path / "new" / task
        write_predictions(str(path), task, records, found)
        assert path.read_text() == text
    assert json.loads((tmp_path / "new" / "squad1").read_text()) == {"q1": "É", 'q"2': ""}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(answered)


def test_predictions_replace_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("mine", "link", "."):
        with pytest.raises(UserError, match=r"^--predictions .* already exists; valid: a new name$"):
            write_predictions(str(tmp_path / name), "qqp", [pair(1, 0)], [0])
    assert (tmp_path / "mine").read_text() == "kept"
    with pytest.raises(UserError, match="mine is not a folder; valid: "):
        check_predictions(str(tmp_path / "mine" / "p"), [])


def test_names_that_scorers_cannot_tell_apart(test_data: Path, tmp_path: Path) -> None:
    """MNLI's matched and mismatched pairs are numbered alike."""
    records = read("mnli", *(test_data / f"glue/MNLI/dev_{name}.tsv" for name in ("matched", "mismatched"))).entries
    with pytest.raises(UserError, match=r"^--predictions: two records have the name [0-9]+; valid: .* of one file$"):
        check_predictions(str(tmp_path / "p"), records)
    check_predictions(str(tmp_path / "p"), records[:1000])
