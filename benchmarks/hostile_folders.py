"""Folders that somebody else uses, forbids or removes: what each command says, and that nothing is lost or touched.
`python benchmarks/hostile_folders.py [--rounds 20] [--moments 3] [--seed 0]`, on Linux.

Two starters: the same run is started twice within two seconds. One trains, the other is refused; a killed run's lock is
taken over at once, that of another machine after a minute, unless it is touched. Read-only: as root the commands run
without root's rights over the files of others, which belong to somebody else; before and after everything below is the
same. Deleted: the run directory or a part of it is removed, or replaced by somebody else's, while the run trains.
"""

import argparse
import collections
import functools
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos import PRESET
from full_disk import Command, check_run, losses
from read_only import forbidden_folders

from megajax.core.errors import RunError
from megajax.host.ending import run
from megajax.runs.lock import ABANDONED_AFTER, NAME, TOUCHED_EVERY

STEPS = 100
IN_USE = re.compile(r"error: --run-dir \S+ is in use by process (\d+) on (\S+), since \d{4}-\d\d-\d\dT\S+; valid: .*")


@dataclass
class Place:
    """Where a run is started again and again.

    Attributes:
        folder: that of everything.
        run_dir: of the run.
        train: starts it.
        expected: steps and losses of a run that was not disturbed.
        figures: what is reported.
    """

    folder: Path
    run_dir: Path
    train: Command
    expected: list[tuple[int, float]]
    figures: collections.Counter[str]

    def whole(self) -> None:
        """What is there is whole, the same command goes on, and ends with the losses of an undisturbed run.

        Raises:
            RunError: it does not.
        """
        check_run(self.run_dir)
        self.train.again(self.folder)
        check_run(self.run_dir)
        if losses(self.run_dir) != self.expected:
            raise RunError(f"{self.run_dir} has other losses than a run that was not disturbed")

    def reach(self, process: subprocess.Popen[str], step: int) -> bool:
        """Wait until a step is recorded; whether the process lives then."""
        while process.poll() is None:
            if self.run_dir.exists() and len(losses(self.run_dir)) >= step:
                return True
            time.sleep(0.01)
        return False


def two_starters(place: Place, rounds: int, rng: random.Random) -> None:
    """The same command, twice: one trains.

    Raises:
        RunError: both do, or none, or the one that is refused does not name the other.
    """
    for _ in range(rounds):
        first = place.train.start()
        time.sleep(rng.uniform(0, 2))
        both = [first, place.train.start()]
        refusals = [""] * 2

        def end(number: int, both: list = both, refusals: list = refusals) -> None:
            refusals[number] = place.train.end(both[number], place.folder)[1]

        threads = [threading.Thread(target=end, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = [process.returncode for process in both]
        if sorted(codes) != [0, 2]:
            raise RunError(f"two starters end with {codes}: {refusals}")
        told = IN_USE.fullmatch(refusals[codes.index(2)])
        if not told or int(told[1]) != both[codes.index(0)].pid:
            raise RunError(f"process {both[codes.index(0)].pid} trains, and another is told {refusals}")
        if losses(place.run_dir) != place.expected:
            raise RunError(f"{place.run_dir} has other losses than a run that was not disturbed")
        check_run(place.run_dir)
        place.figures[f"two starters: the {'first' if codes[0] == 0 else 'second'} trains, the other is refused"] += 1
        shutil.rmtree(place.run_dir)


def killed(place: Place, rng: random.Random) -> float:
    """A run that is killed after some steps; seconds since it last touched its lock."""
    process = place.train.start()
    if not place.reach(process, rng.randint(1, STEPS // 2)):
        raise RunError(f"the run ended before it was killed: {place.train.end(process, place.folder)}")
    process.kill()
    process.communicate()
    return time.time() - (place.run_dir / NAME).stat().st_mtime


def takers(place: Place, moments: int, rng: random.Random) -> None:
    """Who starts while a killed run's lock is fresh.

    Raises:
        RunError: it does not wait, or not go on.
    """
    for _ in range(moments):
        age = killed(place, rng)
        place.whole()
        place.figures[f"killed, its lock not {3 * TOUCHED_EVERY:.0f} s old: the next start goes on at once"] += age < 15
        shutil.rmtree(place.run_dir)
    killed(place, rng)
    lock = place.run_dir / NAME
    holder = json.loads(lock.read_text()) | {"host": "far", "machine": "another"}
    for touched in True, False:
        lock.write_text(json.dumps(holder))
        began = time.monotonic()
        process = place.train.start()
        while touched and process.poll() is None:
            os.utime(lock)
            time.sleep(TOUCHED_EVERY)
        code, line = place.train.end(process, place.folder)
        seconds = time.monotonic() - began
        if touched and not (code == 2 and (told := IN_USE.fullmatch(line)) and told[2] == "far"):
            raise RunError(f"a lock that is held by another machine: {code}, {line}")
        if not touched and (code or seconds < ABANDONED_AFTER or losses(place.run_dir) != place.expected):
            raise RunError(f"a lock that another machine has abandoned: {code} after {seconds:.0f} s, {line}")
        what = "held: refused" if touched else "abandoned: taken over"
        place.figures[f"lock of another machine, {what} after {seconds:.0f} s"] += 1
    shutil.rmtree(place.run_dir)


def deleted(place: Place, moments: int, rng: random.Random) -> Iterator[tuple[str, int, str]]:
    """Remove the run directory or a part of it at random steps; the run goes on or ends with one line, and nothing is
    made where the run directory was.

    Raises:
        RunError: otherwise.
    """
    for part in (".", "somebody else's", "checkpoints", "metrics.jsonl", "data", "run.json", NAME):
        for _ in range(moments):
            process = place.train.start()
            if not place.reach(process, rng.randint(1, STEPS - 10)):
                raise RunError(f"the run ended before: {place.train.end(process, place.folder)}")
            gone = place.run_dir.with_name("gone")  # in one instant, also where files are written in it
            whole = part in (".", "somebody else's")
            (place.run_dir if whole else place.run_dir / part).rename(gone)
            if part == "somebody else's":
                place.run_dir.mkdir()
                (place.run_dir / "mine.txt").write_text("mine")
            (shutil.rmtree if gone.is_dir() else os.unlink)(gone)
            code, line = place.train.end(process, place.folder)
            found = sorted(map(str, place.run_dir.rglob("*"))) if place.run_dir.exists() else None
            if whole and found != (None if part == "." else [str(place.run_dir / "mine.txt")]):
                raise RunError(f"{part} in the run directory's place: it ended with {code}, {line}, and left {found}")
            if (whole or part == NAME) != bool(code):
                raise RunError(f"RUN/{part} was deleted, and it ended with {code}, {line}")
            if whole:
                shutil.rmtree(place.run_dir, ignore_errors=True)
            elif part == "metrics.jsonl":  # the figures of what was trained are lost with it
                place.train.again(place.folder)
            else:
                place.whole()
            shutil.rmtree(place.run_dir, ignore_errors=True)
            yield f"RUN/{part}" if not whole else "RUN" if part == "." else f"RUN, then {part}", code, line


def main() -> None:
    """Try all and print what was said.

    Raises:
        RunError: something was lost, or a command ended otherwise than it may.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--moments", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="hostile-folders-"))
    cache, made, hostile = (folder / name for name in ("compiled", "made", "hostile"))
    made.mkdir()
    hostile.mkdir()
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(60)]
    (made / "corpus.txt").write_text("\n\n".join(" ".join(rng.choices(words, k=50)) for _ in range(80)))
    (made / "preset.toml").write_text(PRESET.format(steps=STEPS, corpus=made / "corpus.txt"))
    for line in (
        ("train.py", made / "preset.toml", "--run-dir", made / "run"),
        ("-m", "megajax", "convert", "export-hf", made / "run", made / "hf"),
    ):
        Command(cache, *line).again(folder)
    (made / "started").mkdir()
    shutil.copy(made / "run" / "run.json", made / "started")
    train = Command(cache, "train.py", made / "preset.toml", "--run-dir", hostile / "run")
    place = Place(hostile, hostile / "run", train, losses(made / "run"), collections.Counter())

    said: collections.Counter[tuple[str, int, str]] = collections.Counter()
    for name, code, line in forbidden_folders(hostile, made, functools.partial(Command, cache)):
        said[f"read-only: {name}", code, line] += 1
        print(f"{name}: {code}, {line}", flush=True)
    for name, code, line in deleted(place, options.moments, rng):
        said[f"deleted: {name}", code, re.sub(r"step \d+|\d+/state", "N", line)] += 1
        print(f"{name} deleted: {code}, {line}", flush=True)
    two_starters(place, options.rounds, rng)
    takers(place, options.moments, rng)
    for figure, count in place.figures.items():
        print(f"- {figure}: {count} times")
    print("\n| what | exit code | what it said | times |\n|---|---|---|---|")
    for (name, code, line), count in said.items():
        print(f"| {name} | {code} | {line.replace(str(folder), '')[:200] or '(went on)'} | {count} |")
    shutil.rmtree(folder)


if __name__ == "__main__":
    run(main)
