"""What is said of a planted fault by what should catch it."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from fault import ROOT, Fault, planted
from tiny import tiny_config

from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step_with_gradients
from megajax.settings.config import Config
from megajax.verify.beside import beside_training
from megajax.verify.check import verify
from megajax.verify.exact import compare_exactly
from megajax.verify.fields import run_step
from megajax.verify.forms import in_blocks, plain, steady

# Small, with a first update of full size, and all gradients clipped.
SMALL = {
    **{"precision": "fp64", "num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": 8},
    **{"vocab_size": 21, "vocab_multiple": 8, "global_batch": 4, "microbatch": 1},
}


def small_config(on: dict[str, Any]) -> Config:
    """The configuration that shows a fault."""
    config = tiny_config(**SMALL | on)
    optimizer = dataclasses.replace(config.optimizer, warmup_steps=0, clip_norm=0.1)
    return dataclasses.replace(config, optimizer=optimizer)


def said_of(fault: Fault) -> str:
    """Nothing if it is missed."""
    if fault.caught.by == "tests":
        return failed_test(fault)
    with planted(fault):
        config = small_config(fault.caught.on)
        if fault.caught.by in ("exact", "verify"):
            return first_difference(config, compiled=fault.caught.by == "verify")
        return refused(config)


def refused(config: Config) -> str:
    """The message with which JAX or an assertion refuses to trace the step of a configuration."""
    try:
        with jax.enable_x64(config.precision == "fp64"):
            program = Program.on(config, jax.devices()[: config.mesh.num_devices])
            train_step_with_gradients(program).trace(program.layout.shapes, program.batch_types)
    except Exception as error:  # whatever JAX raises
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def first_difference(config: Config, *, compiled: bool = True) -> str:
    return verify(config, steps=2, compiled=compiled).first


def unequal(config: Config) -> list[str]:
    """What is not exactly that of one device, in the step or else in its other branches, or else beside training:
    nothing is located, which takes several more runs."""
    config = steady(config)
    for branches in (False, True):
        steps = run_step(plain(config), branches=branches), run_step(config, in_blocks(config), branches=branches)
        if wrong := [finding.name for finding in compare_exactly(*steps) if not finding.passed]:
            return wrong
    return [finding.name for finding in beside_training(config) if not finding.passed]


def failed_test(fault: Fault) -> str:
    """The first of the fault's tests that fails in a copy of the repository with the fault in it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "build"))
        Path(folder, fault.file.relative_to(ROOT)).write_text(fault.planted_text())
        data = os.environ.get("MEGAJAX_TEST_DATA") or str(ROOT.parent / "shared" / "data")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.caught.text.split()]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"MEGAJAX_TEST_DATA": data}, capture_output=True, text=True
        )
    return next((line for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
