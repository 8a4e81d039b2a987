"""What an earlier run allows: to go on at step 0, where more may change than later; to begin with its weights; its
tokenizer."""

import contextlib
import dataclasses
from pathlib import Path

import pytest
from tiny import LLAMA, QWEN3, tiny_config, user_error

from megajax.core.errors import UserError
from megajax.core.models.lora_config import LoraConfig
from megajax.data.config import DataConfig, TokenizerConfig
from megajax.data.tasks.registry import TaskConfig
from megajax.data.text.indexed import IndexedWriter
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer
from megajax.evaluation.pretrained import evaluate_perplexity
from megajax.runs.directory import check_claim, without_checkpoint
from megajax.runs.init import check_init, warning_of_task
from megajax.runs.kept_tokenizer import keep_copy, put_back_copy
from megajax.runs.ownership import IMPORTED, mark
from megajax.runs.trained import evaluation_config, run_tokenizer
from megajax.settings.config import Config, to_toml
from megajax.settings.flags import parse


def test_steps_that_no_checkpoint_has_are_told(tmp_path: Path) -> None:
    """They are trained again (`tests/reliability` has killed runs)."""
    run = make_run(tmp_path / "run")
    assert without_checkpoint(run) == ""
    (run / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    assert without_checkpoint(run).endswith("up to step 7, and there is no checkpoint; the run begins anew")
    (run / "checkpoints" / "5" / "state").mkdir(parents=True)
    assert without_checkpoint(run).endswith("up to step 7, and the newest checkpoint is of step 5")


def make_run(folder: Path, **model: object) -> Path:
    """What an import leaves behind, as far as it is looked at here."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(tiny_config(**model)))
    mark(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (make_run(tmp_path / "run") / "checkpoints" / "0").mkdir()
    return tmp_path / "run"


def with_data(path: object, tokenizer: object = "") -> Config:
    data, folder = DataConfig(path=str(path)), TokenizerConfig(path=str(tokenizer))
    return dataclasses.replace(tiny_config(global_batch=24), seed=3, data=data, tokenizer=folder)


def test_batch_and_seed_are_free_until_a_step_is_trained(run: Path) -> None:
    """The model is not, and after a step they are not either."""
    train_tokenizer(["text"], 280).save(run / "data" / "tokenizer")
    check_claim(run, with_data("text.txt"))
    check_claim(run, dataclasses.replace(with_data("text.txt"), precision="fp64"))
    with pytest.raises(UserError, match=r"model\.num_layers 4, not 5"):
        check_claim(run, dataclasses.replace(with_data("text.txt"), model=tiny_config(num_layers=5).model))
    with pytest.raises(UserError, match=r"optimizer\.name adamw, not muon; valid: the same, or .* with --init"):
        check_claim(run, tiny_config(optimizer={"name": "muon"}))
    (run / "checkpoints" / "5").mkdir()
    with pytest.raises(UserError, match="holds a run with seed 0, not 3"):
        check_claim(run, with_data("text.txt"))
    with pytest.raises(UserError, match=r"--precision fp64: .* holds a run in fp32"):
        check_claim(run, tiny_config(precision="fp64"))


def test_text_needs_the_tokenizer_of_the_weights(run: Path, tmp_path: Path) -> None:
    """Without one none is trained on the corpus: its ids would mean nothing to the weights. Tokens are taken."""
    with pytest.raises(UserError, match=r"--tokenizer\.path missing: .*valid: the folder of their tokenizer, or a"):
        check_claim(run, with_data("text.txt"))
    check_claim(run, with_data("text.txt", tokenizer="given"))
    with IndexedWriter(tmp_path / "tokens", 101) as writer:
        writer.add_document([1, 2, 3])
    check_claim(run, with_data(tmp_path / "tokens"))
    (run / "checkpoints" / "5").mkdir()
    trained = dataclasses.replace(with_data("text.txt"), seed=0, train=tiny_config().train)
    (run / IMPORTED).touch()  # and RUN/data was deleted
    assert "--tokenizer.path missing" in user_error(check_claim, run, trained)


def test_a_tokenizer_outlives_the_data(tmp_path: Path) -> None:
    one, other = (train_tokenizer([text * 9], 280) for text in ("text of one ", "another, "))
    one.save(tmp_path / "data" / "tokenizer")
    keep_copy(tmp_path, again=False)
    put_back_copy(tmp_path, tmp_path / "new")
    assert load_tokenizer(tmp_path / "new" / "tokenizer") == one
    other.save(tmp_path / "data" / "tokenizer")
    keep_copy(tmp_path, again=False)
    assert load_tokenizer(tmp_path / "tokenizer") == one
    keep_copy(tmp_path, again=True)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: missing, or changed since it was" in user_error(put_back_copy, tmp_path, tmp_path / "a")


@pytest.mark.parametrize(
    ("began_with", "given", "origin"),
    [
        ("", "", ""),
        ("other", "", ""),
        ("other", "other/../other", ""),  # the same command once more
        ("other", "third", "--init other"),
        ("", "other", "fresh weights"),
        ("imported", "other", "imported weights"),
    ],
)
def test_what_a_run_began_with_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch, began_with: str, given: str, origin: str
) -> None:
    """Another `--init` is refused, with the origin that the run has."""
    monkeypatch.chdir(run.parent)
    if began_with == "imported":
        (run / "imported.json").touch()
    earlier = dataclasses.replace(tiny_config(), init=began_with.removeprefix("imported"))
    (run / "config.toml").write_text(to_toml(earlier))
    refused = (
        rf"^--init {given}: --run-dir run holds a run that started from {origin}; valid: without --init, or another"
    )
    with pytest.raises(UserError, match=refused) if origin else contextlib.nullcontext():
        check_claim(Path("run"), dataclasses.replace(with_data("text.txt", tokenizer="given"), init=given))


@pytest.mark.parametrize("words", [LLAMA, QWEN3 | {"tied_embedding": False, "rope_theta": 12345.6789012}])
def test_all_that_differs_is_named_as_a_flag(words: dict, tmp_path: Path) -> None:
    """Also what no weight depends on, without which the same weights compute something else: the flags that a refusal
    names make this the other's model."""
    words = {"vocab_multiple": 1024, "scan_layers": "auto"} | words  # as in the preset
    started = ["demo", "--init", str(make_run(tmp_path / "run", **words))]
    refused = user_error(check_init, parse(started, "", ""))
    flags = refused.split("; valid: ")[1].removesuffix(", or another run").split()
    theirs = tiny_config(**words).model
    free = {"sequence-length": theirs.sequence_length, "dropout": theirs.dropout, "init-std": theirs.init_std}
    free_flags = [f"--model.{name}={value}" for name, value in free.items()]
    assert parse([*started, *flags, *free_flags], "", "").model == theirs


def test_other_angles_are_no_refusal(tmp_path: Path) -> None:
    """They are told when the run begins (`first_state`)."""
    run = make_run(tmp_path / "run", **LLAMA)
    flags = ["--init", str(run), "--model.rope-theta", "500000", "--model.rope-factor", "2"]
    with pytest.raises(UserError, match="holds no checkpoint"):  # the model is not what is refused
        check_init(parse([str(run / "config.toml"), *flags], "", ""))


def test_the_tokenizer_of_a_run(tmp_path: Path) -> None:
    """It has at most the model's ids; those of the padding are not among them."""
    with pytest.raises(UserError, match=r"^--checkpoint .* has no tokenizer; valid: a run with .*tokenizer$"):
        run_tokenizer(tmp_path, tiny_config())
    train_tokenizer(["ab ab"], 300).save(tmp_path / "data" / "tokenizer")
    assert run_tokenizer(tmp_path, tiny_config(vocab_size=258)).size == 258
    with pytest.raises(UserError, match=r"^--checkpoint .*: the tokenizer in .*tokenizer has 258 ids; .* 257$"):
        run_tokenizer(tmp_path, tiny_config(vocab_size=257))


def test_no_run_and_one_that_has_no_validation_split_yet(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--checkpoint .*no-run: no config\.toml found; valid: "):
        evaluation_config(tmp_path / "no-run", {})
    with pytest.raises(UserError, match=r"--data missing: .* has no corpus yet"):
        evaluate_perplexity(run, step="latest", data="", overrides={})


def test_a_learning_rate_of_pretraining_is_told(run: Path) -> None:
    """Where a task begins with its weights, unless only adapters learn."""
    (run / "config.toml").write_text(to_toml(tiny_config()))
    (run / "checkpoints" / "5" / "state").mkdir(parents=True)
    task = dataclasses.replace(tiny_config(), init=str(run), task=TaskConfig(name="instructions"))
    lower = dataclasses.replace(task.optimizer, learning_rate=1e-5, min_learning_rate=0.0)
    assert "no lower than that with which" in warning_of_task(task)
    assert "without --init trains random" in warning_of_task(dataclasses.replace(task, init=""))
    for other in ({"optimizer": lower}, {"lora": LoraConfig(rank=2)}, {"task": TaskConfig()}):
        assert warning_of_task(dataclasses.replace(task, **other)) == ""
