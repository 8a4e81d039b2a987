"""Mistakes in fine-tuning: exit code 2, one line that names the flag and what is valid, nothing half-written."""

import json
import shutil
from pathlib import Path

import pytest
from finetuning import MODEL, PRESET, SIZE, STEPS, Finetuning
from golden import OF_MNLI
from made_up_tasks import SUFFIXES
from mistakes import assert_refused, assert_says, by_line, golden, one_line
from processes import Run, made_once

FOREIGN = ["{}", '{"kind": "others"}', "not JSON", ""]  # in place of the report of several seeds


@pytest.fixture(scope="session")
def files(tuning: Finetuning) -> Path:
    """A folder with train and dev of every task, some of their mistakes, and folders of something else."""
    folder = tuning.folder / "files"

    def make() -> None:
        folder.mkdir()
        for task, suffix in SUFFIXES.items():
            train, dev = (tuning.file(task, kind).read_bytes() for kind in ("train", "dev"))
            (folder / f"{task}-train{suffix}").write_bytes(train)
            (folder / f"{task}-dev{suffix}").write_bytes(dev)
        header, *rows = (folder / "mnli-dev.tsv").read_text().splitlines()
        rows[6] = rows[6].rsplit("\t", 1)[0] + "\tmaybe"
        (folder / "maybe.tsv").write_text("\n".join([header, *rows]) + "\n")
        (folder / "again.tsv").write_bytes((folder / "mnli-dev.tsv").read_bytes())
        for number, content in enumerate(FOREIGN):
            (folder / f"foreign{number}").mkdir()
            (folder / f"foreign{number}" / "seeds.json").write_text(content)
        (folder / "thesis").mkdir()
        (folder / "thesis" / "thesis.txt").write_text("precious")

    made_once(folder, make)
    return folder


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory, tuning: Finetuning, straight: Run, files: Path) -> dict[str, Path]:
    """TUNED is a run of mnli, SEEDS one of a seed, BERT a pretrained one, BARE it without a checkpoint, all of which no
    other worker of pytest locks; GPT one of GPT-2; FILES the folder of files."""
    folder = tmp_path_factory.mktemp("runs")
    names = {"TUNED": tuning.run("mnli"), "BERT": tuning.pretrained(), "BARE": tuning.pretrained()}
    names = {name: shutil.copytree(run, folder / name) for name, run in names.items()}
    shutil.rmtree(names["BARE"] / "checkpoints")
    tuning.finish_seeds(folder / "SEEDS", {0: 50.0})
    own = shutil.copytree(files, folder / "files")  # other workers write to theirs
    return names | {"SEEDS": folder / "SEEDS", "GPT": straight.folder, "FILES": own}


def tune(task: str) -> str:
    data = (f"--data.{kind} FILES/{task}-{kind}{SUFFIXES[task]}" for kind in ("train", "dev"))
    return " ".join([f"train.py {PRESET} --run-dir FILES/new --task.name {task}", *map(str, SIZE), *data])


MNLI = tune("mnli")
PRETRAIN = f"train.py {PRESET} --run-dir FILES/new {' '.join(map(str, MODEL))} --train.microbatch 2 --train.epochs 0"
PRETRAIN += " --task.name pretraining --train.steps 2 --optimizer.decay-steps 2"

INSTRUCTIONS = "train.py configs/finetune/instructions-demo.toml --run-dir FILES/new --data.train x"

TRAINING = [
    (
        MNLI,
        """
        --data.path x.txt | --model.head span | --model.num-classes 2 | --model.family gpt2 | --train.epochs 0 |
        --data.train no.tsv | --seeds 0 | --seed 2147483646 --seeds 3
        """,
    ),
    (f"train.py {PRESET} --run-dir FILES/new", "=> --data.train"),
    (INSTRUCTIONS, "--no-data.reset-attention | --model.family bert | --model.head classes"),
    ("train.py configs/demo.toml --run-dir", "BERT => model.family bert, not decoder"),
    (f"{PRETRAIN} --data.path FILES/thesis/thesis.txt", "--data.reset-attention"),
    (PRETRAIN, "=> --data.path | --data.train x | --data.dev x | --seeds 2 | --model.head classes"),
    # The directory of a run that was trained otherwise, of several, or of something else.
    (tune("qqp").replace("FILES/new", "TUNED"), "=> --run-dir TUNED holds a run with model.num_classes 3, not 2"),
    (
        MNLI.replace("FILES/new", "TUNED"),
        """
        --seed 3 => --run-dir TUNED holds a run with seed 0, not 3 |
        --task.option-tokens 3 => --run-dir TUNED holds a run with task.option_tokens 128, not 3 |
        --model.num-layers 2 => --run-dir TUNED holds a run with model.num_layers 1, not 2 |
        --task.doc-stride 3 => --run-dir TUNED holds a run with task.doc_stride 8, not 3 | --init BERT |
        --seeds 2 => --run-dir TUNED
        """,
    ),
    (MNLI.replace("FILES/new", "SEEDS"), "=> --run-dir SEEDS"),
    (tune("qqp").replace("FILES/new", "SEEDS"), "--seeds 2 => --run-dir SEEDS/seed-0 holds a run with"),
    *(
        (
            f"{MNLI} --data.dev no.tsv --run-dir",
            f"{place} => --run-dir {place} | {place} --seeds 2 => --run-dir {place}",
        )
        for place in ("FILES/maybe.tsv", "FILES/thesis")
    ),
    *(
        (f"{MNLI} --seeds 2 --run-dir", f"FILES/foreign{number} => FILES/foreign{number}/seeds.json")
        for number in range(len(FOREIGN))
    ),
    # The weights of another model, and what has none.
    (
        f"{MNLI} --init",
        f"""
        BERT --model.vocab-size 600 | BERT --model.sequence-length 96 | BERT --model.layer-order post |
        BERT --model.num-layers 2 | BERT --model.num-heads 2 | BERT --model.vocab-multiple 1024 |
        BERT --tokenizer.path TUNED/data/tokenizer | BARE | GPT | SEEDS | FILES/maybe.tsv | FILES/no | FILES |
        BERT/checkpoints/{STEPS}
        """,
    ),
]
EVALUATING = [
    (
        "eval.py",
        """
        mnli => --checkpoint |
        qqp --checkpoint TUNED --data FILES/qqp-dev.tsv => --checkpoint TUNED | race --checkpoint TUNED |
        mnli --data FILES/mnli-dev.tsv --checkpoint GPT | mnli --data FILES/mnli-dev.tsv --checkpoint SEEDS |
        mnli --data FILES/mnli-dev.tsv --checkpoint TUNED GPT => --checkpoint GPT |
        mnli --data FILES/mnli-dev.tsv --checkpoint TUNED FILES/none => --checkpoint FILES/none |
        lambada --data FILES/mnli-dev.tsv --checkpoint TUNED | instructions --checkpoint GPT --predictions x |
        instructions --checkpoint GPT GPT | lambada --data x --checkpoint BERT |
        perplexity --checkpoint BERT --overlap 8 |
        perplexity --checkpoint TUNED | perplexity --checkpoint GPT GPT | perplexity --checkpoint GPT --predictions x |
        perplexity --checkpoint GPT --task.n-best 3
        """,
    ),
    ("-m megajax generate --prompt a", "--checkpoint BERT"),
    (
        "eval.py mnli --checkpoint TUNED",
        """
        --step 3 | --overlap 3 | --predictions FILES/maybe.tsv |
        --data FILES/mnli-dev.tsv FILES/again.tsv --predictions FILES/new.tsv
        """,
    ),
]


@pytest.mark.parametrize(
    ("line", "named"),
    by_line(*TRAINING, *EVALUATING, *golden({f"{MNLI} {flags}": text for flags, text in OF_MNLI.items()})),
)
def test_one_line_and_nothing_written(tuning: Finetuning, names: dict[str, Path], line: str, named: str) -> None:
    assert_refused(tuning.commands, line, named, names)


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
    told = tuning.commands.run("eval.py", "squad2", "--checkpoint", run, "--data", file).ok()
    assert_says(told, f"1 answers that are not at their stated offset.*, first --data: {file}: {place}")
    line = one_line(tuning.commands.run("eval.py", "squad2", "--checkpoint", run, "--data", file, "--task.strict"))
    assert_says(line, f"--data: {file}: {place}", "not at their stated offset", "valid: ")


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
