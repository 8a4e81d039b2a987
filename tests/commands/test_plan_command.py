"""`megajax plan`: what it prints and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megajax.cli import main
from megajax.commands import plan as command
from megajax.errors import UserError

SMALL = ["--model.num-layers", "4", "--model.hidden-size", "64", "--model.num-heads", "4", "--model.vocab-size", "500"]
SMALL += ["--model.sequence-length", "64", "--train.global-batch", "16", "--train.microbatch", "2"]
SMALL += ["--model.dropout", "0", "--precision", "fp32", "--train.remat", "none"]  # what compiles soonest


@pytest.fixture(autouse=True)
def _devices_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests have eight simulated devices already."""
    monkeypatch.setattr(command, "imagine_devices", lambda config, count=None: None)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


def test_json(capsys) -> None:
    """The last line is one object; what was compiled is what was predicted."""
    found = json.loads(
        planned(capsys, "gpt2-355m", *SMALL, "--mesh.tensor", "2", "--gpu", "a100", "--json").splitlines()[-1]
    )
    assert found["gpu"] == "a100" and found["devices"] == 2 and found["fits"]
    memory, compiled = found["memory"], found["compiled"]
    parts = set(memory) - {"total", "usable", "of_gpu"}
    assert memory["total"] == sum(memory[part] for part in parts) and len(parts) == 9
    assert compiled["communication_as_predicted"] is True and "simulated CPU devices" in compiled["compiler"]
    state = sum(memory[part] for part in ("weights", "main_weights", "moments", "batch"))
    assert 0 <= compiled["state"] - state < 1024
    assert {tuple(each["axes"]) for each in found["communication"]} == {("tensor",)}
    assert all(found[name] > 0 for name in ("step_seconds", "tokens_per_second", "mfu", "flops", "peak_bytes"))


def test_a_pipe(capsys) -> None:
    flags = [*SMALL, "--mesh.pipe", "4", "--mesh.data", "2", "--no-compile", "--json"]
    found = json.loads(planned(capsys, "gpt2-355m", *flags).splitlines()[-1])
    assert found["compiled"] is None and 0 < found["bubble"] < 1 and found["memory"]["hand_overs"] > 0
    assert {each["kind"] for each in found["communication"]} >= {"all-reduce", "permute", "reduce-scatter"}


def test_text(capsys) -> None:
    out = planned(capsys, "llama3-8b", "--mesh.data", "64", "--mesh.tensor", "8", "--gpu", "a100", "--no-compile")
    assert "on 512 a100, data 64 x pipe 1 x tensor 8; bf16, --optimizer.zero 1" in out
    assert "  weights                                      1.870\n" in out  # 8.03 / 8 billion numbers of 2 bytes
    assert "fits, " in out and "a model's figures" in out
    assert "bubble" not in out  # of one stage there is none
    too_much = planned(capsys, "llama3-8b", "--gpu", "v100", "--no-compile", "--precision", "fp16")
    assert "does not fit, " in too_much


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt2-8.3b", "--gpu", "h300"], r"--gpu 'h300'.*; valid: h100, h200, a100, v100, b200"),
        (["gpt2-8.3b", "--gpu", "v100"], "--precision bf16 with --gpu v100.*; valid: .*fp16"),
        (["gpt2-8.3b", "--mesh.tensor", "7"], "valid: 1, 2, 4.*; the nearest valid mesh: .*--mesh.tensor 8$"),
        (["gpt2-8.3b", "--mesh.data", "3"], "valid: a multiple of 24; the nearest valid mesh: --mesh.data 4 "),
        (["nothing"], "nothing"),
        ([], "PRESET missing; valid: "),
        (["gpt2-8.3b", "--gpus", "h100"], "--gpus: unknown flag"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        main(["plan", *arguments])


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(64, 1, 8), (8, 8, 8)])
def test_the_largest_of_the_paper_on_512_devices(mesh: tuple[int, int, int]) -> None:
    """A process of its own, as a user starts it."""
    flags = [f"--mesh.{axis}={size}" for axis, size in zip(("data", "pipe", "tensor"), mesh, strict=True)]
    command = [sys.executable, "-m", "megajax", "plan", "gpt2-8.3b", *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["devices"] == 512 and found["compiled"]["communication_as_predicted"]
    assert found["peak_bytes"] < 2 * 2**30
    assert found["compiled"]["predicted_temporaries"] == pytest.approx(found["compiled"]["temporaries"], rel=0.15)
