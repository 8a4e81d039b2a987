"""`--plugins`: modules of the user's that register names for the options (`registration.py`)."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import told

FLAG = "--plugins"


def load_plugins(modules: Iterable[str]) -> None:
    """Import modules, by name or as files; one that is there is not imported again."""
    for module in modules:
        with told(f"{FLAG} {module}", "a Python file, or a module that can be imported from here"):
            _imported(module)


def _imported(module: str) -> None:
    if not module.endswith(".py"):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        importlib.import_module(module)
        return
    file = Path(module).resolve()
    name = f"megajax_plugin_{file.stem}"
    if getattr(sys.modules.get(name), "__file__", None) == str(file):
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader, file
    sys.modules[name] = found = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(found)
    except BaseException:
        del sys.modules[name]
        raise


def plugins_in(argv: Sequence[str]) -> list[str]:
    """The modules that a command line names, which must be there before its other flags can be read."""
    found: list[str] = []
    for place, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == FLAG:
            found += [value] if value else []
            for further in argv[place + 1 :] if not value else ():
                if further.startswith("-"):
                    break
                found.append(further)
    return found


def lasting(modules: Iterable[str]) -> tuple[str, ...]:
    """The modules with whole paths in place of relative ones, for a run that goes on elsewhere."""
    return tuple(str(Path(module).absolute()) if module.endswith(".py") else module for module in modules)


def load_plugins_of(*values: Mapping[str, Any]) -> None:
    """Import the plugins that some values by key name, such as a run's."""
    for each in values:
        named = each.get("plugins", ())
        load_plugins(named if isinstance(named, list | tuple) and all(isinstance(name, str) for name in named) else ())
