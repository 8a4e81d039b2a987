"""Every reader against mutated files: `python tests/fuzzing/fuzz.py --inputs 10000 [--reader NAME ...] [--seed 0]`.

Input number n is a function of the reader's name, the seed and n: `--first n --inputs 1` shows a failure again. A
reader may succeed, or refuse in the program's own exceptions; what else it throws, more than 5 s, and an allocation of
more than 4 times the decoded file and 16 MiB are failures. Each reader has a process of its own, in limited memory.
"""

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[2])]


SECONDS = 5.0  # of processor time that an input may take
ALLOWED = 4, 16 << 20  # times the decoded size, and bytes beside that
_MORE_MEMORY = 2 << 30  # of address space than after the first input


@dataclass
class Outcome:
    """What became of a reader's inputs."""

    reader: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    largest: int = 0  # bytes allocated by Python and NumPy
    failures: list[str] = field(default_factory=list)


def fuzz(reader, inputs: int, seed: int = 0, first: int = 0, folder: Path | None = None, measured: int = 1) -> Outcome:
    """Let one of `readers.READERS` read so many mutated files in an empty folder, from number `first` on.

    Of one in `measured` inputs the allocation is measured, which takes most of the time.
    """
    with contextlib.ExitStack() as stack:
        folder = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        outcome = Outcome(reader.name)
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        reader.make(folder)
        if not reader.files:  # what is hostile as it is
            _try(reader, folder, 0, "as it is", outcome, measured=False)
            return outcome
        reader.read(folder)  # the files are valid, and what is imported later does not count
        whole = {name: (folder / name).read_bytes() for name in reader.files}
        for number in range(first, first + inputs):
            rng = random.Random(f"{reader.name} {seed} {number}")
            name = rng.choice(reader.files)
            content, decoded = reader.changed(whole[name], rng)
            (folder / name).write_bytes(content)
            what, size = f"{name}, input {number}", max(decoded, sum(map(len, whole.values())))
            _try(reader, folder, size, what, outcome, measured=number % measured == 0)
            (folder / name).write_bytes(whole[name])
    return outcome


def _try(reader, folder: Path, decoded: int, what: str, outcome: Outcome, *, measured: bool) -> None:
    from readers import REFUSALS

    problem = ""
    if measured:
        tracemalloc.start()
    began = time.process_time()  # of this process: others may have the cores
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            reader.read(folder)
        outcome.accepted += 1
    except REFUSALS as error:
        outcome.refused += 1
        if len(str(error).splitlines()) != 1:
            problem = f"not one line: {str(error)!r}"
    except BaseException as error:  # also the panics of libraries in Rust
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"{type(error).__name__}: {str(error)[:200]!r}"
    seconds = time.process_time() - began
    allocated = tracemalloc.get_traced_memory()[1]  # 0 if nothing is measured
    tracemalloc.stop()
    if seconds > SECONDS:
        problem = f"{problem} took {seconds:.1f} s"
    if allocated > ALLOWED[0] * decoded + ALLOWED[1]:
        problem = f"{problem} allocated {allocated >> 20} MiB for {decoded} bytes"
    if problem:
        outcome.failures.append(f"{what}: {problem}")
    outcome.inputs += 1
    outcome.slowest = max(outcome.slowest, seconds)
    outcome.largest = max(outcome.largest, allocated)


def _alone(args: argparse.Namespace) -> None:
    """Fuzz one reader in this process, in limited memory, and print the outcome as JSON."""
    from readers import READERS

    reader = next(reader for reader in READERS if reader.name == args.reader[0])
    fuzz(reader, 1, args.seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MORE_MEMORY, resource.RLIM_INFINITY))
    gc.collect()
    faulthandler.dump_traceback_later(args.patience, exit=True)
    inputs = min(args.inputs, reader.most or args.inputs)
    print(json.dumps(asdict(fuzz(reader, inputs, args.seed, args.first, None, args.measured))))


def main() -> None:
    from readers import READERS

    parser = argparse.ArgumentParser(description="Let every reader read mutated files.")
    parser.add_argument("--inputs", type=int, default=10_000, help="of each reader [10000]")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations [0]")
    parser.add_argument("--first", type=int, default=0, help="number of the first input [0]")
    parser.add_argument("--reader", nargs="+", default=[reader.name for reader in READERS], help="names [all]")
    parser.add_argument("--measured", type=int, default=4, help="measure memory of one in so many inputs [4]")
    parser.add_argument("--patience", type=int, default=3600, help="seconds after which a reader counts as hung")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        return _alone(args)
    print("| reader | inputs | accepted | refused | failed | slowest | largest allocation |")
    print("|---|---|---|---|---|---|---|")
    failed = False
    for name in args.reader:
        command = [sys.executable, __file__, "--alone", "--reader", name]
        for flag in "inputs", "seed", "first", "measured", "patience":
            command += [f"--{flag}", str(getattr(args, flag))]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        if done.returncode:
            print(f"| {name} | ended with {done.returncode} |")
            print(done.stderr[-2000:], file=sys.stderr)
            failed = True
            continue
        found = Outcome(**json.loads(done.stdout.splitlines()[-1]))
        cells = [f"{found.inputs:,}", f"{found.accepted:,}", f"{found.refused:,}", str(len(found.failures))]
        cells += [f"{found.slowest:.2f} s", f"{found.largest / 2**20:.1f} MiB"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        for failure in found.failures[:20]:
            print(f"  {failure}", file=sys.stderr, flush=True)
        failed |= bool(found.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
