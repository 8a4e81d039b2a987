"""The package as it is installed: a wheel, away from the clone, in an empty folder."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = ("--model.num-layers", 2, "--model.vocab-size", 400, "--model.sequence-length", 32, "--train.eval-batches", 1)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is unpacked to; what it needs is that of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = folder / "source"  # setuptools leaves a folder `build` in it
    source.mkdir()
    for name in ("megajax", "configs", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    built = subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, source], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"no wheel can be built here: {built.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "package", wheel], check=True)
    return folder / "package"


@pytest.mark.full
def test_a_wheel_alone_trains_evaluates_generates_and_exports(package: Path, tmp_path: Path) -> None:
    """The demo, smaller, on a text."""
    place, text = tmp_path / "empty", tmp_path / "text.txt"
    place.mkdir()
    paragraphs = (f"The paragraph number {n} says {n * n} things, some of them twice." for n in range(600))
    text.write_text("\n\n".join(paragraphs))

    def python(*words: object) -> str:
        command, environment = [sys.executable, *map(str, words)], os.environ | {"PYTHONPATH": str(package)}
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    run = functools.partial(python, "-m", "megajax")
    assert run("--version").startswith("megajax ")
    assert Path(python("-c", "import megajax; print(megajax.__file__)").strip()).parents[1] == package
    run("train", "demo", "--data.path", text, *SMALL, "--train.steps", 3, "--data.validation-fraction", 0.2)
    assert (place / "runs" / "demo" / "checkpoints" / "3").is_dir()
    assert json.loads(run("eval", "perplexity", "--checkpoint", "runs/demo").splitlines()[-1])["step"] == 3
    assert run("generate", "--checkpoint", "runs/demo", "--prompt", "The", "--max-tokens", 3).startswith("The")
    run("convert", "export-hf", "runs/demo", "exported")
    assert (place / "exported" / "model.safetensors").is_file()
    assert "fits" in run("plan", "finetune/qqp-336m", "--no-compile")
    assert "bubble" in run("schedule", "--mesh.pipe", 2, "--microbatches", 4)
