"""Mistakes in fine-tuning: exit code 2, one line that names the flag and what is valid, nothing half-written."""

import json
import shutil
from pathlib import Path

import pytest
from finetuning import MODEL, PRESET, SIZE, STEPS, Finetuning
from made_up_tasks import SUFFIXES
from mistakes import assert_refused, assert_says, by_line, one_line
from processes import Run, made_once

NAMES = "pretraining, mnli, qqp, squad1, squad2, race"
ANY_TASK = "--task.name mnli or qqp or squad1 or squad2 or race"
FOREIGN = ["{}", '{"kind": "others"}', "not JSON", ""]  # in place of the report of several seeds


@pytest.fixture(scope="session")
def files(tuning: Finetuning) -> Path:
    """A folder with train and dev of every task, dev once more cut in the middle as by an interrupted download, some of
    their mistakes, and folders of something else."""
    folder = tuning.folder / "files"

    def make() -> None:
        folder.mkdir()
        for task, suffix in SUFFIXES.items():
            train, dev = (tuning.file(task, kind).read_bytes() for kind in ("train", "dev"))
            for name, content in (("train", train), ("dev", dev), ("cut", dev[: len(dev) * 2 // 3])):
                (folder / f"{task}-{name}{suffix}").write_bytes(content)
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
AGAIN = MNLI.replace("FILES/new", "TUNED")
PRETRAIN = f"train.py {PRESET} --run-dir FILES/new {' '.join(map(str, MODEL))} --train.microbatch 2 --train.epochs 0"
PRETRAIN += " --task.name pretraining --train.steps 2 --optimizer.decay-steps 2"
INIT = f"{MNLI} --init"
EVAL = "eval.py mnli --checkpoint TUNED"
PERPLEXITY = "eval.py perplexity --checkpoint"

TRAINING: list[tuple[str, ...]] = [
    (f"{MNLI} --data.path x.txt", r"--data\.path with --task\.name mnli; valid: --data\.train and --data\.dev"),
    (f"{MNLI} --task.name cola", r"--task\.name 'cola'", NAMES),
    (f"{MNLI} --task.name squad", r"--task\.name 'squad'", NAMES, "did you mean"),
    (f"{MNLI} --model.head span", r"--model\.head span with --task\.name mnli; valid: classes"),
    (f"{MNLI} --model.head nothing", r"--model\.head 'nothing'", "pretraining, classes, span, choice"),
    (f"{MNLI} --model.num-classes 2", r"--model\.num-classes 2 with --task\.name mnli; valid: 3"),
    (f"{MNLI} --model.family gpt2", r"--task\.name mnli", r"--model\.family decoder", r"valid: .*bert"),
    (f"{MNLI} --train.epochs 0", r"--train\.steps 0", r"--train\.epochs"),
    (f"{MNLI} --train.epochs -1", r"--train\.epochs -1", "valid: 0 to"),
    (
        f"{MNLI} --optimizer.warmup-steps 3 --optimizer.warmup-fraction 0.1",
        r"--optimizer\.warmup-steps and --optimizer\.warmup-fraction are both",
    ),
    (f"{MNLI} --optimizer.warmup-fraction 1", r"--optimizer\.warmup-fraction 1", "less than 1"),
    (f"{MNLI} --model.vocab-size 40", r"--model\.vocab-size 40", "valid: 100 or more"),
    (f"{MNLI} --model.sequence-length 4", r"--model\.sequence-length 4", "valid: 5 or more"),
    (f"{MNLI} --task.doc-stride 0", r"--task\.doc-stride 0", "valid: 1 to"),
    (f"{MNLI} --mesh.data 2 --simulate-devices 2 --train.microbatch 8", r"--train\.global-batch 8"),
    (f"{MNLI} --data.train", r"--data\.train needs a value"),
    (f"{MNLI} --data.train no.tsv", "--data.train: no.tsv does not exist; valid: a file of mnli"),
    (f"{MNLI} --data.dev no.tsv", "--data.dev: no.tsv does not exist; valid: a file of mnli"),
    (f"train.py {PRESET} --run-dir FILES/new", r"--data\.train missing", r"valid: files of --task\.name qqp"),
    *(
        (f"{PRETRAIN} {flags}", f"{flags.split()[0]}( classes)? without a task", ANY_TASK)
        for flags in ("--data.train x", "--data.dev x", "--seeds 2", "--model.head classes")
    ),
    (PRETRAIN, r"--data\.path missing"),
    # The file of another task: the line says of which one.
    *(
        (
            f"{tune(task)} --data.{kind} FILES/{given}-dev{SUFFIXES[given]}",
            rf"--data\.{kind}: .*looks like a .*{given}.* file, not .*{task}.*; valid: ",
        )
        for line in ("mnli qqp", "mnli squad1", "squad2 race", "race squad1", "qqp mnli")
        for task, given in [line.split()]
        for kind in ("train", "dev")
    ),
    # What cannot be seen from the beginning of a file: the first question without an answer.
    (
        f"{tune('squad1')} --data.train FILES/squad2-train.json",
        r"--data.train: .*question \d+ \(id q\d+\).*squad2.*; valid: ",
    ),
    *(
        (
            f"{tune(task)} --data.{kind} FILES/{task}-cut{SUFFIXES[task]}",
            f"--data.{kind}: FILES/{task}-cut.*(is cut off|truncated).*valid: ",
        )
        for task in ("mnli", "squad2", "race")
        for kind in ("train", "dev")
    ),
    (
        f"{MNLI} --data.dev FILES/maybe.tsv",
        '--data.dev: FILES/maybe.tsv:8.*label "maybe"',
        "valid: entailment, neutral, contradiction",
    ),
    # The directory of a run that was trained otherwise, of several, or of something else.
    *(
        (f"{again} {flags}", f"--run-dir TUNED holds a run with ({key}|model.num_classes) ", "valid: the same")
        for again, key, flags in (
            (tune("qqp").replace("FILES/new", "TUNED"), "task.name", ""),
            (AGAIN, "seed", "--seed 3"),
            (AGAIN, "task.option_tokens", "--task.option-tokens 3"),
            (AGAIN, "model.num_layers", "--model.num-layers 2"),
            (AGAIN, "task.doc_stride", "--task.doc-stride 3"),
        )
    ),
    (
        f"{AGAIN} --init BERT",
        "--init BERT: --run-dir TUNED holds a run that started from fresh weights; valid: without",
    ),
    (f"{AGAIN} --seeds 2", "--run-dir TUNED is the directory of a single run; valid: a new folder, or without --seeds"),
    (MNLI.replace("FILES/new", "SEEDS"), "--run-dir SEEDS.*valid: "),
    (
        f"{tune('qqp').replace('FILES/new', 'SEEDS')} --seeds 2",
        "--run-dir SEEDS.* (task.name mnli, not qqp|model.num_classes 3, not 2)",
    ),
    *(
        (
            f"{MNLI} --run-dir FILES/foreign{number} --seeds 2",
            f"FILES/foreign{number}/seeds.json was not written by --seeds; valid: another --run-dir",
        )
        for number in range(len(FOREIGN))
    ),
    *(
        (f"{MNLI} --run-dir {place} --data.dev no.tsv {flags}", f"--run-dir {place}.*valid: ")
        for place in ("FILES/maybe.tsv", "FILES/thesis")
        for flags in ("", "--seeds 2")
    ),
    (f"{MNLI} --seeds 0", "--seeds 0; valid: 1 to 1000"),
    (f"{MNLI} --seeds 3 --seed {2**31 - 2}", "--seeds 3.*--seed 2147483646.*valid: "),
    (f"{MNLI} --seeds many", "--seeds 'many'; valid: a whole number"),
    # The weights of another model, and what has none.
    (f"{INIT} BERT --model.hidden-size 64", "--init.*hidden_size 32, .* not 64.*valid: --model.hidden-size 32"),
    (f"{INIT} BERT --model.vocab-size 600", "--init.*vocab_size 512, not 600.*valid: --model.vocab-size 512"),
    (f"{INIT} BERT --model.sequence-length 96", "--init.*64, not 96.*valid: --model.sequence-length 64"),
    (f"{INIT} BERT --model.layer-order post", "--init.*layer_order pre, not post.*valid: --model.layer-order pre"),
    (f"{INIT} BERT --model.num-layers 2", "--init.*num_layers 1, not 2.*valid: --model.num-layers 1"),
    (f"{INIT} BERT --model.num-heads 2", "--init.*num_heads 4, .*not 2.*valid: --model.num-heads 4"),
    (f"{INIT} BERT --model.vocab-multiple 1024", "--init.*padded_vocab_size 512, not 1024.*vocab-multiple 64"),
    (
        f"{INIT} BERT --tokenizer.path TUNED/data/tokenizer",
        "--tokenizer.path.*not the tokenizer of --init.*; valid: that one, or none",
    ),
    (f"{INIT} BARE", "--init BARE.*no checkpoint.*valid: "),
    (f"{INIT} GPT", "--init GPT.*model.family decoder.*valid: "),
    *(
        (f"{INIT} {place}", f"--init {place}.*no config.toml.*valid: ")
        for place in ("FILES/maybe.tsv", "FILES/no", "FILES", f"BERT/checkpoints/{STEPS}", "SEEDS")
    ),
]

EVALUATING: list[tuple[str, ...]] = [
    ("eval.py mnli", "--checkpoint"),
    ("eval.py cola --checkpoint TUNED", "TASK 'cola'; valid: .*mnli.*qqp.*race.*squad1.*squad2"),
    ("eval.py qqp --checkpoint TUNED --data FILES/qqp-dev.tsv", "--checkpoint TUNED: a run of mnli.*fine-tuned on qqp"),
    ("eval.py race --checkpoint TUNED", "--checkpoint TUNED: a run of mnli", "valid: a run .* race"),
    ("eval.py mnli --checkpoint GPT --data FILES/mnli-dev.tsv", "--checkpoint GPT", "fine-tuned on mnli"),
    ("eval.py mnli --checkpoint SEEDS --data FILES/mnli-dev.tsv", "--checkpoint SEEDS.*valid: "),
    (f"{EVAL} GPT --data FILES/mnli-dev.tsv", "--checkpoint GPT", "fine-tuned on mnli"),
    (f"{EVAL} FILES/none --data FILES/mnli-dev.tsv", r"--checkpoint FILES/none: no config\.toml"),
    (f"{EVAL} --data FILES/qqp-dev.tsv", "--data: FILES/qqp-dev.tsv looks like a qqp file, not mnli"),
    (f"{EVAL} --data FILES/none", "--data: FILES/none does not exist", "valid: a file of mnli"),
    (f"{EVAL} --data FILES/mnli-dev.tsv FILES/mnli-dev.tsv", "--data: FILES/mnli-dev.tsv is named twice", "valid: "),
    (f"{EVAL} --step 3", "--step 3; valid: latest, best, or one of"),
    (f"{EVAL} --overlap 3", "--overlap: mnli does not take it", "valid: "),
    (f"{EVAL} --predictions FILES/maybe.tsv", "--predictions FILES/maybe.tsv already exists", "valid: "),
    # Records of one name, as MNLI's two dev files have them.
    (
        f"{EVAL} --data FILES/mnli-dev.tsv FILES/again.tsv --predictions FILES/new.tsv",
        "--predictions: two records have the name.*valid: ",
    ),
    (f"{PERPLEXITY} TUNED", "--checkpoint TUNED: a run of mnli", "valid: megajax eval mnli"),
    ("eval.py lambada --checkpoint TUNED --data FILES/mnli-dev.tsv", "--checkpoint TUNED", "valid: "),
    (f"{PERPLEXITY} GPT GPT", "--checkpoint: 2 paths", "valid: one"),
    (f"{PERPLEXITY} GPT --predictions x", "--predictions is not for perplexity; valid: mnli, .*, race$"),
    ("eval.py instructions --checkpoint GPT --predictions x", "--predictions is not for instructions; valid: .*race"),
    (f"{PERPLEXITY} GPT --task.n-best 3", r"--task\.n-best is not for perplexity", "mnli"),
]


@pytest.mark.parametrize(("line", "words"), by_line(TRAINING + EVALUATING))
def test_one_line_and_nothing_written(tuning: Finetuning, names: dict[str, Path], line: str, words: list[str]) -> None:
    assert_refused(tuning.commands, line, words, names)


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
