"""The generation benchmark as a command: both sides generate the same, and what its JSON says is consistent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SIZES = {"num-layers": 2, "hidden-size": 48, "num-heads": 4, "sequence-length": 32, "vocab-size": 99}


@pytest.mark.peer
def test_both_sides_generate_the_same_ids():
    pytest.importorskip("transformers", reason="the extra `peer` is not installed")
    script = Path(__file__).parents[2] / "benchmarks" / "generation.py"
    small = [word for option, size in SIZES.items() for word in (f"--model.{option}", str(size))]
    flags = ["--batch", "3", "--prompt-tokens", "5", "--new-tokens", "20", "--threads", "1", "--rounds", "1", "--json"]
    done = subprocess.run([sys.executable, str(script), *small, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])["batches"]
    assert result["same_ids"]
    assert result["tokens_per_second"] == pytest.approx(3 * 20 / result["seconds"]["megajax"][0])
    assert result["ratio"] == pytest.approx(result["tokens_per_second"] / result["peer_tokens_per_second"])
