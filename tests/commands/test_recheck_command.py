"""`--train.recheck` ends a run with exit code 3 and the name of the device, or goes on."""

import re
from pathlib import Path

import pytest
from processes import Commands
from results import records

FAULTY = """\
import jax.numpy as jnp
from megajax.core.parallel.collectives import axis_index
from megajax.core.program.bind import BoundModel

layer = BoundModel.layer


def faulty(self, weights, factors, number, x, context):
    y, figures = layer(self, weights, factors, number, x, context)
    here = (axis_index("data") == 2) & (number == 0) & (self.step >= 3)
    return jnp.where(here, y.at[0, 0, 0].multiply(1 + 2**-12), y), figures


BoundModel.layer = faulty
"""


@pytest.mark.slow
def test_a_device_that_becomes_wrong_is_named(commands: Commands, tmp_path: Path, monkeypatch) -> None:
    """From the fourth step on; two of every four are rechecked."""
    from megajax.core.program.bind import BoundModel

    monkeypatch.setattr(BoundModel, "layer", BoundModel.layer)  # put back at the end
    (plugin := tmp_path / "faulty.py").write_text(FAULTY)
    line = ("--mesh.data", 4, "--simulate-devices", 4, "--train.recheck", 2, "--plugins", plugin)
    line = (commands.preset, *line, "--train.steps", 6, "--train.eval-every", 0, "--run-dir")
    ended = commands.run("train.py", *line, tmp_path / "ends")
    named = (
        r"step 4: --train.recheck found different bits in gradients or losses: data 2, device 2 \(cpu\) of process 0 on"
    )
    assert ended.code == 3 and re.search(named, ended.err), ended.err
    assert [each.get("recheck_differs") for each in records(tmp_path / "ends")] == [None, 0, None, 1]
    assert commands.run("train.py", *line, tmp_path / "goes-on", "--train.recheck-continue").code == 0
    steps = [each for each in records(tmp_path / "goes-on") if "loss" in each]
    assert [each.get("recheck_differs") for each in steps] == [None, 0, None, 1, None, 1]
    assert [each["skipped_steps"] for each in steps] == [0, 0, 0, 1, 1, 2]
    assert re.search(named, (tmp_path / "goes-on" / "log.txt").read_text())
