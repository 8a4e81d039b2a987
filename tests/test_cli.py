"""The command `megajax`, and what an installed package brings with it."""

import fnmatch
import tomllib
from pathlib import Path

import pytest

import megajax
from megajax.cli import COMMANDS, main
from megajax.errors import UserError
from megajax.presets import find_preset, preset_folders

ROOT = Path(__file__).parents[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"megajax {megajax.__version__}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["frobnicate"], f"unknown command 'frobnicate'; valid: {', '.join(COMMANDS)}"),
        ([], f"COMMAND missing; valid: {', '.join(COMMANDS)}"),
    ],
)
def test_unknown_commands(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        main(words)
    assert str(error.value) == line


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
    monkeypatch.chdir(tmp_path)
    assert find_preset("demo").samefile(ROOT / "configs" / "demo.toml")
    assert find_preset("finetune/mnli-demo").samefile(ROOT / "configs" / "finetune" / "mnli-demo.toml")
    for wrong, said in (
        ("mnli-demo", "did you mean finetune/mnli-demo?"),
        ("gpt2-1.2", "gpt2-1.2b"),
        ("../demo", "no preset"),
        ("zzz", "one of bert-1.3b"),
    ):
        with pytest.raises(UserError, match="no preset") as error:
            find_preset(wrong)
        assert said in str(error.value)
