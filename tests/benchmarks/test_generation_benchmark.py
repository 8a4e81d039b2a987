"""The benchmark of generation as a command: both sides find the same ids, and its figures are consistent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GENERATION = Path(__file__).parents[2] / "benchmarks" / "generation.py"
SIZES = {"num-layers": 2, "hidden-size": 48, "num-heads": 4, "sequence-length": 32, "vocab-size": 99}
SMALL = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]


def run(*flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(GENERATION), *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.peer
def test_both_sides_find_the_same_ids():
    pytest.importorskip("transformers", reason="the extra `peer` is not installed")
    flags = "--batch 3 --prompt-tokens 5 --new-tokens 20 --threads 1 --rounds 1 --json"
    done = run(*flags.split())
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["batches"]
    assert result["same_ids"]
    assert result["tokens_per_second"] == pytest.approx(3 * 20 / result["seconds"]["megajax"][0])
    assert result["ratio"] == pytest.approx(result["tokens_per_second"] / result["peer_tokens_per_second"])


@pytest.mark.parametrize("flags", ["--new-tokens 64", pytest.param("--batch x", marks=pytest.mark.full)])
def test_bad_flags_are_one_line(flags):
    done = run(*flags.split())
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and flags.split()[0] in done.stderr
