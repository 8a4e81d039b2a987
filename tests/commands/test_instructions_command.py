"""Training on instructions, from the files to the figures: the commands, seen from outside."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from finetuning import MESH_222, dev_of
from mistakes import mistake
from processes import Commands, assert_close_losses, assert_same_checkpoint, curve, made_once, validation
from saved_tokenizers import write_saved

PRESET = "configs/finetune/instructions-demo.toml"
SIZE = ("--model.num-layers", 1, "--model.hidden-size", 32, "--model.num-heads", 4, "--model.vocab-size", 704)
SIZE += (
    "--model.vocab-multiple",
    64,
    "--model.sequence-length",
    64,
    "--train.global-batch",
    8,
    "--train.microbatch",
    1,
)
SIZE += ("--train.epochs", 2, "--train.log-every", 1, "--checkpoint.every", 3, "--sample.tokens", 2)


def record(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randrange(10), rng.randrange(10)
    if rng.random() < 0.5:
        return {"prompt": f"What is {a} and {b}?", "completion": f" It is {a + b}."}
    turns = [
        ("user", f"Which is after {a}?"),
        ("assistant", f"{a + 1}."),
        ("user", "And then?"),
        ("assistant", f"{a + 2}."),
    ]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


class Instructions:
    """Trains on made-up records of both forms with a tokenizer that has a chat template."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.commands, self.folder = commands, folder
        write_saved(folder / "tokenizer", "mistral")
        for seed, (name, count) in enumerate((("train", 60), ("dev", 12))):
            rng = random.Random(seed)
            lines = "".join(json.dumps(record(rng)) + "\n" for _ in range(count))
            (folder / f"{name}.jsonl").write_text(lines)
        self.data = ("--tokenizer.path", folder / "tokenizer", "--data.train", folder / "train.jsonl")
        self.data += ("--data.dev", folder / "dev.jsonl")

    def train(self, run_dir: Path, *flags: object) -> str:
        done = self.commands.run("train.py", PRESET, "--run-dir", run_dir, *SIZE, *self.data, *flags)
        assert done.code == 0, (done.code, done.out, done.err)
        return done.out


@pytest.fixture(scope="module")
def instructions(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Instructions:
    return Instructions(commands, tmp_path_factory.mktemp("instructions"))


@pytest.fixture(scope="module")
def run(instructions: Instructions) -> Path:
    folder = instructions.folder / "run"
    made_once(folder, lambda: (instructions.folder / "said").write_text(instructions.train(folder)) and None)
    return folder


def test_training_and_scoring(instructions: Instructions, run: Path) -> None:
    """Dev's figures are those of `eval.py`; the loss is that of validation, and falls."""
    said = (instructions.folder / "said").read_text()
    assert "instructions train: 60 records, packed in " in said and "instructions dev: 12 records, packed" in said
    logged, steps = dev_of(run), max(validation(run))
    assert logged["records"] == 12 and logged["loss"] == pytest.approx(validation(run)[steps], rel=1e-6)
    losses = [loss for _, loss, _ in curve(run)]
    assert len(losses) > 4 and losses[-1] < losses[0]
    found = instructions.commands.evaluate("instructions", run)
    assert found.pop("task") == "instructions" and found.pop("step") == steps
    assert found == pytest.approx(logged, rel=1e-6)
    other = instructions.commands.evaluate("instructions", run, "--data", instructions.folder / "train.jsonl")
    assert other["records"] == 60 and other["tokens"] > found["tokens"]


def test_a_mesh_changes_nothing(instructions: Instructions, run: Path) -> None:
    """The figures on two devices, for another batch, are those of one."""
    mesh = ("--mesh.tensor", 2, "--simulate-devices", 2, "--train.microbatch", 3)
    found, logged = instructions.commands.evaluate("instructions", run, *mesh), dev_of(run)
    assert {name: found[name] for name in logged} == pytest.approx(logged, rel=1e-6)


@pytest.mark.full
def test_a_pipeline_changes_nothing(instructions: Instructions, tmp_path: Path) -> None:
    """All losses on (2, 2, 2), of two layers, and the figures of dev there."""
    one, eight, layers = tmp_path / "one", tmp_path / "eight", ("--model.num-layers", 2)
    instructions.train(one, *layers)
    instructions.train(eight, *layers, *MESH_222, "--sequence-parallel")
    assert_close_losses(curve(eight), curve(one))
    found, logged = instructions.commands.evaluate("instructions", one, *MESH_222), dev_of(one)
    assert {name: found[name] for name in logged} == pytest.approx(logged, rel=1e-5)


@pytest.mark.full
def test_a_run_goes_on_where_it_was(instructions: Instructions, run: Path, tmp_path: Path) -> None:
    instructions.train(tmp_path / "run", "--train.steps", 3)
    instructions.train(tmp_path / "run")
    last = max(validation(run))
    assert_same_checkpoint(tmp_path / "run", run, last)
    line = (instructions.folder / "train.jsonl").read_text().splitlines()[0]
    (tmp_path / "other.jsonl").write_text(line + "\n")
    refused = mistake(
        instructions.commands, "train.py", PRESET, "--run-dir", tmp_path / "run", *SIZE, *instructions.data,
        "--data.train", tmp_path / "other.jsonl",
    )  # fmt: skip
    assert "--data.train: other records than when the run began" in refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--no-data.reset-attention",), "--no-data.reset-attention with --task.name instructions, of which several"),
        (
            ("--model.family", "bert"),
            "--task.name instructions with --model.family bert; valid: --model.family decoder",
        ),
        (("--model.head", "classes"), "--model.head classes with --model.family decoder; valid: pretraining"),
        (("--model.sequence-length", 2), "--data.train: none of its 60 records has tokens to train on; valid: at"),
    ],
)
def test_mistakes(instructions: Instructions, tmp_path: Path, flags: tuple, message: str) -> None:
    commands, data = instructions.commands, instructions.data
    line = mistake(commands, "train.py", PRESET, "--run-dir", tmp_path / "run", *SIZE, *data, *flags)
    assert message in line and not (tmp_path / "run" / "checkpoints").exists()


def test_mistakes_of_evaluation(instructions: Instructions, run: Path, tmp_path: Path) -> None:
    for flags, message in (
        (("--checkpoint", run, run), "--checkpoint: 2 runs, of which instructions takes one; valid: one"),
        (
            ("--checkpoint", run, "--predictions", tmp_path / "p"),
            "--predictions: instructions has none; valid: without",
        ),
    ):
        assert message in mistake(instructions.commands, "eval.py", "instructions", *flags)
