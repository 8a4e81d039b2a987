"""BERT from the flags to the figures: the commands, files and guarantees of GPT-2."""

import shutil
from pathlib import Path

import pytest
from made_up_tasks import write_documents
from processes import Commands
from results import assert_close_losses, curve, records, training, validation

pytestmark = pytest.mark.slow

STEPS = 6
FLAGS = ("--model.family", "bert", "--train.steps", STEPS, "--train.eval-every", STEPS, "--checkpoint.every", 3)
SPLIT = ("--mesh.data", 2, "--mesh.tensor", 2, "--simulate-devices", 4, "--sequence-parallel", "--optimizer.zero", 3)
PARTS = ("loss/masked_lm", "loss/sentence_order")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("bert") / "documents.jsonl")


@pytest.fixture(scope="module")
def run(commands: Commands, documents: Path) -> Path:
    """Six steps on one device."""
    folder = documents.parent / "run"
    commands.train(folder, *FLAGS, "--data.path", documents, "--data.validation-fraction", 0.2)
    return folder


@pytest.mark.full
def test_every_loss_is_logged_by_itself(run: Path) -> None:
    for line in training(run):
        assert line["loss"] == pytest.approx(sum(line[name] for name in PARTS), rel=1e-6)
        assert 0 <= line["accuracy/sentence_order"] <= 1
    (line,) = [line for line in records(run) if "validation_loss" in line]
    losses = [line[f"validation_{name}_loss"] for name in ("masked_lm", "sentence_order")]
    assert line["validation_loss"] == pytest.approx(sum(losses), rel=1e-6)
    assert 0 < line["validation_sentence_order_accuracy"] <= 1


@pytest.mark.full
def test_a_mesh_and_a_resume_do_not_change_it(commands: Commands, run: Path, documents: Path, tmp_path: Path) -> None:
    """Three steps on one device and three on four are the six; eval.py has the same figures on one again."""
    other = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(other / "checkpoints" / str(STEPS))
    common = ("--data.path", documents, "--data.validation-fraction", 0.2, "--resume", "must")
    done = commands.train(other, *FLAGS, *common, *SPLIT, "--train.microbatch", 2)
    assert "resumed from step 3" in done.out
    assert_close_losses(curve(other), curve(run))
    assert validation(other)[STEPS] == pytest.approx(validation(run)[STEPS], rel=1e-6)
    found = commands.perplexity(other)
    assert found["loss"] == pytest.approx(validation(run)[STEPS], rel=1e-6)
    assert found["masked_lm_targets"] > 0 < found["sentence_order_targets"]
