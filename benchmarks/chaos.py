"""Nothing is lost: a run on (2, 2, 2) in two processes is killed and stopped again and again, and ends with the
same losses.

    python benchmarks/chaos.py [--steps 200] [--kills 10] [--stops 10] [--hangups 10] [--seed 0] [--folder FOLDER]

SIGKILL, SIGTERM or SIGHUP goes to one process or both, at random moments: a third of them within the seconds that a
start takes, the others after a random number of new steps, so while it trains, validates or saves. The last half of
the starts are on other meshes and numbers of processes. At the end: every step is recorded once, the losses are those
of an undisturbed run, bit for bit up to the first start on another mesh.
"""

import argparse
import collections
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from megajax.core.errors import RunError
from megajax.host.ending import run

ROOT = Path(__file__).parents[1]
USUAL = 2, 4, (2, 2, 2)  # processes, devices of each, mesh
OTHERS = [(1, 8, (2, 2, 2)), (1, 1, (1, 1, 1)), (2, 1, (1, 2, 1)), (1, 4, (4, 1, 1)), (2, 2, (1, 2, 2))]
LONGEST = 600.0  # seconds that new steps are waited for
PATIENCE = 40.0  # seconds after which what still waits for a process that never came is killed (JAX waits for 300)

PRESET = """\
[model]
num_layers = 3
hidden_size = 32
num_heads = 4
sequence_length = 32
vocab_size = 300
vocab_multiple = 64
[train]
steps = {steps}
global_batch = 8
microbatch = 1
eval_every = 20
eval_batches = 2
log_every = 1000
[optimizer]
learning_rate = 3e-3
warmup_steps = 5
decay_steps = {steps}
[data]
path = "{corpus}"
validation_fraction = 0.1
[checkpoint]
every = 7
keep = 3
[sample]
tokens = 0
"""


@dataclass
class Chaos:
    """A run and what happened to it.

    Attributes:
        said: how often a process ended with an exit code and a last line.
        noise: standard errors of more than the lines that are meant to be there.
        slowest: seconds from a disturbance to the end of the last process.
        waiting: disturbances after which a process had to be killed, because it waited longer than `PATIENCE`.
        other_mesh: the step after which the first start on another mesh went on; None before.
    """

    folder: Path
    preset: Path
    said: collections.Counter[tuple[int, str]] = field(default_factory=collections.Counter)
    noise: list[str] = field(default_factory=list)
    slowest: float = 0.0
    waiting: int = 0
    other_mesh: int | None = None

    def start(self, kind: tuple[int, int, tuple[int, int, int]]) -> list[subprocess.Popen[str]]:
        """The processes of one start."""
        processes, devices, (data, pipe, tensor) = kind
        line = [sys.executable, "train.py", self.preset, "--run-dir", self.folder, "--simulate-devices", devices]
        line += ["--mesh.data", data, "--mesh.pipe", pipe, "--mesh.tensor", tensor]
        if processes > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            line += ["--distributed.coordinator", f"localhost:{port}", "--distributed.num-processes", processes]
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"), "JAX_PLATFORMS": "cpu"}
        environment = os.environ | cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
        started = []
        for number in range(processes):
            own = ["--distributed.process-id", number] if processes > 1 else []
            started.append(
                subprocess.Popen(
                    list(map(str, [*line, *own])),
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    def end(self, processes: list[subprocess.Popen[str]]) -> None:
        """Wait for the end of all."""
        began = time.monotonic()
        for process in processes:
            try:
                error = process.communicate(timeout=PATIENCE)[1]
            except subprocess.TimeoutExpired:
                self.waiting += 1
                for each in processes:
                    each.kill()
                error = process.communicate()[1]
            code, last = process.returncode, (error.splitlines() or [""])[-1]
            last = last.replace(str(self.folder), "RUN") if code != -signal.SIGKILL else ""
            self.said[code, re.sub(r"\(.*\)|\d[\d.:-]*", "N", last)[:150]] += 1
            lines = [line for line in error.splitlines() if "waiting for the other processes" not in line]
            if (code != -signal.SIGKILL and len(lines) > 2) or "Traceback" in error:
                self.noise.append(error)
                with (self.folder.parent / "noise.txt").open("a") as file:
                    file.write(f"exit code {code}:\n{error}\n")
        self.slowest = max(self.slowest, time.monotonic() - began)

    def steps(self) -> list[dict[str, float]]:
        """The training lines of metrics.jsonl."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last may be under way
        return [record for record in map(json.loads, lines) if "loss" in record]

    def step(self) -> int:
        """The newest step that is recorded; 0 without one."""
        return max((int(record["step"]) for record in self.steps()), default=0)

    def saved(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return max(
            (int(entry.name) for entry in self.folder.glob("checkpoints/*") if entry.name.isdecimal()), default=0
        )

    def file(self) -> int | None:
        """The number of metrics.jsonl, which every start writes anew when it begins to train."""
        file = self.folder / "metrics.jsonl"
        return file.stat().st_ino if file.exists() else None


def disturb(chaos: Chaos, rng: random.Random, number: int, same_mesh: bool, seconds: float, steps: int) -> str:
    """One start, and one signal at a random moment of it: within so many seconds of its start, or of so many new steps.

    Returns:
        in words, what kind of start and when; empty if the run ended before the signal.
    """
    kind = USUAL if same_mesh else rng.choice(OTHERS)
    if not same_mesh and chaos.other_mesh is None:
        chaos.other_mesh = chaos.saved()
    saved, before = chaos.saved(), chaos.file()
    processes = chaos.start(kind)
    began = time.monotonic()
    wanted = rng.randint(1, steps) if rng.random() < 2 / 3 else None
    moment = began + (LONGEST if wanted else rng.uniform(0, seconds))
    while time.monotonic() < moment and all(process.poll() is None for process in processes):
        time.sleep(0.02)
        if wanted and chaos.file() not in (None, before) and chaos.step() >= saved + wanted:
            moment, wanted = time.monotonic() + rng.uniform(0, 0.5), None
    alive = [process for process in processes if process.poll() is None]
    targets = alive if rng.random() < 0.5 else [rng.choice(alive)] if alive else []
    for process in targets:
        process.send_signal(number)
    after = time.monotonic() - began
    chaos.end(processes)
    codes = ", ".join(str(process.returncode) for process in processes)
    told = f"{signal.Signals(number).name} to {len(targets)} of {len(processes)} on {kind[2]} after {after:.1f} s"
    return f"{told}: exit codes {codes}" if alive else ""


def main() -> None:
    """Run it undisturbed and disturbed, and compare.

    Raises:
        RunError: something was lost.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--hangups", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup the runs would ignore it
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(exist_ok=True, parents=True)
    rng = random.Random(options.seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(60)]
    corpus, preset = folder / "corpus.txt", folder / "preset.toml"
    corpus.write_text("\n\n".join(" ".join(rng.choices(words, k=50)) for _ in range(80)))
    preset.write_text(PRESET.format(steps=options.steps, corpus=corpus))

    calm = Chaos(folder / "calm", preset)
    for _ in range(2):  # the second start finds everything compiled and says how long one takes
        began = time.monotonic()
        for process in (started := calm.start(USUAL)):
            process.wait()
        calm.end(started)
    idle = time.monotonic() - began
    expected = calm.steps()
    chaos = Chaos(folder / "chaos", preset)
    signals = [signal.SIGKILL] * options.kills + [signal.SIGTERM] * options.stops + [signal.SIGHUP] * options.hangups
    rng.shuffle(signals)
    began, delivered = time.monotonic(), 0
    for place, number in enumerate(signals):
        steps = 2 * options.steps // len(signals) + 8  # a kill costs up to 7
        told = disturb(chaos, rng, number, place < len(signals) / 2, idle, steps)
        delivered += bool(told)
        reached = f"step {chaos.step()}, saved {chaos.saved()}"
        print(f"{place + 1}: {told or 'ended before its signal'}; {reached}", flush=True)
    for process in (last := chaos.start(USUAL)):
        process.wait()
    chaos.end(last)
    for error in chaos.noise[:3]:
        print(error, file=sys.stderr)
    if any(process.returncode for process in last):
        raise RunError(f"the last start, which nobody disturbed, ended with {[each.returncode for each in last]}")
    found = chaos.steps()
    if [record["step"] for record in found] != list(range(1, options.steps + 1)):
        raise RunError(f"steps are missing or twice in {chaos.folder / 'metrics.jsonl'}")
    same = chaos.other_mesh or options.steps
    pairs = list(zip(found, expected, strict=True))
    equal = sum(a["loss"] == b["loss"] and a["grad_norm"] == b["grad_norm"] for a, b in pairs[:same])
    worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs)
    result = {
        "signals": len(signals),
        "delivered": delivered,
        "steps": len(found),
        "bit_for_bit": f"{equal} of {same}",
        "largest_relative_difference": worst,
        "tracebacks_or_noise": len(chaos.noise),
        "still_waiting": chaos.waiting,
        "slowest_end_s": round(chaos.slowest, 1),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    for (code, line), count in sorted(chaos.said.items()):
        print(f"{count} with exit code {code}: {line}")
    if equal < same or worst > 1e-4:
        raise RunError("the losses are not those of the undisturbed run")


if __name__ == "__main__":
    run(main)
