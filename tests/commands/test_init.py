"""--init: a run begins with the weights of another one, and nothing else of it."""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from finetuning import MESH_222, MODEL, PRESET, Finetuning, dev_of, stop_after
from made_up_tasks import text
from mistakes import assert_says, one_line, redundant
from processes import Commands, assert_same_checkpoint, checkpoint_arrays, contents, curve, made_once

from megajax.config import to_toml
from megajax.program.program import Program
from megajax.program.state import TrainState
from megajax.runs import init
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.ownership import mark
from megajax.runs.step_folders import complete
from megajax.training import loop

STEPS = 2


PRETRAINING = ("--task.name", "pretraining", "--train.epochs", 0, "--train.steps", STEPS, "--precision", "bf16")
PRETRAINING += ("--optimizer.schedule", "constant", "--optimizer.warmup-fraction", 0, "--model.sequence-length", 64)


@pytest.fixture(scope="module")
def pretrained(tuning: Finetuning) -> Path:
    """A BERT in bf16 of more positions as pretraining leaves it on two devices, its moments other than zero. It was not
    trained, which would take seconds to compile; `test_from_pretraining_to_a_task` has one that was."""
    folder = tuning.folder / "pretrained"
    made_once(folder, lambda: make_pretrained(folder, tuning.file("mnli", "pretraining")))
    return folder


def make_pretrained(folder: Path, words: Path) -> None:
    import jax

    from megajax.data.tokenizers import train_tokenizer
    from megajax.settings.flags import parse

    flags = map(str, (*MODEL, *PRETRAINING, "--mesh.data", 2, "--train.microbatch", 2, "--data.path", "x"))
    config = parse([PRESET, "--run-dir", str(folder), *flags], "", "")
    layout = Program.on(config, jax.devices()[:2]).layout
    state = layout.init()
    state = dataclasses.replace(state, optimizer=jax.tree.map(lambda x: x + jnp.ones_like(x), state.optimizer))
    checkpoints = Checkpoints(folder, layout, keep=1)
    checkpoints.save(STEPS, state)
    checkpoints.wait()
    checkpoints.close()
    train_tokenizer([words.read_text()], config.model.vocab_size, "wordpiece").save(folder / "data" / "tokenizer")
    mark(folder)
    (folder / "config.toml").write_text(to_toml(config))


@pytest.mark.full
def test_from_pretraining_to_a_task(tuning: Finetuning, tmp_path: Path) -> None:
    """By the commands alone; the pretrained run on a mesh of its own has no figures of a task."""
    rng, run, documents = random.Random(5), tmp_path / "bert", tmp_path / "documents.jsonl"
    texts = [" ".join(text(rng, 3, 9).capitalize() + "." for _ in range(1 + n % 12)) for n in range(60)]
    documents.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    flags = (*PRETRAINING, "--data.path", documents, "--data.validation-fraction", 0.2, "--train.microbatch", 2)
    mesh = ("--mesh.data", 2, "--simulate-devices", 2)
    done = tuning.commands.run("train.py", PRESET, "--run-dir", run, *MODEL, *flags, *mesh)
    assert done.code == 0, done.err
    told = tuning.train("mnli", tmp_path / "run", "--init", run, "--train.steps", 2).out
    assert f"weights: of step {STEPS} of {run}, fresh head.output.bias, head.output.weight; the first 48 of" in told
    assert curve(tmp_path / "run")[0][1] != curve(tuning.run("mnli"))[0][1]


def first_states(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The step, the moments and the weights that every training from now on begins with."""
    import jax

    found: list[dict[str, Any]] = []
    begin = init.first_state

    def remember(program: Any) -> tuple[TrainState, str]:
        state, told = begin(program)
        leaves = jax.tree_util.tree_leaves_with_path(program.layout.to_canonical(state))
        found.append({jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
        return state, told

    monkeypatch.setattr(init, "first_state", remember)
    return found


@pytest.mark.parametrize(
    ("task", "precision"), [("mnli", "fp32"), redundant("squad2", "bf16"), redundant("race", "fp32")]
)
def test_only_the_weights_are_taken(
    tuning: Finetuning, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, precision: str
) -> None:
    """Every weight that both have is the other run's, the first positions are, the head is fresh; the optimizer begins
    anew. What is fresh and what is cut is said."""
    found = first_states(monkeypatch)
    done = tuning.train(task, tmp_path / "run", "--init", pretrained, "--precision", precision, "--train.steps", 3)
    (state,) = found
    theirs = checkpoint_arrays(pretrained, STEPS)
    same = {name: array for name, array in theirs.items() if name.startswith("['params']")}
    ours = {name.replace(".params", "['params']"): array for name, array in state.items()}
    wide = {name.replace(".main", "['params']"): array for name, array in state.items() if name.startswith(".main")}
    shared = [name for name in same if name in ours]
    assert len(shared) > 10
    for name in shared:
        array, wanted = (wide or ours)[name], same[name]
        if array.shape != wanted.shape:
            assert "position" in name and wanted.shape[0] == 64 and array.shape[0] == 48, name
            wanted = wanted[:48]
        assert array.dtype == np.float32 and array.tobytes() == wanted.tobytes(), name
    fresh = {name for name in ours if name.startswith("['params']")} - set(same)
    assert fresh and all("head" in name for name in fresh), fresh
    moments = {name: array for name, array in state.items() if ".mu" in name or ".nu" in name}
    assert len(moments) > 20 and not any(array.any() for array in moments.values())
    assert any(array.any() for name, array in theirs.items() if "mu" in name), "the other run's are not zero"
    assert not state[".step"] and not any(array.any() for name, array in state.items() if "count" in name)
    assert f"weights: of step {STEPS} of {pretrained}, fresh head." in done.out
    assert "the first 48 of 64 positions" in done.out
    assert curve(tmp_path / "run")[0][1] != curve(tuning.run(task))[0][1]
    assert (tmp_path / "run/data/tokenizer/tokenizer.json").read_bytes() == (
        pretrained / "data/tokenizer/tokenizer.json"
    ).read_bytes()


def test_the_run_of_init_may_be_gone_when_it_goes_on(
    tuning: Finetuning, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command, to the same end, and the run's own config.toml."""
    source = shutil.copytree(pretrained, tmp_path / "source")
    run, whole, flags = tmp_path / "run", tmp_path / "whole", ("--init", source)
    tuning.train("mnli", whole, *flags, "--train.steps", 4)
    stop_after(monkeypatch, 1)
    assert tuning.start("mnli", run, *flags).code == 143
    shutil.rmtree(source)
    done = tuning.commands.run("train.py", run / "config.toml", "--train.steps", 4)
    assert done.code == 0 and "resumed from step" in done.out, done.err
    assert curve(run) == curve(whole) and dev_of(run) == dev_of(whole)
    assert_same_checkpoint(run, whole, 4)


@pytest.mark.full
def test_a_mesh_of_eight_begins_with_the_same(tuning: Finetuning, tmp_path: Path, pretrained: Path) -> None:
    """The weights of a run on another mesh, on another one again."""
    source, layers = tmp_path / "source", ("--model.num-layers", 2, "--train.steps", 2)
    tuning.train("mnli", source, *layers, *MESH_222, "--train.microbatch", 1, "--optimizer.zero", 3)
    for name, mesh in (("one", ()), ("eight", (*MESH_222, "--train.microbatch", 1, "--pipeline.vocabulary", "split"))):
        tuning.train("mnli", tmp_path / name, *layers, *mesh, "--init", source)
    for (_, loss, _), (_, wanted, _) in zip(curve(tmp_path / "eight"), curve(tmp_path / "one"), strict=True):
        assert abs(loss - wanted) <= 1e-6 * wanted


OTHERS = [("mnli", "squad2"), redundant("squad2", "mnli")]
OTHERS += [redundant(*pair) for pair in (("mnli", "race"), ("mnli", "qqp"), ("qqp", "mnli"), ("race", "mnli"))]


@pytest.mark.parametrize(("source", "task"), OTHERS)
def test_the_head_of_another_task_is_not_taken(tuning: Finetuning, tmp_path: Path, source: str, task: str) -> None:
    """A run of another task gives all but its head."""
    done = tuning.start(task, tmp_path / "run", "--init", tuning.run(source), "--train.steps", 1)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("weights:")]
    assert "head.output.weight" in line.split("fresh")[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model.hidden-size", 64), ["--init", "hidden_size 32, .* not 64", "valid: --model.hidden-size 32"]),
        (("--model.vocab-size", 600), ["--init", "vocab_size 512, not 600", "valid: --model.vocab-size 512"]),
        (("--model.sequence-length", 96), ["--init", "64, not 96", "valid: --model.sequence-length 64"]),
        (("--model.layer-order", "post"), ["--init", "layer_order pre, not post", "valid: --model.layer-order pre"]),
        redundant(("--model.num-layers", 2), ["--init", "num_layers 1, not 2", "valid: --model.num-layers 1"]),
        redundant(("--model.num-heads", 2), ["--init", "num_heads 4, .*not 2", "valid: --model.num-heads 4"]),
        redundant(("--model.vocab-multiple", 1024), ["--init", "padded_vocab_size 512, not 1024", "vocab-multiple 64"]),
        redundant(("--precision", "fp64"), ["--precision fp64", "holds a run in bf16"]),
    ],
)
def test_another_model(tuning: Finetuning, pretrained: Path, tmp_path: Path, flags: tuple, words: list[str]) -> None:
    """One line, with all flags that would be valid; there is no run directory."""
    line = one_line(tuning.start("mnli", tmp_path / "run", "--init", pretrained, *flags))
    assert_says(line, *words)
    assert not (tmp_path / "run").exists()


def gpt2(commands: Commands, folder: Path) -> Path:
    """What looks like a run of GPT-2; of another family nothing but its configuration is read."""
    preset = commands.preset.read_text().replace("vocab_size = 300", "vocab_size = 512")
    folder.mkdir()
    (folder / "config.toml").write_text(preset)
    return folder


@pytest.mark.parametrize("kind", ["a file", "gpt2", "nothing", "a checkpoint", redundant("a folder")])
def test_what_is_no_run_of_bert(tuning: Finetuning, tmp_path: Path, kind: str, pretrained: Path) -> None:
    """One line that names --init and it; there is no run directory."""
    places = {"a file": tuning.file("mnli", "train"), "nothing": tmp_path / "no", "a folder": tmp_path}
    places["a checkpoint"] = pretrained / "checkpoints" / str(STEPS)
    path = places.get(kind) or gpt2(tuning.commands, tmp_path / "gpt2")
    before = contents(tmp_path)
    line = one_line(tuning.start("mnli", tmp_path / "run", "--init", path))
    assert_says(line, f"--init {path}", "model.family decoder" if kind == "gpt2" else r"no config\.toml", "valid: ")
    assert contents(tmp_path) == before


def test_a_run_without_a_checkpoint(tuning: Finetuning, pretrained: Path, tmp_path: Path) -> None:
    source = shutil.copytree(pretrained, tmp_path / "source")
    shutil.rmtree(source / "checkpoints")
    line = one_line(tuning.start("mnli", tmp_path / "run", "--init", source))
    assert_says(line, f"--init {source}", "no checkpoint", "valid: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("first", ["fresh", redundant("another run")])
def test_a_start_that_trained_nothing_leaves_no_tokenizer_behind(
    tuning: Finetuning, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Stopped before its first checkpoint, a run can begin with other weights, and then with their tokenizer."""
    run = tmp_path / "run"
    flags = ("--init", tuning.run("mnli")) if first == "another run" else ()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", stop)
        assert tuning.start("mnli", run, *flags).code == 130
    assert not complete(run / "checkpoints")
    length = ("--model.sequence-length", 48)
    done = tuning.start("mnli", run, "--init", pretrained, *length, "--train.steps", 1)
    vocabularies = [(folder / "data/tokenizer/tokenizer.json").read_bytes() for folder in (run, pretrained)]
    assert done.code == 2 or vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize("given", ["of the run", "another"])
def test_a_tokenizer_beside_init(tuning: Finetuning, pretrained: Path, tmp_path: Path, given: str) -> None:
    """Must be that of the weights."""
    tokenizer = (pretrained if given == "of the run" else tuning.run("mnli")) / "data" / "tokenizer"
    done = tuning.start(
        "mnli", tmp_path / "run", "--init", pretrained, "--tokenizer.path", tokenizer, "--train.steps", 1
    )
    if given == "of the run":
        assert done.code == 0, done.err
        return
    assert_says(one_line(done), "--tokenizer.path", "not the tokenizer of --init", "valid: that, or none")
    assert not (tmp_path / "run").exists()
