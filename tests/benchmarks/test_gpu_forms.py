"""What `gpu.sh` does with an implementation of attention that ends its process, or hangs."""

import os
import sys
from pathlib import Path

import pytest

WORKER = """
import json, sys, time
first = int(sys.argv[sys.argv.index("--first") + 1])
for number in range(first, 3):
    print("a line of a library", json.dumps({"number": number}))
    print(json.dumps({"number": number, "begun": True}), flush=True)
    if number == 1:
        WHAT_IT_DOES
    print(json.dumps({"number": number, "right": True}), flush=True)
"""


@pytest.mark.parametrize("does", ["sys.exit(139)", "time.sleep(60)"])
def test_a_case_that_ends_the_process_is_one_that_failed(does, tmp_path, monkeypatch):
    """The others are measured by another process."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gpu_forms

    monkeypatch.setattr(gpu_forms, "HANGS", 1.0)
    monkeypatch.setattr(gpu_forms, "STARTING", 1.0)
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace("WHAT_IT_DOES", does))
    found = list(gpu_forms.cases(str(script), "kernel", "gpu", 60, os.environ))
    assert found == [
        {"number": 0, "right": True},
        {"number": 1, "failed": gpu_forms.ENDED},
        {"number": 2, "right": True},
    ]
    sys.modules.pop("gpu_forms")
