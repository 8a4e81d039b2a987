"""The commands as a user runs them, in the tests' process or in one of their own."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inside import call

ROOT = Path(__file__).parents[2]
SECONDS = 400  # no command takes a tenth of this alone on a core

MESH_222 = ("--mesh.data", 2, "--mesh.pipe", 2, "--mesh.tensor", 2, "--simulate-devices", 8)

PRESET = """\
[model]
num_layers = 3  # not divisible by a pipe of 2
hidden_size = 32
num_heads = 4
sequence_length = 32
vocab_size = 300
vocab_multiple = 64
scan_layers = true  # a smaller program; test_resume.py goes on with unrolled layers

[train]
steps = 20
global_batch = 8
microbatch = 1
eval_every = 10
eval_batches = 0  # the whole split
log_every = 4

[optimizer]
learning_rate = 3e-3
warmup_steps = 5
decay_steps = 20

[data]
path = "{corpus}"
validation_fraction = 0.1

[checkpoint]
every = 5
keep = 3

[sample]
tokens = 0
"""


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def ok(self) -> str:
        """What a command printed that must have succeeded."""
        assert self.code == 0, (self.code, self.out, self.err)
        return self.out


@dataclass(frozen=True)
class Run:
    """A finished run of train.py that tests share: look, don't write."""

    folder: Path
    finished: Finished


@dataclass(frozen=True)
class Commands:
    """Runs commands in this process, or in one of their own where that is the point."""

    preset: Path

    def start(self, script: object, *arguments: object, **given: Any) -> subprocess.Popen[str]:
        """`python SCRIPT ARGUMENTS...` in the repository's root; `given` is for `Popen`."""
        line = [sys.executable, str(script), *map(str, arguments)]
        given = {"stdout": subprocess.PIPE, "env": os.environ | {"JAX_PLATFORMS": "cpu"}} | given
        return subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True, **given)

    def run_process(self, script: object, *arguments: object) -> Finished:
        """Start a command as a process and wait for its end."""
        return finish(self.start(script, *arguments))

    def run(self, script: str, *arguments: object) -> Finished:
        """A command in this process: the same code, the same output (see `inside`)."""
        return Finished(*call(script, *arguments))

    def train(self, run_dir: Path, *arguments: object, preset: object = None) -> Finished:
        """Train in `run_dir` by the tests' preset; must succeed."""
        done = self.run("train.py", preset or self.preset, "--run-dir", run_dir, *arguments)
        done.ok()
        return done

    def perplexity(self, run_dir: Path, *arguments: object) -> dict[str, Any]:
        """The figures of `eval.py perplexity`; must succeed."""
        return self.evaluate("perplexity", run_dir, *arguments)

    def evaluate(self, task: str, run_dir: Path, *arguments: object) -> dict[str, Any]:
        """What `eval.py TASK` prints as its last line; must succeed."""
        return json.loads(self.run("eval.py", task, "--checkpoint", run_dir, *arguments).ok().splitlines()[-1])


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start_several(commands: Commands, count: int, *line: object) -> list[subprocess.Popen[str]]:
    """A command as processes on this machine."""
    if count == 1:
        return [commands.start(*line)]
    cluster = ("--distributed.coordinator", f"localhost:{free_port()}", "--distributed.num-processes", count)
    return [commands.start(*line, *cluster, "--distributed.process-id", number) for number in range(count)]


def finish(process: subprocess.Popen[str]) -> Finished:
    """Wait for a process's end; one that takes too long is killed."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end after {SECONDS} s: {process.args}\n{out}\n{err}") from None
    return Finished(process.returncode, out or "", err)


def made_once(folder: Path, make: Callable[[], Finished | None]) -> Finished | None:
    """Call `make`, which makes `folder`, unless another of pytest's workers did; returns what it returned."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.parent / f"{folder.name}.done"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        if not done.exists():
            made = make()
            done.write_text(json.dumps(made and asdict(made)))
    found = json.loads(done.read_text())
    return found and Finished(**found)
