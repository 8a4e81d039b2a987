"""Nothing is lost: a run on (2, 2, 2) in two processes is killed and stopped again and again, and ends as if it had not
been.

A signal goes to one process or both, at random moments: a third within the seconds that a start takes, the others after
a random number of new steps, so while it trains, validates or saves. The last half of the starts are on other meshes
and numbers of processes.
"""

import itertools
import random
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from disturbed import Disturbed, losses
from processes import finish, start_several

pytestmark = pytest.mark.full

Kind = tuple[int, int, tuple[int, int, int]]  # processes, devices of each, mesh
USUAL: Kind = (2, 4, (2, 2, 2))
OTHERS: list[Kind] = [(1, 8, (2, 2, 2)), (1, 1, (1, 1, 1)), (2, 1, (1, 2, 1)), (1, 4, (4, 1, 1)), (2, 2, (1, 2, 2))]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 40  # seconds after which what waits for a process that never came is killed (JAX waits for 300)


@pytest.fixture(autouse=True)
def hangups() -> Iterator[None]:
    """Under nohup the runs would ignore them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def start(here: Disturbed, kind: Kind) -> list[subprocess.Popen]:
    processes, devices, sizes = kind
    mesh = itertools.chain(*zip(("--mesh.data", "--mesh.pipe", "--mesh.tensor"), sizes, strict=True))
    line = (*here.lines["train"], "--checkpoint.every", 7, *mesh, "--simulate-devices", devices)
    return start_several(here.commands, processes, *line)


def end(processes: list[subprocess.Popen]) -> None:
    """Wait for the end of all; a process that is told to stop says so without a traceback."""
    for process in processes:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
        done = finish(process)
        assert done.code < 0 or done.code == 134 or "Traceback" not in done.out + done.err, done


def saved(here: Disturbed) -> int:
    """The newest checkpoint."""
    return max((int(entry.name) for entry in here.run.glob("checkpoints/*") if entry.name.isdecimal()), default=0)


def disturb(here: Disturbed, rng: random.Random, number: int, kind: Kind, seconds: float) -> None:
    """One start, and one signal within so many seconds of it, or of some new steps."""
    metrics, before = here.run / "metrics.jsonl", saved(here)
    old = metrics.stat().st_ino if metrics.exists() else None
    processes = start(here, kind)
    wanted = before + rng.randint(1, 40) if rng.random() < 2 / 3 else None
    moment = time.monotonic() + (600 if wanted else rng.uniform(0, seconds))
    while time.monotonic() < moment and all(process.poll() is None for process in processes):
        time.sleep(0.02)
        # Every start writes the file anew when it begins to train.
        if wanted and metrics.exists() and metrics.stat().st_ino != old and losses(here.run)[-1:] >= [(wanted,)]:
            moment, wanted = time.monotonic() + rng.uniform(0, 0.5), None
    alive = [process for process in processes if process.poll() is None]
    for process in alive if rng.random() < 0.5 else rng.sample(alive, min(1, len(alive))):
        process.send_signal(number)
    end(processes)


def test_a_run_that_is_killed_again_and_again(here: Disturbed, rng: random.Random, rounds: int) -> None:
    for _ in range(2):  # the second start finds everything compiled and says how long one takes
        began = time.monotonic()
        assert [finish(process).code for process in start(here, USUAL)] == [0, 0]
    seconds, expected = time.monotonic() - began, losses(here.run)
    assert [step for step, *_ in expected] == list(range(1, 101))
    here.run.rename(here.folder / "calm")
    signals, same = rng.sample(SIGNALS * 2 * rounds, k=6 * rounds), 0
    for place, number in enumerate(signals):
        if 2 * place == len(signals):
            same = saved(here)
        disturb(here, rng, number, USUAL if 2 * place < len(signals) else rng.choice(OTHERS), seconds)
    last = start(here, USUAL)
    assert [finish(process).code for process in last] == [0] * len(last)
    found = losses(here.run)
    assert found[:same] == expected[:same], "the same bits until the mesh changes"
    assert [step for step, *_ in found] == list(range(1, 101)), "every step once"
    for (_, loss, _), (_, wanted, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-4)
