"""The throughput benchmark as a command: what its JSON says is consistent with itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

THROUGHPUT = Path(__file__).parents[2] / "benchmarks" / "throughput.py"
SMALL = (
    "--model.num-layers 1 --model.hidden-size 64 --model.num-heads 2 --model.sequence-length 64 --model.vocab-size 500"
)


def run(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(THROUGHPUT), *SMALL.split(), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_our_side_alone(family: str):
    done = run("--model.family", family, "--threads", "1", "--rounds", "2", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["tokens_per_second"] == pytest.approx(4 * 64 / report["seconds_per_step"])
    assert report["tflops"] < report["matmul_tflops"] and 0 < report["matmul_share"] < 1
    assert "ratio" not in report and "peer_tokens_per_second" not in report
    assert report["run"]["threads"] == 1 and report["run"]["sides"]["megajax"]["jax"]


@pytest.mark.parametrize(
    "flags",
    ["--threads 99", *(pytest.param(flags, marks=pytest.mark.full) for flags in ("--device tpu", "--model.layers 3"))],
)
def test_bad_flags_are_one_line(flags):
    done = run(*flags.split())
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and flags.split()[0].strip("-") in done.stderr
