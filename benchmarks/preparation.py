"""What preparing a corpus costs: `megajax prepare` on processes of this machine, and with --dask on a cluster in turn.

    python benchmarks/preparation.py --text FILE --tokenizer DIR [--megabytes 200]
        [--workers 2] [--pairs 1] [--dask]

FILE is a text, or python-stdlib: of its documents a corpus of so many megabytes is made, in which two of ten documents
are near copies and one is an exact copy of an earlier one, four fifths as `.jsonl` and the rest as `.jsonl.zst`. The
scheduler and the workers are processes on this machine, reachable only by 127.0.0.1, each with one thread, and ready
before the clock starts (psutil and Dask: the extra `cluster`). Prints each preparation's figures: wall time, rates of
the stages, the CPU seconds of all processes, of the first one and of other programs, and the peak memory of each kind
of process; then means.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import paired
import psutil
from backports import zstd

from megajax.core.errors import UserError
from megajax.data.text.records import TextDocuments
from megajax.host.ending import run

_QUIET = {"DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False", "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms"}


def make_corpus(folder: Path, source: str, size: int) -> list[str]:
    """Files with documents of the source, again and again, and copies of them; `size` bytes in all."""
    rng = random.Random(0)
    texts = [text[start : start + 8000] for text in TextDocuments(source) for start in range(0, len(text), 8000)]
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
            (packed if done > 0.8 * size else plain).write(json.dumps({"text": text}) + "\n")
            done += len(text)
    return [str(path) for path in paths]


def cluster(stack: ExitStack, workers: int) -> tuple[str, list[subprocess.Popen]]:
    """The address and the processes of a cluster whose workers are all there."""
    from distributed import Client

    address = f"tcp://{paired.free_address().replace('localhost', '127.0.0.1')}"
    flags = ["--host", "127.0.0.1", "--no-dashboard"]
    worker = ["worker", address, "--nthreads", "1", "--no-nanny", "--memory-limit", "0", *flags]
    processes = []
    for command in [["scheduler", "--port", address.rpartition(":")[2], *flags], *[worker] * workers]:
        line = [sys.executable, "-m", "dask", *command]
        process = subprocess.Popen(line, stderr=subprocess.DEVNULL, env=os.environ | _QUIET)
        stack.callback(process.kill)
        processes.append(process)
    with Client(address, timeout=120, set_as_default=False) as client:
        client.wait_for_workers(workers, timeout=300)
    return address, processes


def look(process: psutil.Process, cpu: dict[int, float], memory: dict[int, float]) -> None:
    """Note the CPU seconds and the largest memory, in MB, of a process and all that descend from it."""
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                used = each.cpu_times()
                cpu[each.pid] = used.user + used.system
                memory[each.pid] = max(memory.get(each.pid, 0), each.memory_info().rss / 1e6)


def measured(inputs: list[str], prefix: Path, tokenizer: str, workers: int, on_cluster: bool) -> dict[str, float]:
    """One preparation: seconds, CPU seconds, MB."""
    with ExitStack() as stack:
        address, others = cluster(stack, workers) if on_cluster else ("", [])
        flags = ["--cluster", address] if on_cluster else ["--workers", str(workers)]
        command = [
            sys.executable,
            "-m",
            "megajax",
            "prepare",
            *inputs,
            "--output",
            str(prefix),
            "--overwrite",
            "--json",
        ]
        cpu, memory, machine = dict[int, float](), dict[int, float](), psutil.cpu_times()
        watched = [psutil.Process(each.pid) for each in others]
        for each in watched:
            look(each, cpu, memory)
        before, began = sum(cpu.values()), time.perf_counter()
        process = psutil.Popen([*command, "--tokenizer", tokenizer, *flags], stdout=subprocess.DEVNULL)
        while process.poll() is None:
            for each in [process, *watched]:
                look(each, cpu, memory)
            time.sleep(0.2)
        seconds, after = time.perf_counter() - began, psutil.cpu_times()
    if process.returncode:
        raise UserError(f"megajax prepare ended with exit code {process.returncode}")
    used = sum(cpu.values()) - before
    report: dict[str, Any] = json.loads(Path(f"{prefix}.report.json").read_text())
    ours = {process.pid, *(each.pid for each in others[:1])}
    return {
        "seconds": seconds,
        "cpu": used,
        "cpu_of_others": sum(after[:3]) - sum(machine[:3]) - used,  # user's, niced and the system's
        "first_cpu": cpu[process.pid],
        "first_mb": memory[process.pid],
        "largest_worker_mb": max((size for each, size in memory.items() if each not in ours), default=0.0),
        "text_mb": report["text_bytes_in"] / 1e6,
        **report["throughput"],
    }


def main() -> None:
    """Parse the command line, measure, print."""
    own, unknown, usage = paired.own_flags(text=str, tokenizer=str, megabytes=200, workers=2, pairs=1, dask=False)
    if unknown or not own.text or not own.tokenizer:
        raise UserError(f"{' '.join(unknown) or '--text or --tokenizer is missing'}; valid: {usage}")
    found: dict[bool, list[dict[str, float]]] = {False: [], **({True: []} if own.dask else {})}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_corpus(folder, own.text, own.megabytes * 1_000_000)
        for pair in range(own.pairs):
            for on_cluster in sorted(found, reverse=pair % 2 == 1):
                figures = measured(inputs, folder / f"out-{on_cluster}", own.tokenizer, own.workers, on_cluster)
                found[on_cluster].append(figures)
                print(json.dumps({"pair": pair, "on": "Dask" if on_cluster else "processes"} | figures), flush=True)
            datasets = {tuple((folder / f"out-{each}{end}").read_bytes() for end in (".bin", ".idx")) for each in found}
            assert len(datasets) == 1, "not the same bytes"
    for on_cluster, runs in found.items():
        means = {key: round(statistics.mean(each[key] for each in runs), 2) for key in runs[0]}
        print(json.dumps({"mean of": len(runs), "on": "Dask" if on_cluster else "processes"} | means))


if __name__ == "__main__":
    run(main)
