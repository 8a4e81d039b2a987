"""The command `megajax`, and what an installed package brings with it."""

import fnmatch
import tomllib
from pathlib import Path

import pytest

import megajax
from megajax.cli import COMMANDS, main
from megajax.errors import UserError
from megajax.settings.preset_files import find_preset, preset_folders

ROOT = Path(__file__).parents[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"megajax {megajax.__version__}\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["--hlep"], "unknown command '--hlep'; did you mean --help?"),
        (["convert", "import"], "convert import: no such action; did you mean import-hf? valid: import-hf, export-hf"),
        (["convert", "frobnicate"], "convert frobnicate: no such action; valid: import-hf, export-hf"),
        (["eval", "perplexitty", "--checkpoint", "x"], "TASK 'perplexitty'; did you mean perplexity? valid: "),
        (["train", "finetune/mnli-dmeo"], "no preset 'finetune/mnli-dmeo'; did you mean finetune/mnli-demo"),
        (
            ["verify", "configs/finetune/mnli-dmeo.toml"],
            "no such file 'configs/finetune/mnli-dmeo.toml'; did you mean ",
        ),
        (["plan", "demo", "--gpu", "h10"], "--gpu 'h10'; valid: h100, h200, a100, v100, b200 (did you mean h100"),
        (["frobnicate"], f"unknown command 'frobnicate'; valid: {', '.join(COMMANDS)}"),
        ([], f"COMMAND missing; valid: {', '.join(COMMANDS)}"),
    ],
)
def test_unknown_commands(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        main(words)
    assert str(error.value).startswith(line)


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
        with pytest.raises(UserError, match=r"no preset|no such file") as error:
            find_preset(wrong)
        assert said in str(error.value)
