"""Which Python `make` installs for, with stand-ins for the Pythons of a machine, which install nothing."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"-m pip install"*) case "{broken}" in *{version}*) echo no wheel; exit 1 ;; esac ;;
    *"import pip"*) case "$*" in *"'{version}'"*) ;; *) exit 1 ;; esac ;;
    *"print"*) echo {version} ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what the Makefile reads, and one for programs."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "programs").mkdir()
    return tmp_path


def _have(clone: Path, *versions: str, broken: str = "") -> None:
    """A machine with these Pythons; for those that are broken, no packages can be installed."""
    for version in versions:
        program = clone / "programs" / f"python{version}"
        program.write_text(STAND_IN.format(version=version, broken=broken))
        program.chmod(0o755)
    shutil.copy(program, clone / "programs" / "python3")


def _make(clone: Path, *words: str) -> tuple[int, list[str]]:
    make = shutil.which("make")
    if not make:
        pytest.skip("needs make")
    path = {"PATH": f"{clone / 'programs'}:/usr/bin:/bin"}
    done = subprocess.run([make, "venv", *words], cwd=clone, env=path, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def _shim(clone: Path, version: str) -> None:
    """A program of that name that does not run, as pyenv's of a version that is not chosen."""
    (clone / "programs" / f"python{version}").write_text("#!/bin/sh\nexit 127\n")
    (clone / "programs" / f"python{version}").chmod(0o755)


def _installed(version: str) -> str:
    return f"Installing megajax[dev] for Python {version} into .venv"


def test_the_newest_that_runs_is_taken_and_kept(clone: Path) -> None:
    _have(clone, "3.11", "3.12")
    _shim(clone, "3.13")
    assert _make(clone) == (0, [_installed("3.12")])
    _have(clone, "3.13")
    assert "Nothing to be done" in " ".join(_make(clone)[1])
    (clone / "constraints.txt").touch()
    assert _make(clone) == (0, [_installed("3.12")])
    assert _make(clone, "PYTHON=python3.11") == (0, [_installed("3.11")])


def test_a_version_without_packages_gives_way_to_the_next(clone: Path) -> None:
    _have(clone, "3.11", "3.12", "3.13", broken="3.13")
    says = [
        _installed("3.13"),
        "no wheel",
        "Not all packages can be installed for Python 3.13",
        _installed("3.12"),
    ]
    assert _make(clone) == (0, says)
    assert "Nothing to be done" in " ".join(_make(clone)[1])
    code, said = _make(clone, "PYTHON=python3.13")
    assert code and said == says[:3]
