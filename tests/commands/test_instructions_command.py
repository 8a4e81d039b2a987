"""Training on instructions, from the files to the figures: the commands, seen from outside."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from finetuning import dev_of
from mistakes import mistake
from processes import Commands
from results import assert_same_checkpoint, curve, validation
from saved_tokenizers import write_saved

pytestmark = pytest.mark.slow

PRESET = "configs/finetune/instructions-demo.toml"
SIZE = "--model.num-layers 1 --model.hidden-size 32 --model.num-heads 4 --model.vocab-size 704 --model.vocab-multiple"
SIZE += " 64 --model.sequence-length 64 --train.global-batch 8 --train.microbatch 1 --train.epochs 2 --train.log-every"
SIZE += " 1 --checkpoint.every 3 --sample.tokens 0 --model.dropout 0"


def record(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randrange(10), rng.randrange(10)
    if rng.random() < 0.5:
        return {"prompt": f"What is {a} and {b}?", "completion": f" It is {a + b}."}
    contents = f"Which is after {a}?", f"{a + 1}.", "And then?", f"{a + 2}."
    roles = ("user", "assistant") * 2
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]}


class Instructions:
    """Trains on made-up records of both forms with a tokenizer that has a chat template."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.commands, self.folder, self.run = commands, folder, folder / "run"
        write_saved(folder / "tokenizer", "mistral")
        for seed, (name, count) in enumerate((("train", 60), ("dev", 12))):
            rng = random.Random(seed)
            lines = "".join(json.dumps(record(rng)) + "\n" for _ in range(count))
            (folder / f"{name}.jsonl").write_text(lines)
        self.line = ("train.py", PRESET, *SIZE.split(), "--tokenizer.path", folder / "tokenizer")
        self.line += ("--data.train", folder / "train.jsonl", "--data.dev", folder / "dev.jsonl", "--run-dir")
        self.said = self.train(self.run)

    def train(self, run_dir: Path, *flags: object) -> str:
        return self.commands.run(*self.line, run_dir, *flags).ok()

    def assert_as_logged(self, run: Path, *flags: object, relative: float = 1e-6) -> None:
        """`eval.py` has the figures of dev that training logged."""
        found, logged = self.commands.evaluate("instructions", run, *flags), dev_of(run)
        assert found.pop("task") == "instructions" and found.pop("step") == max(validation(run))
        assert found == pytest.approx(logged, rel=relative)


@pytest.fixture(scope="module")
def instructions(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Instructions:
    return Instructions(commands, tmp_path_factory.mktemp("instructions"))


def test_training_and_scoring(instructions: Instructions) -> None:
    run, said = instructions.run, instructions.said
    assert "instructions train: 60 records, packed in " in said and "instructions dev: 12 records, packed" in said
    logged, losses = dev_of(run), [loss for _, loss, _ in curve(run)]
    assert logged["records"] == 12
    assert logged["loss"] == pytest.approx(validation(run)[max(validation(run))], rel=1e-6)
    assert len(losses) > 4 and losses[-1] < losses[0]
    instructions.assert_as_logged(run)
    other = instructions.commands.evaluate("instructions", run, "--data", instructions.folder / "train.jsonl")
    assert other["records"] == 60 and other["tokens"] > logged["tokens"]


def test_a_mesh_changes_nothing(instructions: Instructions) -> None:
    instructions.assert_as_logged(
        instructions.run, "--mesh.tensor", 2, "--simulate-devices", 2, "--train.microbatch", 3
    )


@pytest.mark.full
def test_a_run_goes_on_where_it_was(instructions: Instructions, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.jsonl"
    assert "a sample:" in instructions.train(run, "--train.steps", 3, "--sample.tokens", 2)
    instructions.train(run)
    assert_same_checkpoint(run, instructions.run, max(validation(run)))
    other.write_text((instructions.folder / "train.jsonl").read_text().splitlines()[0] + "\n")
    said = mistake(instructions.commands, *instructions.line, run, "--data.train", other)
    assert "--data.train: the records have changed since the run began" in said
