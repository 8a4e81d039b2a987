"""The benchmarks as commands: what their JSON says is consistent with itself, a bad flag is told in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import full

SIZES = {
    "generation": {"num-layers": 2, "hidden-size": 48, "num-heads": 4, "sequence-length": 32, "vocab-size": 99},
    "throughput": {"num-layers": 1, "hidden-size": 64, "num-heads": 2, "sequence-length": 64, "vocab-size": 500},
}


def run(name: str, flags: str) -> subprocess.CompletedProcess:
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    small = [word for option, size in SIZES[name].items() for word in (f"--model.{option}", str(size))]
    command = [sys.executable, str(script), *small, *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.peer
def test_both_sides_generate_the_same_ids():
    pytest.importorskip("transformers", reason="the extra `peer` is not installed")
    done = run("generation", "--batch 3 --prompt-tokens 5 --new-tokens 20 --threads 1 --rounds 1 --json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["batches"]
    assert result["same_ids"]
    assert result["tokens_per_second"] == pytest.approx(3 * 20 / result["seconds"]["megajax"][0])
    assert result["ratio"] == pytest.approx(result["tokens_per_second"] / result["peer_tokens_per_second"])


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_throughput_of_our_side_alone(family: str):
    done = run("throughput", f"--model.family {family} --threads 1 --rounds 2 --steps 1 --json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tokens_per_second"] == pytest.approx(4 * 64 / report["seconds_per_step"])
    assert report["tflops"] < report["matmul_tflops"] and 0 < report["matmul_share"] < 1
    assert "ratio" not in report and "peer_tokens_per_second" not in report
    assert report["run"]["threads"] == 1 and report["run"]["sides"]["megajax"]["jax"]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("generation", "--new-tokens 64"),
        ("throughput", "--threads 99"),
        full("generation", "--batch x"),
        full("throughput", "--device tpu"),
        full("throughput", "--model.layers 3"),
    ],
)
def test_bad_flags_are_one_line(name: str, flags: str):
    done = run(name, flags)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and flags.split()[0].strip("-") in done.stderr
