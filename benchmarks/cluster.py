"""`megajax prepare --cluster` beside processes of one machine, and while workers and schedulers are killed.

    python benchmarks/cluster.py compare --text DIR ... --tokenizer DIR [--megabytes 50 200] [--workers 2 4] [--pairs 3]
    python benchmarks/cluster.py chaos --text DIR ... --tokenizer DIR [--megabytes 8] [--kills 20] [--scheduler-kills 5]

DIR are texts, or python-stdlib: of their documents a corpus of so many megabytes is made, in which two of ten documents
are near copies and one is an exact copy of an earlier one, four fifths as `.jsonl` and the rest as `.jsonl.zst`. The
scheduler and the workers are processes on this machine, reachable only by 127.0.0.1, each worker with one thread.
`compare` takes turns (processes, a cluster that is ready, a cluster, processes, ...) and prints each pair's ratios and
the means: wall time, the CPU seconds of all processes, of the first one and of other programs, and the peak memory of
each kind of process. `chaos` kills at random moments, restarts what it killed, repeats the command if it ended with a
line that says that it can be resumed, and compares all bytes.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from backports import zstd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megajax.data.text.records import TextDocuments

_TICK = os.sysconf("SC_CLK_TCK")
_QUIET = {"DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False", "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms"}
_SMALL_SHARDS = "import megajax.preparation.division as d; d.SHARD_BYTES = ({0},) * 3; import runpy; "


def make_corpus(folder: Path, sources: list[str], size: int) -> list[str]:
    """Files with documents of the sources, again and again, and copies of them; `size` bytes in all."""
    rng = random.Random(0)
    texts = [text[start : start + 8000] for source in sources for text in TextDocuments(source)
             for start in range(0, len(text), 8000)]  # fmt: skip
    paths = [folder / "corpus.jsonl", folder / "corpus.jsonl.zst"]
    done, recent = 0, list[str]()
    with paths[0].open("w") as plain, zstd.open(paths[1], "wt") as packed:
        while done < size:
            kind = rng.random()
            if recent and kind < 0.1:
                text = rng.choice(recent)
            else:
                words = rng.choice(recent if recent and kind < 0.3 else texts).split(" ")
                share = 0.02 if kind < 0.3 else 0.3  # of the words are others: else the second round is all copies
                text = " ".join(f"{rng.getrandbits(24):x}" if rng.random() < share else word for word in words)
                recent = [*recent[-500:], text]
            line = json.dumps({"text": text}) + "\n"
            (packed if done > 0.8 * size else plain).write(line)
            done += len(text)
    return [str(path) for path in paths]


class Cluster:
    """A scheduler and workers, each started anew when it ends."""

    def __init__(self, workers: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{port}"
        flags = ["--host", "127.0.0.1", "--no-dashboard"]
        worker = ["worker", self.address, "--nthreads", "1", "--no-nanny", "--memory-limit", "0", *flags]
        self._commands = [["scheduler", "--port", str(port), *flags], *[worker] * workers]
        self.processes = [self._start(command) for command in self._commands]

    @staticmethod
    def _start(command: list[str]) -> subprocess.Popen:
        environment = os.environ | _QUIET
        return subprocess.Popen([sys.executable, "-m", "dask", *command], stderr=subprocess.DEVNULL, env=environment)

    def wait(self) -> None:
        """Wait until all workers are there."""
        from distributed import Client

        with Client(self.address, timeout=120, set_as_default=False) as client:
            client.wait_for_workers(len(self.processes) - 1, timeout=300)

    def renew(self) -> None:
        """Start again what has ended."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self.processes[number] = self._start(self._commands[number])

    def close(self) -> None:
        """End all."""
        for process in self.processes:
            process.kill()
            process.wait()


def prepare(inputs: list[str], prefix: Path, tokenizer: str, *flags: str, shard_bytes: int = 0) -> subprocess.Popen:
    """Start the command."""
    code = _SMALL_SHARDS.format(shard_bytes) if shard_bytes else "import runpy; "
    code += "runpy.run_module('megajax', run_name='__main__')"
    arguments = ["prepare", *inputs, "--output", str(prefix), "--tokenizer", tokenizer, "--json", *flags]
    out = subprocess.DEVNULL
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=out, stderr=subprocess.PIPE, text=True)


def content(prefix: Path) -> dict[str, bytes | str]:
    """All bytes of a dataset, and its report without what is not of the data."""
    report = json.loads(Path(f"{prefix}.report.json").read_text())
    for name in "output", "seconds", "throughput", "workers", "resumed":
        del report[name]
    files = (Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx", ".tokenizer/tokenizer.json"))
    return {file.suffix: file.read_bytes() for file in files} | {"report": json.dumps(report)}


class Usage:
    """CPU seconds and largest memory of processes, looked at now and then, also of those that have ended."""

    def __init__(self) -> None:
        self.cpu, self.memory = dict[int, float](), dict[int, float]()

    def look(self, first: int, others: list[int]) -> None:
        """Look at a process, all that descend from it, and others."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        found, grown = {first, *others}, True
        while grown:
            more = {process for process, parent in parents.items() if parent in found} - found
            found, grown = found | more, bool(more)
        for process in found:
            with contextlib.suppress(OSError, IndexError, StopIteration):
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                self.cpu[process] = (int(fields[11]) + int(fields[12])) / _TICK
                status = Path(f"/proc/{process}/status").read_text().splitlines()
                peak = next(line for line in status if line.startswith("VmHWM"))
                self.memory[process] = int(peak.split()[1]) / 1024


def cpu_of_machine() -> float:
    """CPU seconds of everything that has run on this machine."""
    user, nice, system = (int(each) for each in Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / _TICK


def measured(inputs: list[str], prefix: Path, tokenizer: str, workers: int, on_cluster: bool) -> dict[str, float]:
    """One preparation: seconds, CPU seconds, MB."""
    usage, cluster = Usage(), None
    if on_cluster:
        cluster = Cluster(workers)
        cluster.wait()
        for process in cluster.processes:
            usage.look(process.pid, [])
    before, of_machine = sum(usage.cpu.values()), cpu_of_machine()
    flags = ("--cluster", cluster.address) if cluster else ("--workers", str(workers))
    began = time.perf_counter()
    process = prepare(inputs, prefix, tokenizer, "--overwrite", *flags)
    others = [each.pid for each in cluster.processes] if cluster else []
    while process.poll() is None:
        usage.look(process.pid, others)
        time.sleep(0.5)
    seconds, of_machine = time.perf_counter() - began, cpu_of_machine() - of_machine
    cpu = sum(usage.cpu.values()) - before
    assert process.returncode == 0, process.stderr and process.stderr.read()
    if cluster:
        cluster.close()
    first = process.pid
    of_scheduler = {others[0]} if others else set()
    of_workers = [value for each, value in usage.memory.items() if each not in {first, *of_scheduler}]
    return {
        "seconds": seconds,
        "cpu": cpu,
        "cpu_of_others": of_machine - cpu,
        "first_cpu": usage.cpu[first],
        "first_mb": usage.memory[first],
        "scheduler_cpu": sum(usage.cpu[each] for each in of_scheduler),
        "scheduler_mb": sum(usage.memory[each] for each in of_scheduler),
        "largest_worker_mb": max(of_workers, default=0.0),
        "text_mb": json.loads(Path(f"{prefix}.report.json").read_text())["text_bytes_in"] / 1e6,
    }


def compare(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Processes and clusters in turns, for each size and number of workers."""
    for size in given.megabytes:
        inputs = make_corpus(folder, given.text, size * 1_000_000)
        for workers in given.workers:
            found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for pair in range(given.pairs):
                for on_cluster in (False, True) if pair % 2 == 0 else (True, False):
                    prefix = folder / f"out-{on_cluster}"
                    found[on_cluster].append(measured(inputs, prefix, given.tokenizer, workers, on_cluster))
                same = content(folder / "out-False") == content(folder / "out-True")
                assert same, "not the same bytes"
                ratios = {name: round(found[True][-1][name] / found[False][-1][name], 3) for name in ("seconds", "cpu")}
                yield {"workers": workers, "pair": pair, "Dask / processes": ratios}
            for on_cluster, runs in found.items():
                means = {name: round(statistics.mean(run[name] for run in runs), 2) for name in runs[0]}
                yield {"workers": workers, "on": "Dask" if on_cluster else "processes"} | means


def chaos(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, object]]:
    """Preparations whose workers and schedulers are killed, until there were enough kills."""
    rng = random.Random(given.seed)
    inputs = make_corpus(folder, given.text, given.megabytes[0] * 1_000_000)
    small = given.shard_bytes
    alone = prepare(inputs, folder / "expected", given.tokenizer, "--workers", "1", shard_bytes=small)
    assert alone.wait() == 0, alone.stderr and alone.stderr.read()
    expected, cluster = content(folder / "expected"), Cluster(given.workers[0])
    left = ["worker"] * given.kills + ["scheduler"] * given.scheduler_kills
    rng.shuffle(left)
    runs = commands = 0
    ends = list[str]()
    try:
        while left:
            prefix, runs = folder / f"run-{runs}", runs + 1
            while True:
                commands += 1
                flags = ("--cluster", cluster.address)
                process = prepare(inputs, prefix, given.tokenizer, *flags, shard_bytes=small)
                due = time.monotonic() + rng.uniform(*given.every)
                while process.poll() is None:
                    cluster.renew()
                    if left and time.monotonic() > due:
                        number = 0 if left.pop() == "scheduler" else rng.randrange(1, len(cluster.processes))
                        cluster.processes[number].send_signal(signal.SIGKILL)
                        cluster.processes[number].wait()
                        due = time.monotonic() + rng.uniform(*given.every)
                    time.sleep(0.05)
                if process.returncode == 0:
                    break
                assert process.stderr
                ends.append(process.stderr.read().splitlines()[-1])
                assert "to resume" in ends[-1], ends[-1]
            assert content(prefix) == expected, "not the same bytes"
            for path in folder.glob(f"{prefix.name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield {"run": runs, "commands": commands, "kills left": len(left), "ended with": ends}
    finally:
        cluster.close()


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("what", choices=("compare", "chaos"))
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[8])
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--scheduler-kills", type=int, default=5)
    parser.add_argument("--every", type=float, nargs=2, default=[1.0, 15.0], help="seconds between two kills")
    parser.add_argument("--shard-bytes", type=int, default=1 << 17, help="of chaos, so that there are many tasks")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for line in (compare if given.what == "compare" else chaos)(given, Path(name)):
            print(json.dumps(line | {"load": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
