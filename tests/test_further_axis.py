"""A further axis of the mesh is one line of `megajax/axes.py` and one field of `MeshConfig`: in a copy of the package
with one more axis of rows the demo, made small, trains as on one device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = {  # by file: the line before, and the new one
    "axes.py": ('    "data": {"rows"},', '    "further": {"rows"},'),
    "config.py": ("    tensor: Annotated[", '    further: Annotated[int, "one more axis of rows", _AXIS] = 1'),
}
TRAIN = """
import dataclasses
import jax
import numpy as np

from megajax.config import MeshConfig
from megajax.settings.presets import load_preset, resolve
from megajax.program.program import Program
from megajax.program.transfer import Transfer
from megajax.parallel.collectives import spec_axes
from megajax.verify.check import exact, all_checks, one_device
from megajax.verify.run import run
from megajax.verify.shrink import shrink

jax.config.update("jax_num_cpu_devices", 8)
mesh = {"mesh.data": 2, "mesh.further": 2, "mesh.tensor": 2}
small = shrink(resolve(load_preset("demo"), mesh), 8).config
reference = run(one_device(small), jax.devices(), 2, with_fresh=True)
for zero in (1, 3):
    config = exact(dataclasses.replace(small, optimizer=dataclasses.replace(small.optimizer, zero=zero)))
    layout = Program.on(config).layout
    sharded = [{"data", "further"} <= spec_axes(spec) for spec in jax.tree.leaves(layout.trained_specs)]
    assert dict(layout.mesh.shape) == {"data": 2, "further": 2, "pipe": 1, "tensor": 2} and any(sharded), sharded
    found = list(all_checks(reference, run(config, jax.devices(), 2, with_fresh=True)))
    assert found and all(finding.passed for finding in found), "\\n".join(map(str, found))
alone = dataclasses.replace(small, mesh=MeshConfig(further=2), train=dataclasses.replace(small.train, microbatch=1))
layout = Program.on(alone, jax.devices()[:2]).layout
state, transfer = layout.init(), Transfer(layout)
back = transfer.to_devices(transfer.to_host(state))
assert jax.tree.all(jax.tree.map(lambda one, other: (np.asarray(one) == np.asarray(other)).all(), state, back))
"""


def test_a_further_axis_of_rows_trains_as_one_device(tmp_path: Path, compiled: Path) -> None:
    """ZeRO 1 and 3 on data 2 x further 2 x tensor 2: losses, gradients, weights, rows and communication; and a state
    goes to its checkpoint's form and back where one of the axes of rows has size 1."""
    shutil.copytree(ROOT / "megajax", tmp_path / "megajax", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, (before, line) in LINES.items():
        file = tmp_path / "megajax" / name
        lines = file.read_text().splitlines()
        (index,) = (index for index, text in enumerate(lines) if text.startswith(before))
        lines.insert(index + 1, line)
        file.write_text("\n".join(lines) + "\n")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05"}
    environment = os.environ | cache | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", TRAIN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
