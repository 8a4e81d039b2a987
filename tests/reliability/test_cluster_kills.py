"""A preparation on a Dask cluster whose workers and scheduler are killed at random moments ends with the bytes of one
process."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import finish, free_port

sys.path.insert(0, str(Path(__file__).parents[1] / "preparation"))
from test_planted import DIFFERENT, Planted, files, plant, report

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="needs dask[distributed]"),
]

SMALL_SHARDS = "import megajax.preparation.division as d, runpy; d.SHARD_BYTES = (1 << 16,) * 3; "  # for many tasks
PREPARE = SMALL_SHARDS + "runpy.run_module('megajax', run_name='__main__')"


class Cluster:
    """A scheduler and workers, each started anew when it ends."""

    def __init__(self, workers: int) -> None:
        port = free_port()
        self.address, flags = f"tcp://127.0.0.1:{port}", ["--host", "127.0.0.1", "--no-dashboard"]
        worker = ["worker", self.address, "--nthreads", "1", "--no-nanny", "--memory-limit", "0", *flags]
        self._commands = [["scheduler", "--port", str(port), *flags], *[worker] * workers]
        self.processes = [self._start(command) for command in self._commands]

    @staticmethod
    def _start(command: list[str]) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "dask", *command], stderr=subprocess.DEVNULL)

    def renew(self) -> None:
        """Start again what has ended."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self.processes[number] = self._start(self._commands[number])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(2)
    yield cluster
    cluster.close()


def prepare(planted: Planted, prefix: Path, *flags: str) -> subprocess.Popen:
    line = [planted.corpus, "--output", prefix, "--vocab-size", "400", *flags]
    command = [sys.executable, "-c", PREPARE, "prepare", *map(str, line)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_the_same_bytes(cluster: Cluster, tmp_path: Path, rng: random.Random, rounds: int) -> None:
    """The command is repeated where it ends with a line that says that it can be resumed."""
    planted = plant(tmp_path, documents=1200)
    finish(prepare(planted, tmp_path / "alone", "--workers", "1")).ok()
    expected = report(tmp_path / "alone")
    left, number = rng.sample(["worker"] * 4 * rounds + ["scheduler"] * rounds, k=5 * rounds), 0
    while left:
        prefix, number = tmp_path / f"run-{number}", number + 1
        while True:
            process, due = prepare(planted, prefix, "--cluster", cluster.address), time.monotonic() + rng.uniform(2, 8)
            while process.poll() is None:
                cluster.renew()
                if left and time.monotonic() > due:
                    victim = 0 if left.pop() == "scheduler" else rng.randrange(1, len(cluster.processes))
                    os.kill(cluster.processes[victim].pid, signal.SIGKILL)
                    cluster.processes[victim].wait()
                    due = time.monotonic() + rng.uniform(2, 8)
                time.sleep(0.05)
            done = finish(process)
            assert "Traceback" not in done.err, done.err
            if done.code == 0:
                break
            assert "to resume" in done.err.splitlines()[-1], done
        found = report(prefix)
        assert files(prefix) == files(tmp_path / "alone")
        assert {key for key in expected if expected[key] != found[key]} <= DIFFERENT | {"resumed"}
