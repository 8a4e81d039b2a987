"""`megajax replay`: the same steps give the same figures, and one that was computed from something else is named."""

import json
import operator
import re
import shutil
from pathlib import Path

import pytest
from processes import Commands, Run, finish
from results import contents, records

from megajax.runs.starts import FOLDER
from megajax.training.replay import ROUNDING, compared

FLIPPED = """\
from megajax.data.samples.gpt import TrainSamples

right = TrainSamples.__getitem__


def faulty(self, number):
    sample = right(self, number)
    tokens = sample["tokens"].copy()
    tokens[7] ^= number == 39 * 8 + 3
    return sample | {"tokens": tokens}


TrainSamples.__getitem__ = faulty
"""


def replay(commands: Commands, run_dir: Path, *arguments: object) -> tuple[int, str]:
    """The exit code and the last line of the command."""
    done = commands.run("-m", "megajax", "replay", run_dir, *arguments)
    return done.code, (done.err or done.out).strip().splitlines()[-1]


def test_the_same_steps_are_the_same_and_a_changed_figure_is_named(
    commands: Commands, straight: Run, tmp_path: Path
) -> None:
    """On the run's own mesh, bit for bit: the last bit of one figure shows. Nothing in the run changes."""
    changed = shutil.copytree(straight.folder, tmp_path / "run")
    lines = records(changed)
    (seventeenth,) = (each for each in lines if each["step"] == 17)
    seventeenth["grad_norm"] *= 1 + 2**-50
    (changed / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    shutil.rmtree(changed / "data")  # which is made again, elsewhere
    before = contents(changed)
    code, line = replay(commands, changed, "--steps", 18)
    assert code == 1 and "step 17 is the first that differs: grad_norm" in line
    assert contents(changed) == before
    shutil.rmtree(changed / FOLDER)  # as of an earlier version: on which machine it ran is not known
    assert replay(commands, changed, "--steps", 18)[0] == 0


def test_the_documents_of_a_step_by_their_losses(commands: Commands, straight: Run, corpus: Path) -> None:
    """Before the step's update: their mean is the loss that it recorded, but for dropout. Each is named by its place in
    the corpus."""
    done = commands.run("-m", "megajax", "replay", straight.folder, "--steps", 16, "--samples")
    assert done.ok().splitlines()[-1] == f"steps 16 to 16 of {straight.folder}: the same, bit for bit"
    found = re.findall(r"  loss ([\d.]+)  (\d+) targets  row (\d+)  (.+):(\d+)\n", done.out)
    losses, counts = [float(each[0]) for each in found], [int(each[1]) for each in found]
    assert losses == sorted(losses, reverse=True) and sum(counts) == 8 * 32
    (loss,) = (each["loss"] for each in records(straight.folder) if each["step"] == 16 and "loss" in each)
    assert sum(map(operator.mul, losses, counts)) / sum(counts) == pytest.approx(loss, rel=3e-3)
    assert {each[2] for each in found} == {*map(str, range(8))} and {each[3] for each in found} == {str(corpus)}
    assert len({each[4] for each in found}) > 1


@pytest.mark.slow
def test_norms_of_layers_on_two_meshes(commands: Commands, straight: Run) -> None:
    arguments = ("--steps", 18, "--mesh.tensor", 2, "--simulate-devices", 2, "--layers")
    done = commands.run("-m", "megajax", "replay", straight.folder, *arguments)
    norms = re.findall(r"layer (\d).*: ([\d.]+) and ([\d.]+) \(.*: ([\d.]+) and ([\d.]+) \(", done.ok())
    assert [each[0] for each in norms] == ["0", "1", "2"]
    for _, *pairs in norms:
        first, other, gradient, other_gradient = map(float, pairs)
        assert first == pytest.approx(other, rel=1e-5) and gradient == pytest.approx(other_gradient, rel=1e-4)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("18:17", "--steps 18:17; valid: FIRST:LAST, such as 41:45, or one step, counted from 1"),
        ("19:30", "metrics.jsonl lacks step 21; valid: steps from 1 to 20"),
        ("17:18 --samples", "--samples with --steps 17:18; valid: one step"),
        ("18 --layers", "--layers without another mesh; valid: --mesh.… of one"),
        ("7:8", "no longer has its checkpoint of step 5, nor an older one; valid: steps from 1, or from 11"),
    ],
)
def test_what_cannot_be_replayed(commands: Commands, straight: Run, steps: str, message: str) -> None:
    code, line = replay(commands, straight.folder, "--steps", *steps.split())
    assert code == 2 and message in line


def test_what_is_gone_or_was_changed_is_named(commands: Commands, straight: Run, tmp_path: Path) -> None:
    """A checkpoint, first weights, data of Python code."""
    run, begun = (shutil.copytree(straight.folder, tmp_path / name) for name in ("run", "begun"))
    (run / "checkpoints" / "15" / "checkpoint.json").write_text("{}")
    code, line = replay(commands, run, "--steps", 18)
    assert code == 2 and "checkpoint.json is damaged; valid: steps after another checkpoint" in line
    start = begun / FOLDER / "0.toml"
    start.write_text(start.read_text().replace('init = ""', f'init = "{run}"'))
    (run / "checkpoints" / "20").touch()
    code, line = replay(commands, begun, "--steps", 2)
    assert code == 2 and f"--init was trained since {begun} began; valid: steps after a checkpoint" in line
    start = run / FOLDER / "0.toml"
    start.write_text(start.read_text().replace(" process\n", " process; data of Python code\n"))
    code, line = replay(commands, run, "--steps", 18)
    assert code == 2 and "were trained on data that Python code gave; valid: steps trained on a corpus" in line


@pytest.mark.slow
def test_a_flipped_bit_of_a_batch_is_named_on_another_mesh(commands: Commands, tmp_path: Path) -> None:
    """A plugin flips a bit of a token of step 40, on data 2 x pipe 2. Without it, on tensor 2, that step is the
    first that differs; with it, on the same mesh, none does."""
    run, plugin = tmp_path / "run", tmp_path / "flip.py"
    plugin.write_text(FLIPPED)
    mesh = ("--mesh.data", 2, "--mesh.pipe", 2, "--simulate-devices", 4)
    steps = ("--train.steps", 60, "--checkpoint.keep", 60, "--train.eval-every", 0)
    commands.run_process("train.py", commands.preset, "--run-dir", run, *mesh, *steps, "--plugins", plugin).ok()
    line = ("-m", "megajax", "replay", run, "--steps")
    done = finish(commands.start(*line, "38:42", "--no-plugins", "--mesh.tensor", 2))
    assert done.code == 1, done.err
    assert re.search(r"step 40 is the first that differs: loss [\d.]+, not [\d.]+ \(", done.err), done.err
    done = finish(commands.start(*line, "1:60"))
    assert done.out.splitlines()[-1] == f"steps 1 to 60 of {run}: the same, bit for bit", done.err


def test_comparison_by_precision() -> None:
    """Figures of time do not count, and counts are never rounded. Rounding grows with the steps."""
    last = {"loss": 3.0, "tokens": 64, "grad_norm": None}
    was = {9: {"step": 9, "loss": 2.0, "seconds": 1.0, "tokens": 64}, 10: last}
    near = {9: was[9] | {"seconds": 2.0}, 10: last | {"loss": 3.0 * (1 - 1.5 * ROUNDING["fp32"][0])}}
    assert compared(was, was, 8, "fp32", exact=True) == (False, "the same, bit for bit")
    assert compared(was, near, 8, "fp32", exact=False)[0] is False
    assert "step 10 is the first that differs: loss" in compared(was, near, 9, "fp32", exact=False)[1]
    assert compared(was, near, 9, "bf16", exact=False)[0] is False
    assert compared(was, near, 8, "fp32", exact=True)[0] is True
    assert "grad_norm 1.0, not None (inf" in compared(was, {10: last | {"grad_norm": 1.0}}, 9, "fp32", exact=False)[1]
    assert "tokens 65, not 64" in compared(was, {10: last | {"tokens": 65}}, 9, "fp32", exact=False)[1]
