"""A disk that is full, really: what each command says, and that nothing is lost. `python benchmarks/full_disk.py
[--commands train prepare …] [--sizes 21] [--moments 20] [--seed 0]` as root, on Linux: it mounts a file system of 16 MB
in memory.

Training, `prepare`, `convert export-hf` and `import-hf` write there. The disk has some kB left when a command starts,
from none to a megabyte; for training it is also filled at random moments. Each time the exit code is 0, 1 or 2, there
is one line on standard error or none, and what has a final name is whole; then there is space again, and the same
command ends with the losses, or the files, of one that was not disturbed.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos import PRESET

from megajax.core.errors import RunError, UserError
from megajax.data.text.corpus import has_corpus, open_corpus
from megajax.host.ending import run
from megajax.runs.digests import problem_of, read_manifest
from megajax.runs.metrics import read_metrics
from megajax.settings.presets import load_preset

ROOT = Path(__file__).parents[1]
STEPS = 40
SPACE = [
    4096 * n for n in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
]  # bytes


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 16 MB in memory."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"no file system can be mounted ({' '.join(done.stderr.split())}); valid: as root, on Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, left: int) -> None:
    """Take all space but `left` bytes."""
    place = os.statvfs(disk)
    size = place.f_bavail * place.f_frsize - left
    if size > 0:
        with (disk / "filler").open("ab") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), file.tell(), size)


def free(disk: Path) -> None:
    """Give the space back."""
    (disk / "filler").unlink(missing_ok=True)


class Command:
    """A command of megajax, which is run again and again.

    Attributes:
        said: how often it ended with a code and a line.
    """

    def __init__(self, cache: Path, *line: object):
        self._line = [sys.executable, *map(str, line)]
        self._environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PLATFORMS": "cpu",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.said: collections.Counter[tuple[int, str]] = collections.Counter()

    def start(self, preexec: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        """Start it; `preexec` is called in the new process first."""
        return subprocess.Popen(
            self._line,
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=preexec,
        )

    def end(self, process: subprocess.Popen[str], disk: Path) -> tuple[int, str]:
        """Its exit code, and the line on standard error if there is one; what it said is noted.

        Raises:
            RunError: another exit code than 0, 1 and 2, or more than a line.
        """
        out, error = process.communicate(timeout=1800)
        lines = error.splitlines()
        if process.returncode not in (0, 1, 2) or len(lines) != (process.returncode != 0) or "Traceback" in out:
            raise RunError(f"exit code {process.returncode}: {out} {error}")
        survived = [line for line in out.splitlines() if "could not be written" in line or "cannot be" in line]
        for line in lines or [f"(went on: {survived[0]})" if survived else "(went on)"]:
            plain = re.sub(r"\d+ MB free", "N MB free", line.replace(str(disk), "DISK"))
            self.said[process.returncode, re.sub(r"step \d+|error-[\d-]+|\d+-\d+", "N", plain)] += 1
        return process.returncode, "".join(lines)

    def again(self, disk: Path) -> None:
        """It must succeed, with space."""
        free(disk)
        code, line = self.end(self.start(), disk)
        if code:
            raise RunError(f"undisturbed it ends with {code}: {line}")


def check_run(folder: Path) -> None:
    """What a run directory holds under final names is whole.

    Raises:
        RunError, UserError: it is not.
    """
    checkpoints = [entry for entry in folder.glob("checkpoints/*") if entry.name.isdecimal()]
    for checkpoint in checkpoints:
        if problem := problem_of(checkpoint, read_manifest(checkpoint)):
            raise RunError(f"{checkpoint} is not whole: {problem}")
    if (folder / "config.toml").exists():
        load_preset(folder / "config.toml")
    if (folder / "loss.png").exists() and not (folder / "loss.png").read_bytes().endswith(b"IEND\xaeB`\x82"):
        raise RunError(f"{folder / 'loss.png'} is cut off")
    if has_corpus(folder / "data"):
        open_corpus(folder / "data", 300)
    if (folder / "metrics.jsonl").exists():
        for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]:
            json.loads(line)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses that are recorded in a run directory."""
    return [(record["step"], record["loss"]) for record in read_metrics(folder) if "loss" in record]


def some(sizes: int) -> list[int]:
    """So many of SPACE, from the smallest to the largest."""
    return [SPACE[round(place * (len(SPACE) - 1) / max(1, sizes - 1))] for place in range(min(sizes, len(SPACE)))]


def train(train: Command, disk: Path, expected: list, spaces: list[int], moments: int, rng: random.Random) -> None:
    """Start with little space, and lose it on the way."""
    run_dir = disk / "run"

    def finish() -> None:
        check_run(run_dir)
        train.again(disk)
        if losses(run_dir) != expected:
            raise RunError(f"{run_dir} has other losses than a run that was not disturbed")
        shutil.rmtree(run_dir)

    for left in spaces:
        fill(disk, left)
        code, line = train.end(train.start(), disk)
        print(f"{left // 1024} kB left: {code}, {line}", flush=True)
        finish()
    began = time.monotonic()
    train.again(disk)
    seconds = time.monotonic() - began
    shutil.rmtree(run_dir)
    for _ in range(moments):
        process = train.start()
        time.sleep(rng.uniform(0.3, 1) * seconds)
        fill(disk, rng.choice([0, 0, 8192, 100_000, 2_000_000]))
        code, line = train.end(process, disk)
        print(f"no space under way: {code}, {line}", flush=True)
        finish()


def convert(command: Command, disk: Path, target: Path, expected: dict[str, bytes], spaces: list[int]) -> None:
    """Start with little space, until there is enough; after a failure nothing has the final name."""
    enough = 0
    for left in spaces:
        fill(disk, left)
        code, line = command.end(command.start(), disk)
        print(f"{left // 1024} kB left: {code}, {line}", flush=True)
        there = files(target)
        if code and there:
            raise RunError(f"it ended with {code}, and {sorted(there)} are there")
        if code:
            command.again(disk)
        free(disk)
        if files(target) != expected:
            raise RunError(f"{target}: other files than of one that was not disturbed")
        shutil.rmtree(target.parent)
        target.parent.mkdir()
        enough += not code
        if enough == 2:
            break


def files(target: Path) -> dict[str, bytes]:
    """What begins with a name, but work folders and reports, which hold times and paths."""
    found = [file for file in target.parent.rglob(f"{target.name}*") if file.is_file()]
    found += [file for file in target.rglob("*") if file.is_file()]
    left_out = ".work", ".partial", "report.json", "config.toml", "run.json", "checkpoints"
    names = {str(file.relative_to(target.parent)): file for file in found}
    return {name: file.read_bytes() for name, file in names.items() if not any(word in name for word in left_out)}


def main() -> None:
    """Fill the disk under each command and print what it says.

    Raises:
        RunError: something was lost, or a command ended otherwise than it may.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    names = "train", "convert export-hf", "convert import-hf", "prepare"  # each may need those before it
    parser.add_argument("--commands", nargs="+", choices=names, default=names)
    parser.add_argument("--sizes", type=int, default=len(SPACE))
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="full-disk-"))
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(60)]
    corpus, preset, cache = folder / "corpus.txt", folder / "preset.toml", folder / "compiled"
    corpus.write_text("\n\n".join(" ".join(rng.choices(words, k=50)) for _ in range(80)))
    preset.write_text(PRESET.format(steps=STEPS, corpus=corpus))
    with small_disk(folder / "disk") as disk:
        (disk / "made").mkdir()

        def commands(place: Path) -> dict[str, Command]:
            made, whole = place / "made", folder / "whole"
            prepare = ("-m", "megajax", "prepare", corpus, "--vocab-size", 300, "--workers", 1, "--json")
            return {
                "train": Command(cache, "train.py", preset, "--run-dir", place / "run"),
                "prepare": Command(cache, *prepare, "--output", made / "set"),
                "convert export-hf": Command(
                    cache, "-m", "megajax", "convert", "export-hf", whole / "run", made / "hf"
                ),
                "convert import-hf": Command(
                    cache, "-m", "megajax", "convert", "import-hf", whole / "made" / "hf", made / "back"
                ),
            }

        (folder / "whole" / "made").mkdir(parents=True)
        whole, disturbed = commands(folder / "whole"), commands(disk)
        needed = names if set(options.commands) - {"train", "prepare"} else options.commands
        for name in needed:
            whole[name].again(disk)
        targets = {"prepare": "set", "convert export-hf": "hf", "convert import-hf": "back"}
        spaces = some(options.sizes)
        for name, target in targets.items():
            if name in options.commands:
                print(name, flush=True)
                expected = files(folder / "whole" / "made" / target)
                convert(disturbed[name], disk, disk / "made" / target, expected, spaces)
        if "train" in options.commands:
            train(disturbed["train"], disk, losses(folder / "whole" / "run"), spaces, options.moments, rng)
    print("| command | exit code | what it said | times |\n|---|---|---|---|")
    for name, command in disturbed.items():
        for (code, line), count in sorted(command.said.items()):
            print(f"| {name} | {code} | {line[:200]} | {count} |")
    shutil.rmtree(folder)


if __name__ == "__main__":
    run(main)
