"""All pictures of docs: `make pictures` draws them again, those whose inputs changed since.

    python docs/pictures/draw.py [NAME ...] [--all] [--list]

A picture is made by a command from its inputs: presets, and the code that draws. drawn.json has the digest of the
inputs that each picture was drawn from; tests/docs/test_pictures.py compares them.
"""

import argparse
import ast
import dataclasses
import hashlib
import io
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megajax.core.pipeline.deferral import PassTimes
from megajax.core.pipeline.schedule import make_schedule
from megajax.core.pipeline.timing import StageTimes, timeline
from megajax.plan.machines import MACHINES, Machine

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MANIFEST = DOCS / "pictures" / "drawn.json"


@dataclass(frozen=True)
class Picture:
    """How a picture is made.

    Attributes:
        command: words after `python`; `OUT` is a new folder.
        made: the file there that is the picture.
        inputs: files that it depends on, but for comments.
        shows: what else it depends on, as a text.
    """

    command: str
    made: str
    inputs: tuple[str, ...]
    shows: Callable[[], str] = str

    def digest(self) -> str:
        """Of the command and the inputs."""
        whole = hashlib.sha256(f"{self.command} {self.shows()}".encode())
        for name in self.inputs:
            whole.update(hashlib.sha256(_meant(ROOT / name).encode()).digest())
        return whole.hexdigest()[:16]


def _meant(file: Path) -> str:
    """A file's text, without comments and the docstrings of Python."""
    text = file.read_text()
    if file.suffix != ".py":
        return "\n".join(line for line in text.splitlines() if line and not line.startswith("#"))
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _spans(stages: int, microbatches: int, name: str, chunks: int, deferred: bool) -> str:
    """The passes of a schedule, with their times."""
    table = make_schedule(name, stages, microbatches, chunks, PassTimes() if deferred else None)
    return repr([dataclasses.astuple(span) for span in timeline(table, StageTimes.equal(table))[1]])


def _rates(machine: Machine) -> str:
    """What a GPU is taken to do in bf16."""
    links = machine.server, machine.link, machine.network
    return repr((machine.usable, machine.peak["bf16"], machine.bandwidth, *links, machine.efficiency.products))


def _timeline(
    stages: int, microbatches: int, name: str = "1f1b", chunks: int = 1, *, deferred: bool = False
) -> Picture:
    flags = f"--mesh.pipe {stages} --microbatches {microbatches} --pipeline.schedule {name} --pipeline.chunks {chunks}"
    return Picture(
        f"-m megajax schedule --plot OUT/timeline.png {flags}" + " --pipeline.weight-gradients deferred" * deferred,
        "timeline.png",
        ("megajax/commands/timeline_picture.py",),
        shows=lambda: _spans(stages, microbatches, name, chunks, deferred),
    )


def _script(name: str) -> Picture:
    return Picture(f"docs/pictures/{name}.py OUT/picture.png", "picture.png", (f"docs/pictures/{name}.py",))


def _curves(name: str) -> Picture:
    inputs = ("docs/pictures/curves.py", f"docs/benchmarks/{name}.json")
    return Picture(f"docs/pictures/curves.py {name} OUT/picture.png", "picture.png", inputs)


def _demo(preset: str) -> Picture:
    command = f"-m megajax train {preset} --run-dir OUT/{preset}"
    return Picture(command, f"{preset}/loss.png", (f"configs/{preset}.toml",))


PICTURES = {
    "1f1b-together.png": _timeline(4, 8),
    "1f1b-deferred.png": _timeline(4, 8, deferred=True),
    "gpipe-together.png": _timeline(4, 8, "gpipe"),
    "gpipe-deferred.png": _timeline(4, 8, "gpipe", deferred=True),
    "interleaved.png": _timeline(4, 8, "interleaved", 2),
    "interleaved-deferred.png": _timeline(4, 8, "interleaved", 2, deferred=True),
    "interleaved-large.png": _timeline(8, 128, "interleaved", 2),
    "context.png": _script("context"),
    "experts.png": _script("experts"),
    "plan-search.png": Picture(
        "-m megajax plan gpt2-8.3b --devices 512 --search --no-compile --plot OUT/search.png",
        "search.png",
        ("configs/gpt2-8.3b.toml", "megajax/plan/picture.py"),
        shows=lambda: _rates(MACHINES["h100"]),
    ),
    "float8.png": _curves("float8"),
    "demo-loss.png": _demo("demo"),
    "bert-demo-loss.png": _demo("bert-demo"),
    "layer-order.png": _curves("layer-order"),
    "muon.png": _curves("muon"),
    "bitwise.png": _curves("bitwise"),
}


def recorded() -> dict[str, str]:
    """The digests of the inputs that the pictures were drawn from."""
    return json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {}


def stale() -> list[str]:
    """Pictures that are older than what they show."""
    known = recorded()
    return [name for name, picture in PICTURES.items() if known.get(name) != picture.digest()]


def draw(name: str) -> None:
    """Make a picture and record what it was drawn from."""
    picture = PICTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("OUT", folder) for word in shlex.split(picture.command)]
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        shutil.copyfile(Path(folder) / picture.made, DOCS / name)
    MANIFEST.write_text(json.dumps(recorded() | {name: picture.digest()}, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Draw the pictures that are named, or else those whose inputs changed."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="pictures to draw, such as context.png")
    parser.add_argument("--all", action="store_true", help="also those whose inputs did not change")
    parser.add_argument("--list", action="store_true", help="print names and commands, draw nothing")
    args = parser.parse_args()
    if unknown := set(args.names) - PICTURES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such picture; valid: {', '.join(PICTURES)}")
    wanted = args.names or (list(PICTURES) if args.all else stale())
    for name in PICTURES if args.list else wanted:
        picture = PICTURES[name]
        if args.list:
            print(f"{name:26} python {picture.command}")
        else:
            print(name, flush=True)
            draw(name)


if __name__ == "__main__":
    main()
