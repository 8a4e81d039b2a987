"""All pictures of docs: `make pictures` draws them again, those whose inputs changed since.

    python benchmarks/pictures.py [NAME ...] [--all] [--list]

A picture is made by a command from its inputs: presets, and the code that draws. docs/pictures.json has the digest
of the inputs that each picture was drawn from; tests/docs/test_pictures.py compares them. Pictures of long runs (`kept`
says how long) are drawn only by name.
"""

import argparse
import ast
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MANIFEST = DOCS / "pictures.json"
_TIMELINE = ("megajax/pipeline/picture.py", "megajax/pipeline/schedule.py", "megajax/pipeline/table.py")


@dataclass(frozen=True)
class Picture:
    """How a picture is made.

    Attributes:
        command: words after `python`; `OUT` is a new folder.
        made: the file there that is the picture.
        inputs: files that it depends on.
        kept: how long it takes, where that is too long for `make pictures`.
    """

    command: str
    made: str
    inputs: tuple[str, ...]
    kept: str = ""

    def digest(self) -> str:
        """Of the command and the inputs."""
        whole = hashlib.sha256(self.command.encode())
        for name in self.inputs:
            whole.update(hashlib.sha256(_meant(ROOT / name).encode()).digest())
        return whole.hexdigest()[:16]


def _meant(file: Path) -> str:
    """A file's text, of Python without comments and docstrings."""
    lines = dict(enumerate(file.read_text().splitlines(), 1))
    if file.suffix == ".py":
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    lines.pop(number, None)
    return "\n".join(line for line in lines.values() if line.strip() and not line.lstrip().startswith("#"))


def _timeline(flags: str) -> Picture:
    return Picture(f"-m megajax schedule --plot OUT/timeline.png {flags}", "timeline.png", _TIMELINE)


def _script(name: str) -> Picture:
    return Picture(f"benchmarks/{name}.py OUT/picture.png", "picture.png", (f"benchmarks/{name}.py",))


def _demo(preset: str) -> Picture:
    command = f"-m megajax train {preset} --run-dir OUT/{preset}"
    return Picture(command, f"{preset}/loss.png", (f"configs/{preset}.toml",))


_FOUR = "--mesh.pipe 4 --microbatches 8"
_CHUNKS = "--pipeline.schedule interleaved --pipeline.chunks 2"
_DEFERRED = "--pipeline.weight-gradients deferred"
PICTURES = {
    "1f1b-together.png": _timeline(_FOUR),
    "1f1b-deferred.png": _timeline(f"{_FOUR} {_DEFERRED}"),
    "gpipe-together.png": _timeline(f"{_FOUR} --pipeline.schedule gpipe"),
    "gpipe-deferred.png": _timeline(f"{_FOUR} --pipeline.schedule gpipe {_DEFERRED}"),
    "interleaved.png": _timeline(f"{_FOUR} {_CHUNKS}"),
    "interleaved-deferred.png": _timeline(f"{_FOUR} {_CHUNKS} {_DEFERRED}"),
    "interleaved-large.png": _timeline(f"--mesh.pipe 8 --microbatches 128 {_CHUNKS}"),
    "context.png": _script("context_picture"),
    "experts.png": _script("experts_picture"),
    "plan-search.png": Picture(
        "-m megajax plan gpt2-8.3b --devices 512 --search --no-compile --plot OUT/search.png",
        "search.png",
        ("configs/gpt2-8.3b.toml", "megajax/plan/picture.py", "megajax/plan/search.py", "megajax/plan/machines.py"),
    ),
    "demo-loss.png": _demo("demo"),
    "bert-demo-loss.png": _demo("bert-demo"),
    "layer-order.png": Picture(
        "benchmarks/layer_order.py --output OUT",
        "layer-order.png",
        ("benchmarks/layer_order.py", "benchmarks/layer_order.toml"),
        kept="an hour",
    ),
    "muon.png": Picture(
        "benchmarks/optimizers.py demo --output OUT --rates 1.5e-3 3e-3 6e-3 1.2e-2 2.4e-2 --model.num-layers 4 "
        "--model.sequence-length 128 --train.microbatch 8",
        "optimizers.png",
        ("benchmarks/optimizers.py",),
        kept="half an hour",
    ),
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
        elif picture.kept and name not in args.names:
            print(f"{name}: takes {picture.kept}, so it is drawn only by `python benchmarks/pictures.py {name}`")
        else:
            print(name, flush=True)
            draw(name)


if __name__ == "__main__":
    main()
