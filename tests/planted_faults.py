"""Would the default tests notice? `python tests/planted_faults.py [NAME ...]` plants one fault at a time in a copy of
the repository, runs the tests that should find it, and prints whether they did.

A fault is a text of `megajax/` that must occur exactly once, whatever file it lies in, and what takes its place. It
counts as caught where a test fails, not where nothing can be imported or no test was selected.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = os.environ.get("MEGAJAX_TEST_DATA") or str(ROOT.parent / "shared" / "data")


@dataclass(frozen=True)
class Fault:
    """Attributes:
    old, new: text in `megajax/`, and the fault in its place.
    tests: arguments of pytest that select default tests.
    """

    old: str
    new: str
    tests: str


FAULTS = {
    "complete leaves an axis out": Fault(
        "sorted(varying_axes(leaf) - axes)", "sorted(varying_axes(leaf) - axes - {TENSOR})", "tests/test_parity.py"
    ),
    "a reduce-scatter does not sum": Fault(
        "return lax.psum_scatter(x, axes, scatter_dimension=dim % x.ndim, tiled=True)",
        "return own_shard(x, dim % x.ndim, axes)",
        "tests/test_parity.py",
    ),
    "the tied embedding's gradient is not summed over the pipe": Fault(
        "return lax.psum(tree, tuple(axes)) if axes else tree",
        "tree = lax.psum(tree, rest) if (rest := tuple(axis for axis in axes if axis != PIPE)) else tree\n"
        "    return jax.tree.map(lambda x: lax.pmax(x, PIPE), tree) if PIPE in axes else tree",
        "tests/test_parity.py",
    ),
    "a stale slot of the ring buffer": Fault(
        'slots[row.backward.slot], buffer["residuals"]',
        'slots[row.backward.slot * 0], buffer["residuals"]',
        "tests/test_parity.py",
    ),
    "a weight gradient from the factors beside its own": Fault(
        "sums, number % num_slots)", "sums, (number + 1) % num_slots)", "tests/test_parity.py -k deferred"
    ),
    "factors are left in the slot of the backward before": Fault(
        "slot = (backward.active.cumsum(0) - 1) %",
        "slot = (backward.active.cumsum(0) - 2) %",
        "tests/test_parity.py -k deferred",
    ),
    "of a tick's weight gradients one runs": Fault(
        "turns.first, turns.first + turns.count, run",
        "turns.first, turns.first + (turns.count > 0), run",
        "tests/test_parity.py -k deferred",
    ),
    "a weight gradient of another chunk's layers": Fault(
        "own = chunk[number] if", "own = 0 * chunk[number] if", "tests/test_parity.py -k deferred"
    ),
    "weight gradients of padded layers": Fault(
        "found = when(index < 0 if self.padded else False, none, gradients)",
        "found = gradients()",
        "tests/test_parity.py -k idle",
    ),
    "the gradient of shared heads of keys is the first head's": Fault(
        "gradient, self._part, 1)", "gradient, 0 * self._part, 1)", "tests/test_parity.py -k decoders"
    ),
    "ZeRO takes another device's shard": Fault(
        "axis_index(axes) * size, size, dim",
        "(axis_size(axes) - 1 - axis_index(axes)) * size, size, dim",
        "tests/test_parity.py",
    ),
    "the first head of keys for all that share them": Fault(
        "part = axis_index(TENSOR) * self.parts // axis_size(TENSOR)",
        "part = axis_index(TENSOR) * 0",
        "tests/models/test_decoder_forward.py",
    ),
    "gradients of shared heads of keys are summed in every layer": Fault(
        "return bool(_IN_REGIONS & {*logical}) and", "return False and", "tests/test_communication.py -k held"
    ),
    "a cache sees one token beyond the window": Fault(
        "visible_BS & (own_B1 - position_BS < window)",
        "visible_BS & (own_B1 - position_BS <= window)",
        "tests/models/test_cache.py",
    ),
    "keys are turned by another angle than queries": Fault(
        "rotated(k_BSHK, position_BT, self.rotary)",
        "rotated(k_BSHK, position_BT + 1, self.rotary)",
        "tests/models/test_decoder_forward.py",
    ),
    "dropout does not depend on the step": Fault(
        ".fold(step).fold(sample_B)", ".fold(sample_B)", "tests/models/test_gpt_forward.py"
    ),
    "dropout does not know the sample": Fault(
        ".fold(step).fold(sample_B)", ".fold(step).fold(0 * sample_B)", "tests/models/test_gpt_forward.py"
    ),
    "gradients keep the loss scale": Fault(
        "grad.astype(dtype) / loss_scale.astype(dtype)",
        "grad.astype(dtype)",
        "tests/test_parity.py -k half",
    ),
    "a skipped step counts": Fault("step=state.step + taken.astype(jnp.int32)", "step=state.step + 1", "tests/program"),
    "attention sees the next token": Fault(
        "key_S[None, :] <= query_T[:, None]", "key_S[None, :] <= query_T[:, None] + 1", "tests/models"
    ),
    "the learning rate is a step ahead": Fault(
        "now = jnp.asarray(step, dtype=float)", "now = jnp.asarray(step + 1, dtype=float)", "tests/optim"
    ),
    "the data order is off by one": Fault("first + row]", "first + row + 1]", "tests/data"),
    "a checkpoint's digest is not compared": Fault(
        "if sums.get(name) != actual[name]", "if sums.get(name) is None", "tests/runs/test_checkpoint.py"
    ),
    "a resumed run skips a batch": Fault(
        "start_step=self.first", "start_step=self.first + (self.first > 0)", "tests/commands/test_resume.py"
    ),
    "a preparation replaces its input": Fault(
        "check_apart(task.output, inputs,",
        "list((task.output, inputs,)) + list(",
        "tests/preparation/test_prepare_foreign.py",
    ),
    "a link in a run directory is followed": Fault(
        '"a link" if part.is_symlink() else', '"a link" if not name else', "tests/commands/test_foreign_files.py"
    ),
    "what does not fit is allocated": Fault(
        "if sum(parts.values()) > there:",
        "if sum(parts.values()) > 1e30 * there:",
        "tests/program/test_memory.py -k refused",
    ),
}


def plant(fault: Fault, folder: Path) -> None:
    """Put the fault in the one file of `folder` that has its text."""
    found = [file for file in folder.glob("megajax/**/*.py") if fault.old in file.read_text()]
    if len(found) != 1 or found[0].read_text().count(fault.old) != 1:
        sys.exit(f"not exactly once in megajax: {fault.old!r}; aim it anew")
    found[0].write_text(found[0].read_text().replace(fault.old, fault.new))


def main(names: list[str]) -> None:
    """Try the faults of these names, or all."""
    missed = []
    for name in names or FAULTS:
        fault = FAULTS[name]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
            plant(fault, Path(folder))
            command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {fault.tests}"
            environment = os.environ | {"MEGAJAX_TEST_DATA": DATA}
            done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True)
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        caught = bool(failed)
        missed += [] if caught else [name]
        verdict = "caught" if caught else f"MISSED (pytest ended with {done.returncode})"
        print(f"{verdict:<8}{time.monotonic() - began:5.0f} s  {name}", flush=True)
        print(f"    {failed[0][:150] if caught else done.stdout[-2000:]}", flush=True)
    sys.exit(f"missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
