"""--init: a run begins with the weights of another one, and nothing else of it."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from finetuning import MODEL, PRESET, PRETRAINING, STEPS, Finetuning, stop_after
from made_up_tasks import write_documents
from results import checkpoint_arrays, curve
from tiny import full

from megajax.core.program.state import TrainState
from megajax.runs import init
from megajax.runs.step_folders import complete
from megajax.settings.presets import load_preset
from megajax.training import loop

pytestmark = pytest.mark.slow


@pytest.mark.full
def test_from_pretraining_to_a_task(tuning: Finetuning, tmp_path: Path) -> None:
    """By the commands alone; the pretrained run on a mesh of its own has no figures of a task."""
    run, documents = tmp_path / "bert", write_documents(tmp_path / "documents.jsonl")
    flags = (*PRETRAINING, "--data.path", documents, "--data.validation-fraction", 0.2, "--train.microbatch", 2)
    mesh = ("--mesh.data", 2, "--simulate-devices", 2)
    tuning.commands.run("train.py", PRESET, "--run-dir", run, *MODEL, *flags, *mesh).ok()
    told = tuning.train("mnli", tmp_path / "run", "--init", run, "--train.steps", 2).out
    assert f"weights: from step {STEPS} of {run}; fresh: head.output.bias, head.output.weight; the first 48 of" in told
    assert curve(tmp_path / "run")[0][1] != curve(tuning.run("mnli"))[0][1]


def first_states(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The step, the moments and the weights that every training from now on begins with."""
    found: list[dict[str, Any]] = []
    begin = init.first_state

    def remember(config: Any, program: Any) -> tuple[TrainState, str]:
        state, told = begin(config, program)
        leaves = jax.tree_util.tree_leaves_with_path(program.layout.to_canonical(state))
        found.append({jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
        return state, told

    monkeypatch.setattr(init, "first_state", remember)
    return found


@pytest.mark.parametrize(("task", "precision"), [("mnli", "fp32"), full("squad2", "bf16"), full("race", "fp32")])
def test_only_the_weights_are_taken(tuning: Finetuning, tmp_path: Path, monkeypatch, task: str, precision: str) -> None:
    """The first positions are the other run's, the head is fresh; the optimizer begins anew."""
    pretrained, found = tuning.pretrained(), first_states(monkeypatch)
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
    assert f"weights: from step {STEPS} of {pretrained}; fresh: head." in done.out
    assert "the first 48 of 64 positions" in done.out
    assert curve(tmp_path / "run")[0][1] != curve(tuning.run(task))[0][1]
    assert (tmp_path / "run/data/tokenizer/tokenizer.json").read_bytes() == (
        pretrained / "data/tokenizer/tokenizer.json"
    ).read_bytes()


def test_the_run_of_init_may_be_gone_when_it_goes_on(tuning: Finetuning, tmp_path: Path, monkeypatch) -> None:
    """By a command that does not name it; the run's config.toml still does."""
    source, run = shutil.copytree(tuning.pretrained(), tmp_path / "source"), tmp_path / "run"
    stop_after(monkeypatch, 1)
    assert tuning.start("mnli", run, "--init", source).code == 143
    shutil.rmtree(source)
    assert "resumed from step" in tuning.train("mnli", run, "--train.steps", 4).out
    assert load_preset(run / "config.toml")["init"] == str(source) and len(curve(run)) == 4


OTHERS = [("mnli", "squad2"), full("squad2", "mnli")]
OTHERS += [full(*pair) for pair in (("mnli", "race"), ("mnli", "qqp"), ("qqp", "mnli"), ("race", "mnli"))]


@pytest.mark.parametrize(("source", "task"), OTHERS)
def test_the_head_of_another_task_is_not_taken(tuning: Finetuning, tmp_path: Path, source: str, task: str) -> None:
    out = tuning.train(task, tmp_path / "run", "--init", tuning.run(source), "--train.steps", 1).out
    (line,) = [line for line in out.splitlines() if line.startswith("weights:")]
    assert "head.output.weight" in line.split("fresh")[1]


@pytest.mark.parametrize("first", ["fresh", full("another run")])
def test_a_start_without_a_step_leaves_no_tokenizer(
    tuning: Finetuning, tmp_path: Path, monkeypatch, first: str
) -> None:
    """Stopped before its first checkpoint, a run can begin with other weights, and then with their tokenizer."""
    run, pretrained = tmp_path / "run", tuning.pretrained()
    flags = ("--init", tuning.run("mnli")) if first == "another run" else ()

    def stop(*_: object, **how: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", stop)
        assert tuning.start("mnli", run, *flags).code == 130
    assert not complete(run / "checkpoints")
    done = tuning.start("mnli", run, "--init", pretrained, "--model.sequence-length", 48, "--train.steps", 1)
    vocabularies = [(folder / "data/tokenizer/tokenizer.json").read_bytes() for folder in (run, pretrained)]
    assert done.code == 2 or vocabularies[0] == vocabularies[1]
