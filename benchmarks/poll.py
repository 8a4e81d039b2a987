"""What it costs that all processes agree after every step whether to stop: `python benchmarks/poll.py [PRESET] [flags]
[--rounds 7] [--steps 5]`, the demo by default, over data 2 in two processes.

The same two processes take steps without and with the agreement in turn, as the training loop does: what was asked
after a step is heard when its metrics are read, with the next step under way. `alone` is an agreement while nothing is
computed. A process that is alone asks nobody.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
from paired import parse_own

from megajax.core.errors import RunError
from megajax.core.program.program import Program
from megajax.core.program.synthetic import random_batch
from megajax.core.program.train_step import train_step
from megajax.host.ending import run
from megajax.host.processes import Poll, is_first_process
from megajax.settings.flags import parse
from megajax.start.launch import start


def measure(flags: list[str], rounds: int, steps: int) -> dict[str, float]:
    """Be one of the processes; seconds of a step of either kind and of an agreement."""
    config = parse(flags, "", "poll.py")
    start(config)
    program, poll = Program.on(config), Poll()
    rows = program.local_rows
    state = program.layout.init()
    batch = program.put_batch({name: x[rows] for name, x in random_batch(config, 0).items()}, rows)
    step = train_step(program).lower(state, batch).compile()

    def several(number: int, polled: bool) -> float:
        nonlocal state
        began, pending = time.perf_counter(), None
        for _ in range(number):
            state, metrics = step(state, batch)
            asked = poll.ask(lambda: (0, 0)) if polled else lambda: ()
            if pending:
                float(pending[0]["loss"])
                pending[1]()
            pending = metrics, asked
        if pending:
            float(pending[0]["loss"])
            pending[1]()
        return (time.perf_counter() - began) / number

    for polled in False, True:
        several(2, polled)
    plain, with_poll = zip(*((several(steps, False), several(steps, True)) for _ in range(rounds)), strict=True)
    jax.block_until_ready(state)
    alone = []
    for _ in range(rounds * steps):
        began = time.perf_counter()
        poll.ask(lambda: (0, 0))()
        alone.append(time.perf_counter() - began)
    return {
        "step_s": statistics.median(plain),
        "step_with_poll_s": statistics.median(with_poll),
        "ratio": statistics.median(b / a for a, b in zip(plain, with_poll, strict=True)),
        "alone_s": statistics.median(alone),
    }


def main() -> None:
    """Start both processes and print the figures.

    Raises:
        RunError: one of them failed.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    own, flags = parse_own(parser)
    if "--distributed.process-id" in flags:
        found = measure(flags, own.rounds, own.steps)
        if is_first_process():
            print(json.dumps(found), flush=True)
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    mesh = ["--mesh.data", "2", "--simulate-devices", "1", "--train.microbatch", "4"]
    mesh += ["--distributed.coordinator", address, "--distributed.num-processes", "2"]
    line = [
        sys.executable,
        __file__,
        *(flags or ["demo"]),
        *mesh,
        "--rounds",
        str(own.rounds),
        "--steps",
        str(own.steps),
    ]
    processes = [subprocess.Popen([*line, "--distributed.process-id", str(number)]) for number in range(2)]
    if any([process.wait() for process in processes]):
        raise RunError("a process failed")


if __name__ == "__main__":
    run(main)
