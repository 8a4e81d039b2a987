"""What `gpu_node.sh` makes of the cases that its runs report, and all of it on simulated devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import full

from megajax.core.errors import RunError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SAYS = """
import json, sys
part, one = sys.argv[2], "--reference" in sys.argv
print(json.dumps({"device": "some GPU", "devices": 8}))
right = {"losses": [3.0, 2.0], "norms": [1.0, 0.5]}
cases = [{"case": "dense", **right}] if one else [
    {"case": "data", "model": "dense", **right},
    {"case": "pipe", "model": "dense", "losses": [3.0, 2.0], "norms": [8.0, 4.0]},
    {"case": "tensor", "failed": "no such link"},
]
if part == "collectives":
    cases = [{"case": "permute", "ms": 2.0, "planned_ms": 1.0, "gb_per_s": 200.0, "planned_gb_per_s": 400.0}]
for number, case in enumerate(cases[: 1 if WELL else None]):
    print(json.dumps({"number": number, **case}))
"""


@pytest.mark.parametrize("well", [True, False])
def test_a_mesh_that_differs_from_one_device_is_told(well: bool, tmp_path: Path, monkeypatch) -> None:
    """Also by its gradients alone, which AdamW does not show in the losses of a few steps."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_node

    script = tmp_path / "says.py"
    script.write_text(SAYS.replace("WELL", str(well)))
    monkeypatch.setattr(gpu_node, "PARTS", {"collectives": 0.5, "axes": 0.5})
    monkeypatch.setattr(gpu_node, "command_of", lambda part, *_: ([sys.executable, str(script), "--part", part], {}))
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "gpu_node.py"), "--device", "cpu", "--out", str(tmp_path / "x")])
    if well:
        gpu_node.main()
    else:
        with pytest.raises(RunError, match="a case failed, or differs"):
            gpu_node.main()
    found, text = json.loads((tmp_path / "x.json").read_text()), (tmp_path / "x.md").read_text()
    assert found["device"] == "some GPU" and [each["case"] for each in found["collectives"]] == ["permute"]
    assert [each.get("right") for each in found["axes"]] == ([True] if well else [True, False, None])
    assert "| permute | 2.000 ms, the plan's 1.000; 200.0 GB/s, the plan's 400.0 |" in text
    assert well or ("| pipe | WRONG: losses 3.00000" in text and "| tensor | failed: no such link |" in text)
    for name in ("gpu_node", "gpu_forms", "paired"):
        sys.modules.pop(name)


@pytest.mark.parametrize("part", [full("collectives"), full("axes"), full("recipes")])
def test_it_runs_on_simulated_devices(part: str, tmp_path: Path) -> None:
    command = [BENCHMARKS / "gpu_node.sh", "--device", "cpu", "--part", part, "--out", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True)
    results = json.loads((tmp_path / "x.json").read_text())[part]
    assert done.returncode == 0, done.stdout + done.stderr
    assert results and not any("failed" in each for each in results)
    assert part != "axes" or all(each.get("right") for each in results if "left_out" not in each)
