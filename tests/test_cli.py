"""The command `megajax`, and the package as it is installed: a wheel, away from the clone, in an empty folder."""

import fnmatch
import functools
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tiny import user_error

import megajax
from megajax.__main__ import COMMANDS, main
from megajax.settings.preset_files import find_preset, preset_folders

ROOT = Path(__file__).parents[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"megajax {megajax.__version__}\n"


def test_a_clone_called_megajax_does_not_hide_the_package(tmp_path: Path) -> None:
    """From the folder beside it, where Python sees a folder `megajax` without `__init__.py` first: an editable install
    is a path file."""
    pytest.importorskip("setuptools", minversion="77")
    clone, site = tmp_path / "megajax", tmp_path / "site"
    (clone / "megajax").mkdir(parents=True)
    site.mkdir()
    (clone / "megajax" / "__init__.py").write_text("found = True\n")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (clone / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, site], cwd=clone, check=True, capture_output=True)
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    program = "import site, sys; site.addsitedir(sys.argv[1]); import megajax; print(megajax.found)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, site], cwd=tmp_path, env=environment, capture_output=True
    )
    assert done.stdout == b"True\n", done.stderr


def test_flags_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    """With underscores for hyphens, and whole numbers as 1e2; of --help one section alone, with defaults in words."""
    main(["train", "demo", "--train.global_batch=16", "--train.steps", "1e2", "--print-config"])
    said = capsys.readouterr().out
    assert "steps = 100 " in said and "global_batch = 16 " in said
    with pytest.raises(SystemExit):
        main(["train", "demo", "--help", "data"])
    said = capsys.readouterr().out
    assert "--data.path" in said and "--train.steps" not in said and "[python-stdlib]" in said and "[off]" in said


def test_the_version_is_the_same_everywhere() -> None:
    """CONTRIBUTING.md lists these places for a release."""
    version = megajax.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    for name, text in (
        ("CITATION.cff", f"\nversion: {version}\n"),
        ("README.md", f"| megajax {version} |"),
        ("docs/start.md", f"megajax-{version}-py3"),
        ("CHANGELOG.md", f"\n## [{version}] - "),
    ):
        assert text in (ROOT / name).read_text(), name


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["convert", "import"], "convert import: no such action; did you mean import-hf? valid: import-hf, export-hf"),
        (["verify", "configs/finetune/mnli-dmeo.toml"], "no such file 'configs/finetune/mnli-dmeo.toml'; did you"),
        (["chat"], "chat: unknown command; valid: megajax generate --checkpoint RUN --interactive"),
        (["export"], "export: unknown command; valid: megajax convert export-hf RUN PATH"),
        (["train", "demo", "--fsdp", "8"], "--fsdp: unknown flag; megajax calls it --optimizer.zero 3, with"),
        (["train", "--help", "optimiser"], "--help optimiser; did you mean optimizer?"),
        (["frobnicate"], f"unknown command 'frobnicate'; valid: {', '.join(COMMANDS)}"),
        ([], f"COMMAND missing; valid: {', '.join(COMMANDS)}"),
    ],
)
def test_unknown_commands(words: list[str], line: str) -> None:
    assert user_error(main, words).startswith(line)


def test_every_preset_is_in_the_package() -> None:
    """The package's folder is a link to the checkout's, and a wheel takes what stands in it."""
    package = preset_folders()[1]
    assert package.parent == Path(megajax.__file__).parent and package.resolve() == ROOT / "configs"
    taken = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["megajax"]
    presets = [f"configs/{file.relative_to(package)}" for file in sorted(package.rglob("*.toml"))]
    assert presets and all(any(fnmatch.fnmatch(preset, pattern) for pattern in taken) for preset in presets)


def test_names_of_presets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of any working directory, whatever folders lie there; those of a folder with the folder."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert find_preset("demo").samefile(ROOT / "configs" / "demo.toml")
    assert find_preset("finetune/mnli-demo").samefile(ROOT / "configs" / "finetune" / "mnli-demo.toml")
    for wrong, said in (
        ("mnli-demo", "did you mean finetune/mnli-demo?"),
        ("gpt2-1.2", "gpt2-1.2b"),
        ("../demo", "no preset"),
        ("zzz", "one of bert-1.3b"),
        ("mien.toml", "did you mean mine.toml?"),
    ):
        found = user_error(find_preset, wrong)
        assert said in found and ("no preset" in found or "no such file" in found)


SMALL = ("--model.num-layers", 2, "--model.vocab-size", 400, "--model.sequence-length", 32, "--train.eval-batches", 1)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is unpacked to; what it needs is that of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    source = folder / "source"  # setuptools leaves a folder `build` in it
    source.mkdir()
    for name in ("megajax", "jaxequal", "configs", "pyproject.toml", "README.md", "LICENSE"):
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
