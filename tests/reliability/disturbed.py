"""Commands that are disturbed, each a process of its own, and what must be true of what they leave."""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from processes import PRESET, Commands, Finished, finish

from megajax.data.text.corpus import has_corpus, open_corpus
from megajax.runs.digests import problem_of, read_manifest
from megajax.settings.presets import load_preset

LONG = ("--train.steps", 100, "--optimizer.decay-steps", 100)


@dataclass(frozen=True)
class Disturbed:
    """Commands that write to a folder.

    Attributes:
        commands: starts them.
        whole: a folder with a text and a preset, where the same commands have worked undisturbed.
        folder: theirs.
    """

    commands: Commands
    whole: Path
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def text(self) -> Path:
        return self.whole / "corpus.txt"

    @property
    def lines(self) -> dict[str, tuple[object, ...]]:
        """The commands by name."""
        made = self.folder / "made"
        convert = ("-m", "megajax", "convert")
        return {
            "train": ("train.py", self.commands.preset, "--run-dir", self.run, *LONG),
            "prepare": (
                "-m",
                "megajax",
                "prepare",
                self.text,
                "--vocab-size",
                300,
                "--workers",
                1,
                "--json",
                "--output",
                made / "set",
            ),
            "export-hf": (*convert, "export-hf", self.whole / "run", made / "hf"),
            "import-hf": (*convert, "import-hf", self.whole / "made" / "hf", made / "back"),
        }

    def start(self, name: str = "train", *more: object, before: Callable[[], None] | None = None) -> subprocess.Popen:
        """Start one; `before` is called in the new process first."""
        return self.commands.start(*self.lines[name], *more, preexec_fn=before)

    def again(self, name: str = "train") -> None:
        """It must succeed."""
        finish(self.start(name)).ok()

    def finishes(self) -> None:
        """The run is whole, the same command goes on, and ends with the losses of an undisturbed run."""
        check_run(self.run)
        self.again()
        check_run(self.run)
        assert losses(self.run) == losses(self.whole / "run")

    def reach(self, process: subprocess.Popen, step: int) -> None:
        """Wait until a step is recorded, while the process lives."""
        while not self.run.exists() or len(losses(self.run)) < step:
            assert process.poll() is None, finish(process)
            time.sleep(0.01)


def make_whole(folder: Path) -> Disturbed:
    """Commands whose folder is the whole: nothing is disturbed."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(60)]
    (folder / "corpus.txt").write_text("\n\n".join(" ".join(rng.choices(words, k=50)) for _ in range(80)))
    (folder / "preset.toml").write_text(PRESET.format(corpus=folder / "corpus.txt"))
    (folder / "made").mkdir()
    return Disturbed(Commands(folder / "preset.toml"), folder, folder)


def told(done: Finished) -> str:
    """The line of a command that may have failed, empty if it succeeded; never more than one."""
    lines = done.err.splitlines()
    assert done.code in (0, 1, 2) and len(lines) == (done.code != 0) and "Traceback" not in done.out, done
    return "".join(lines)


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Steps, losses and gradient norms; the last line may be under way."""
    file = run / "metrics.jsonl"
    lines = map(json.loads, file.read_text().split("\n")[:-1] if file.exists() else [])
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def check_run(run: Path) -> None:
    """What has a final name is whole."""
    for checkpoint in run.glob("checkpoints/*"):
        if checkpoint.name.isdecimal():
            assert not problem_of(checkpoint, read_manifest(checkpoint)), checkpoint
    if (run / "config.toml").exists():
        load_preset(run / "config.toml")
    if (run / "loss.png").exists():
        assert (run / "loss.png").read_bytes().endswith(b"IEND\xaeB`\x82")
    if has_corpus(run / "data"):
        open_corpus(run / "data", 300)


def remove(path: Path) -> None:
    """A file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
