"""A mutant in the place of the module that it changes: `megajax` as it is imported in this process."""

import functools
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

from mutant import Mutant

ROOT = Path(__file__).parents[2]


@functools.cache
def texts() -> dict[Path, str]:
    """Every file of `megajax/`."""
    return {file: file.read_text() for file in sorted(ROOT.glob("megajax/**/*.py"))}


def found(text: str) -> list[Path]:
    """The files of `megajax/` that have a text, once for every time that they have it."""
    return [file for file, there in texts().items() for _ in range(there.count(text))]


def file_of(mutant: Mutant) -> Path:
    """The one file that a mutant changes."""
    files = found(mutant.old)
    assert len(files) == 1, f"not exactly once in megajax: {mutant.name}: {mutant.old!r}; aim it anew"
    return files[0]


def plant(mutant: Mutant) -> None:
    """Whoever imports the mutant's module in this process from now on gets the mutant."""
    file = file_of(mutant)
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert name not in sys.modules, f"{name} is there already"
    sys.meta_path.insert(0, _Mutated(name, file, texts()[file].replace(mutant.old, mutant.new)))


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """One module, from a text."""

    def __init__(self, name: str, file: Path, text: str):
        self.name, self.file, self.text = name, file, text

    def find_spec(self, name: str, path: object = None, target: object = None):
        if name != self.name:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(self.file))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def get_filename(self, name: str) -> str:
        return str(self.file)

    def get_data(self, path: str) -> bytes:
        return self.text.encode()

    def path_stats(self, path: str):
        raise OSError("nothing is kept of a mutant")  # no bytecode
