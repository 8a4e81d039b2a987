"""BERT from the flags to the figures: the commands, files and guarantees of GPT-2."""

import shutil
from pathlib import Path

import pytest
from finetuning import Finetuning
from made_up_tasks import write_documents
from mistakes import assert_refused, by_line, mistake
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


NEW = "train.py PRESET --run-dir NEW"
MISTAKES = [
    (
        "",
        """
        eval.py lambada --data x --checkpoint BERT | eval.py perplexity --checkpoint BERT --overlap 8 |
        -m megajax generate --prompt a --checkpoint BERT |
        train.py PRESET --run-dir BERT => model.family bert, not decoder
        """,
    ),
    (NEW, "--model.layer-order middle"),
    (f"{NEW} {' '.join(map(str, FLAGS))}", "--data.reset-attention | --model.sequence-length 4"),
]


@pytest.mark.parametrize(("line", "named"), by_line(*MISTAKES))
def test_one_line_says_what_would_be_valid(
    commands: Commands, tuning: Finetuning, tmp_path: Path, line: str, named: str
) -> None:
    bert, new = tuning.pretrained(), tmp_path / "new"
    assert_refused(commands, line, named, {"BERT": bert, "NEW": new, "PRESET": str(commands.preset)})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("split", "family"), [(("--split-sentences", "--tokenizer", "wordpiece"), "gpt2"), ((), "bert")]
)
def test_a_corpus_of_the_other_family(
    commands: Commands, tuning: Finetuning, documents: Path, tmp_path: Path, split: tuple[str, ...], family: str
) -> None:
    """A dataset of sentences is none for GPT-2, one of whole documents none for BERT."""
    prefix = tmp_path / "prepared"
    prepare = ("-m", "megajax", "prepare", documents, "--output", prefix, *split)
    commands.run(*prepare, "--vocab-size", 300, "--min-tokens", 1).ok()
    tokenizer = ("--tokenizer.path", tuning.pretrained() / "data" / "tokenizer", "--model.vocab-size", 384)
    flags = ("--run-dir", tmp_path / "new", "--model.family", family, "--data.path", prefix, *tokenizer)
    valid = "--split-sentences" if family == "bert" else "without --split-sentences"
    assert valid in mistake(commands, "train.py", commands.preset, *flags)
