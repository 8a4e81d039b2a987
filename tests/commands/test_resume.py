"""A run that was stopped and resumed ends with the same weights and records."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from processes import MESH_222, Commands, Run, finish
from results import assert_close_losses, assert_same_checkpoint, checkpoint_steps, curve, validation
from test_dry_run import TWO
from tiny import full

UNROLLED = ("--model.scan-layers", "auto")  # as users have them


def test_ten_steps_and_ten_more_are_twenty_bit_for_bit(commands: Commands, straight: Run, begun: Path) -> None:
    """The run's own config.toml is the preset."""
    assert curve(begun) == curve(straight.folder)[:10]
    done = commands.train(begun, "--train.steps", 20, preset=begun / "config.toml")
    assert "step 10" in done.out, "it says where it goes on"
    assert curve(begun) == curve(straight.folder)
    assert validation(begun) == validation(straight.folder)
    assert checkpoint_steps(begun) == checkpoint_steps(straight.folder) == [10, 15, 20]
    assert_same_checkpoint(begun, straight.folder, 20)


@pytest.mark.parametrize("split", [TWO, full((*TWO[:1], 4, TWO[2], 4, *TWO[4:], "--optimizer.zero-ranks", 2))])
@pytest.mark.slow
def test_resume_on_other_meshes(commands: Commands, straight: Run, begun: Path, split: tuple) -> None:
    """On two devices with ZeRO-3, or on two replicas of two, then on one device again."""
    commands.train(begun, *split, "--train.steps", 12, "--resume", "must")
    commands.train(begun)
    assert curve(begun)[:10] == curve(straight.folder)[:10]
    assert_close_losses(curve(begun), curve(straight.folder))


@pytest.mark.slow
def test_layers_of_two_kinds_resume_on_other_meshes(commands: Commands, tmp_path: Path) -> None:
    """From one device on data 2 x tensor 2, with ZeRO-3."""
    kinds = ("--model.linear-heads", 4, "--model.linear-layers", "2,1", "--train.eval-every", 0, "--train.steps")
    four = (14, "--mesh.data", 2, "--mesh.tensor", 2, "--simulate-devices", 4, "--optimizer.zero", 3)
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    for folder, steps in (straight, (14,)), (moved, (10,)), (moved, four):
        commands.train(folder, *kinds, *steps)
    assert_close_losses(curve(moved), curve(straight), 5e-7)


@pytest.mark.slow
def test_another_batch_and_blend_with_samples_left_out_an_average_and_frozen_weights(
    commands: Commands, straight: Run, begun: Path, corpus: Path, tmp_path: Path
) -> None:
    """In one start or in two, which is all that the second changes. An average of the weights begins and ends on the
    way: it is what is validated, and evaluated unless one asks for the weights that were trained."""
    again, other = shutil.copytree(begun, tmp_path / "again"), tmp_path / "other.txt"
    other.write_text(corpus.read_text()[::-1])
    blend = f'[{{ path = "{corpus}", weight = 0.5 }}, {{ path = "{other}", weight = 0.5 }}]'
    changed = ("--train.global-batch", 4, "--data.sources", blend, "--data.skip", "70:83", "86:86")
    changed += ("--train.freeze", "embedding,layers.0", "--train.ema", 0.5)
    done = commands.train(begun, *changed, "--train.steps", 14)
    said = "samples: 80 drawn so far, the next one is number 84; other corpora since step 11; left out: 70:83, 86:86"
    assert said in done.out and "the backward pass leaves out 1 layers" in done.out
    assert "the weight average (--train.ema) starts from the weights of step 10" in done.out
    found = [commands.perplexity(begun, *weights)["loss"] for weights in ((), ("--weights", "trained"))]
    assert found[0] == pytest.approx(validation(begun)[14], rel=1e-6) != pytest.approx(found[1], rel=1e-4)
    assert (begun / "data" / "source-0" / "tokens.bin").is_file(), "the corpus of the first steps stays where it is"
    replayed = commands.run("-m", "megajax", "replay", begun, "--steps", "9:14", "--no-plugins")
    assert f"steps 6 to 14 of {begun}: the same, bit for bit" in replayed.ok(), "each start as it was"
    commands.train(again, *changed, "--train.steps", 12)
    done = commands.train(again, *changed, "--train.steps", 14)
    assert "no longer" not in done.out
    assert curve(again) == curve(begun) != curve(straight.folder)[:14]
    assert_same_checkpoint(again, begun, 14)
    done = commands.train(begun, *changed, "--train.freeze", "embedding", "--train.steps", 14)
    assert "warning: --train.freeze no longer has layers.0; the first updates of weights" in done.out
    done = commands.train(again, "--train.steps", 15)
    assert "the weight average is dropped after step 14 (--train.ema 0" in done.out


def test_another_run_begins_with_an_earlier_checkpoint(commands: Commands, half: Run, tmp_path: Path) -> None:
    """Which it keeps when it goes on."""
    origin = ("--init", half.folder, "--init-step")
    done = commands.train(tmp_path / "run", *origin, 5, "--train.steps", 1, "--train.eval-every", 0)
    assert f"weights: from step 5 of {half.folder}; fresh: none" in done.out
    failed = commands.run("train.py", commands.preset, "--run-dir", tmp_path / "run", *origin, "best")
    assert f"holds a run that started from --init {half.folder} --init-step 5; valid: without --init" in failed.err
    failed = commands.run("train.py", commands.preset, "--run-dir", tmp_path / "new", *origin, 6)
    assert "--init-step 6; valid: latest, best, or one of 5, 10" in failed.err


@pytest.mark.full
def test_with_bitwise_a_run_that_is_killed_and_moves_is_one_that_never_did(commands: Commands, tmp_path: Path) -> None:
    """Five times, each after some steps on another mesh; checkpoint by checkpoint, line by line."""
    several = (*MESH_222[:-1], 8)
    meshes = [
        (),
        (*several, "--optimizer.zero", 3, "--pipeline.weight-gradients", "deferred"),
        ("--mesh.tensor", 4, "--sequence-parallel", "--simulate-devices", 4),
        ("--mesh.data", 8, "--simulate-devices", 8),
        (*several, "--sequence-parallel", "--train.remat", "layer"),
        ("--mesh.pipe", 2, "--pipeline.schedule", "gpipe", "--simulate-devices", 2),
    ]
    kept = ("--bitwise", 4, "--checkpoint.every", 2, "--checkpoint.keep", 10)
    alone = {"env": os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}}
    folders = tmp_path / "straight", tmp_path / "moved"

    def start(folder: Path, *mesh: object) -> subprocess.Popen[str]:
        return commands.start("train.py", commands.preset, "--run-dir", folder, *kept, *mesh, **alone)

    finish(start(folders[0])).ok()
    for number, mesh in enumerate(meshes[:-1], start=1):
        process = start(folders[1], *mesh)
        while not (folders[1] / "checkpoints" / str(3 * number + number % 2)).exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.kill()
        process.communicate()
    finish(start(folders[1], *meshes[-1])).ok()
    assert curve(folders[1]) == curve(folders[0]) and validation(folders[1]) == validation(folders[0])
    assert checkpoint_steps(folders[1]) == checkpoint_steps(folders[0]) == list(range(2, 21, 2))
    for step in range(2, 21, 2):
        assert_same_checkpoint(*folders, step)


@pytest.mark.full
def test_resume_with_a_split_sequence_and_with_unrolled_layers(commands: Commands, straight: Run, begun: Path) -> None:
    """On (2, 2, 2) with ZeRO-3, then on data parallelism with what overlaps on GPUs."""
    split = ("--optimizer.zero", 3, "--sequence-parallel", "--train.microbatch", 2, "--train.steps", 15)
    commands.train(begun, *MESH_222, *split, "--resume", "must")
    overlapped = ("--optimizer.overlap-gathers", "true", "--optimizer.overlap-reductions", "true")
    commands.train(begun, *UNROLLED, "--mesh.data", 2, "--simulate-devices", 2, *overlapped)
    assert curve(begun)[:10] == curve(straight.folder)[:10]
    assert_close_losses(curve(begun), curve(straight.folder))
