"""Mistakes in fine-tuning: exit code 2, one line that names the flag and what is valid, nothing half-written."""

import json
from pathlib import Path

import pytest
from finetuning import MODEL, PRESET, Finetuning
from mistakes import assert_says, one_line, redundant
from processes import Commands, Run, contents

NAMES = "pretraining, mnli, qqp, squad1, squad2, race"
ANY_TASK = "--task.name mnli or qqp or squad1 or squad2 or race"
PRETRAINING = ("--task.name", "pretraining", "--train.epochs", 0, "--train.steps", 2, "--optimizer.decay-steps", 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.path", "x.txt"), [r"--data\.path with --task\.name mnli; valid: --data\.train and --data\.dev"]),
        (("--task.name", "cola"), [r"--task\.name 'cola'", NAMES]),
        (("--task.name", "squad"), [r"--task\.name 'squad'", NAMES, "did you mean"]),
        (("--model.head", "span"), [r"--model\.head span with --task\.name mnli; valid: classes"]),
        (("--model.num-classes", 2), [r"--model\.num-classes 2 with --task\.name mnli; valid: 3"]),
        (("--train.epochs", 0), [r"--train\.steps 0", r"--train\.epochs"]),
        (("--train.epochs", -1), [r"--train\.epochs -1", "valid: 0 to"]),
        (("--optimizer.warmup-steps", 3), [r"--optimizer\.warmup-steps and --optimizer\.warmup-fraction are both"]),
        (("--model.vocab-size", 40), [r"--model\.vocab-size 40", "valid: 100 or more"]),
        (("--model.sequence-length", 4), [r"--model\.sequence-length 4", "valid: 5 or more"]),
        (("--data.train", "no.tsv"), [r"--data\.train: no\.tsv does not exist", "valid: a file of mnli"]),
        (("--data.dev", "no.tsv"), [r"--data\.dev: no\.tsv does not exist", "valid: a file of mnli"]),
        (("--data.train",), [r"--data\.train needs a value"]),
        redundant(("--model.head", "nothing"), [r"--model\.head 'nothing'", "pretraining, classes, span, choice"]),
        redundant(("--task.doc-stride", 0), [r"--task\.doc-stride 0", "valid: 1 to"]),
        redundant(("--task.n-best", "x"), [r"--task\.n-best", "valid: a whole number"]),
        redundant(("--optimizer.warmup-fraction", 1), [r"--optimizer\.warmup-fraction 1", "less than 1"]),
        redundant(("--data.validation-fraction", 1), [r"--data\.validation-fraction 1", "less than 1"]),
        redundant(("--mesh.data", 2, "--simulate-devices", 2, "--train.microbatch", 8), [r"--train\.global-batch 8"]),
    ],
)
def test_flags_of_training(tuning: Finetuning, tmp_path: Path, flags: tuple, words: list[str]) -> None:
    assert_says(one_line(tuning.start("mnli", tmp_path / "run", *flags)), *words)
    assert not list(tmp_path.iterdir())


def test_a_task_of_gpt2(tuning: Finetuning, tmp_path: Path) -> None:
    line = one_line(tuning.start("mnli", tmp_path / "run", "--model.family", "gpt2"))
    assert not (tmp_path / "run").exists()
    assert_says(line, r"--task\.name mnli", r"--model\.family decoder", r"valid: .*bert")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.train", "x.tsv"), [r"--data\.train without a task", ANY_TASK]),
        (("--data.dev", "x.tsv"), [r"--data\.dev without a task", ANY_TASK]),
        (("--train.epochs", 2), [r"--train\.epochs without a task", ANY_TASK]),
        (("--seeds", 2), ["--seeds without a task", ANY_TASK]),
        (("--model.head", "classes"), [r"--model\.head classes without a task", ANY_TASK]),
        ((), [r"--data\.path missing"]),
    ],
)
def test_flags_of_tasks_in_pretraining(commands: Commands, tmp_path: Path, flags: tuple, words: list[str]) -> None:
    size = (*MODEL, "--train.microbatch", 2, *PRETRAINING)
    done = commands.run("train.py", PRESET, "--run-dir", tmp_path / "run", *size, *flags)
    assert_says(one_line(done), *words)
    assert not list(tmp_path.iterdir())


def test_no_files_at_all(tuning: Finetuning, tmp_path: Path) -> None:
    done = tuning.commands.run("train.py", PRESET, "--run-dir", tmp_path / "run")
    assert_says(one_line(done), r"--data\.train missing", r"valid: files of --task\.name qqp")
    assert not list(tmp_path.iterdir())


OTHERS = [("mnli", "qqp"), ("mnli", "squad1"), ("squad2", "race"), ("race", "squad1"), ("qqp", "mnli")]


@pytest.mark.parametrize(("task", "given"), OTHERS)
@pytest.mark.parametrize("flag", ["--data.train", "--data.dev"])
def test_the_files_of_another_task(tuning: Finetuning, tmp_path: Path, task: str, given: str, flag: str) -> None:
    """The line says of which one."""
    line = one_line(tuning.start(task, tmp_path / "run", flag, tuning.file(given, "dev")))
    assert_says(line, f"{flag}: ", f"looks like a file of .*{given}.*, not of .*{task}", "valid: ")
    assert not list(tmp_path.iterdir())


def test_squad2_for_squad1(tuning: Finetuning, tmp_path: Path) -> None:
    """What cannot be told from its beginning is told by the first question without an answer; its number and id."""
    line = one_line(tuning.start("squad1", tmp_path / "run", "--data.train", tuning.file("squad2", "train")))
    assert_says(line, r"--data\.train: .*question \d+ \(id q\d+\)", "squad2", "valid: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--data.train", "--data.dev"])
@pytest.mark.parametrize("task", ["mnli", "squad2", "race"])
def test_a_file_that_ends_in_the_middle(tuning: Finetuning, tmp_path: Path, task: str, flag: str) -> None:
    """As an interrupted download."""
    content = tuning.file(task, "dev").read_bytes()
    file = tmp_path / tuning.file(task, "dev").name
    file.write_bytes(content[: len(content) * 2 // 3])
    line = one_line(tuning.start(task, tmp_path / "run", flag, file))
    assert_says(line, f"{flag}: {file}", "ends in the middle|truncated", "valid: ")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_an_unknown_label(tuning: Finetuning, tmp_path: Path) -> None:
    header, *rows = tuning.file("mnli", "dev").read_text().splitlines()
    rows[6] = rows[6].rsplit("\t", 1)[0] + "\tmaybe"
    file = tmp_path / "dev.tsv"
    file.write_text("\n".join([header, *rows]) + "\n")
    line = one_line(tuning.start("mnli", tmp_path / "run", "--data.dev", file))
    assert_says(line, f"--data.dev: {file}:8", 'label "maybe"', "valid: entailment, neutral, contradiction")
    assert not (tmp_path / "run").exists()


def test_an_answer_that_is_not_at_its_offset(tuning: Finetuning, tmp_path: Path) -> None:
    """Counted and named; --task.strict stops at it."""
    value = json.loads(tuning.file("squad2", "dev").read_text())
    questions = [question for paragraph in value["data"][0]["paragraphs"] for question in paragraph["qas"]]
    moved = next(question for question in questions if question["answers"])
    moved["answers"][0]["answer_start"] += 1
    file = tmp_path / "dev.json"
    file.write_text(json.dumps(value))
    place = f"question {questions.index(moved) + 1} .id {moved['id']}"
    run = tuning.run("squad2")
    done = tuning.commands.run("eval.py", "squad2", "--checkpoint", run, "--data", file)
    assert done.code == 0
    assert_says(done.out, f"1 answers that are not at their offset.*, first --data: {file}: {place}")
    line = one_line(tuning.commands.run("eval.py", "squad2", "--checkpoint", run, "--data", file, "--task.strict"))
    assert_says(line, f"--data: {file}: {place}", "not at their offset", "valid: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("qqp", "--checkpoint", "RUN", "--data", "QQP"), ["--checkpoint RUN: a run of mnli", "fine-tuned on qqp"]),
        (("race", "--checkpoint", "RUN"), ["--checkpoint RUN: a run of mnli", "valid: a run .* race"]),
        (("mnli", "--checkpoint", "GPT", "--data", "DEV"), ["--checkpoint GPT", "fine-tuned on mnli"]),
        (("mnli", "--checkpoint", "RUN", "GPT", "--data", "DEV"), ["--checkpoint GPT", "fine-tuned on mnli"]),
        (("mnli", "--checkpoint", "RUN", "NONE", "--data", "DEV"), [r"--checkpoint NONE: no config\.toml"]),
        (("mnli", "--checkpoint", "RUN", "--data", "QQP"), ["--data: QQP looks like a file of qqp, not of mnli"]),
        (("mnli", "--checkpoint", "RUN", "--data", "NONE"), ["--data: NONE does not exist", "valid: a file of mnli"]),
        (("mnli", "--checkpoint", "RUN", "--step", 3), ["--step 3; valid: latest, best, or one of"]),
        (("mnli", "--checkpoint", "RUN", "--overlap", 3), ["--overlap: mnli does not take it", "valid: "]),
        (("mnli", "--checkpoint", "RUN", "--predictions", "DEV"), ["--predictions DEV is there already", "valid: "]),
        (("mnli", "--checkpoint", "RUN", "--data", "DEV", "DEV"), ["--data: DEV is named twice", "valid: "]),
        (("mnli",), ["--checkpoint"]),
        (("cola", "--checkpoint", "RUN"), ["TASK 'cola'; valid: .*mnli.*qqp.*race.*squad1.*squad2"]),
        (("perplexity", "--checkpoint", "RUN"), ["--checkpoint RUN: a run of mnli", "valid: megajax eval mnli"]),
        (("lambada", "--checkpoint", "RUN", "--data", "DEV"), ["--checkpoint RUN", "valid: "]),
        (("perplexity", "--checkpoint", "GPT", "GPT"), ["--checkpoint: 2 paths", "valid: one"]),
        (("perplexity", "--checkpoint", "GPT", "--predictions", "x"), ["--predictions is not for perplexity", "mnli"]),
        (("perplexity", "--checkpoint", "GPT", "--task.n-best", 3), [r"--task\.n-best is not for perplexity", "mnli"]),
    ],
)
def test_mistakes_in_evaluating(
    tuning: Finetuning, straight: Run, tmp_path: Path, arguments: tuple, words: list[str]
) -> None:
    """GPT is a run of GPT-2."""
    run = tuning.run("mnli")
    places = {"RUN": run, "GPT": straight.folder, "NONE": tmp_path / "none"}
    places |= {"DEV": tuning.file("mnli", "dev"), "QQP": tuning.file("qqp", "dev")}
    before = contents(run)
    line = one_line(tuning.commands.run("eval.py", *(places.get(argument, argument) for argument in arguments)))
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    assert_says(line, *words)
    assert contents(run) == before and not list(tmp_path.iterdir())


def test_predictions_of_records_that_have_one_name(tuning: Finetuning, tmp_path: Path) -> None:
    """As those of MNLI's two dev files have: refused before anything is computed."""
    again = tmp_path / "again.tsv"
    again.write_bytes(tuning.file("mnli", "dev").read_bytes())
    file, data = tmp_path / "predictions.tsv", (tuning.file("mnli", "dev"), again)
    run = tuning.run("mnli")
    done = tuning.commands.run("eval.py", "mnli", "--checkpoint", run, "--data", *data, "--predictions", file)
    assert_says(one_line(done), "--predictions: two records have the name", "valid: ")
    assert not file.exists()


def test_predictions_need_no_labels(tuning: Finetuning, tmp_path: Path) -> None:
    """Of a test set, as GLUE's have no labels."""
    rows = [line.rsplit("\t", 1)[0] for line in tuning.file("mnli", "dev").read_text().splitlines()]
    data, file = tmp_path / "test.tsv", tmp_path / "predictions.tsv"
    data.write_text("\n".join(rows) + "\n")
    run, labelled = tuning.run("mnli"), tmp_path / "labelled.tsv"
    found = tuning.commands.evaluate("mnli", run, "--data", data, "--predictions", file)
    assert found["accuracy"] is None and found["records"] == 0
    assert file.read_bytes() == tuning.predictions("mnli", labelled, run)
    line = one_line(tuning.commands.run("eval.py", "mnli", "--checkpoint", run, "--data", data))
    assert_says(line, f"--data: {data} has no column gold_label", "valid: ")


@pytest.mark.parametrize(
    ("key", "flags"),
    [
        ("task.name", ("--task.name", "qqp")),
        ("train.global_batch", ("--train.global-batch", 4)),
        ("seed", ("--seed", 3)),
        ("task.option_tokens", ("--task.option-tokens", 3)),
        redundant("model.num_layers", ("--model.num-layers", 2)),
        redundant("task.doc_stride", ("--task.doc-stride", 3)),
    ],
)
def test_a_run_of_something_else(tuning: Finetuning, key: str, flags: tuple) -> None:
    """The directory of a run that was trained otherwise is refused and untouched."""
    run = tuning.run("mnli")
    before = contents(run)
    task = flags[1] if key == "task.name" else "mnli"
    line = one_line(tuning.start(str(task), run, *(flags if key != "task.name" else ())))
    assert_says(line, f"--run-dir {run} holds a run with ({key}|model.num_classes) ", "valid: the same")
    assert contents(run) == before
