"""`--plugins`: modules of the user's that register names for the options (`registration.py`).

Flags and preset files are the user's; a run directory, or a URL, may be anybody's. What these name is imported only if
this user's record of the run, outside of its directory, has the same files with the same contents.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError, told
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.host.paths import scheme, user_folder

FLAG = "--plugins"


class Unproven(tuple[str, ...]):
    """Plugins that a run's `config.toml`, or a URL, names."""

    place = ""  # that file


class UnprovenError(UserError):
    """A plugin that the user's record lacks, or has with other contents."""


def load_plugins(modules: Iterable[str], record: Mapping[str, str] | None = None) -> None:
    """Import modules, by name or as files; one that is there is not imported again. With a `record`, raises
    `UnprovenError` for one that does not match it."""
    for module in modules:
        with told(f"{FLAG} {module}", "a Python file, or a module that can be imported from here"):
            _imported(module, record)


def _imported(module: str, record: Mapping[str, str] | None) -> None:
    is_file, file = module.endswith(".py"), Path(module).resolve()
    name = f"megajax_plugin_{file.stem}" if is_file else module
    if name in sys.modules and (not is_file or getattr(sys.modules[name], "__file__", None) == str(file)):
        return
    if not is_file and "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    content = file.read_bytes() if is_file else b""
    if record is not None and record.get(module) != _proof(module, content):
        raise UnprovenError(module)
    if not is_file:
        importlib.import_module(module)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec, file
    sys.modules[name] = found = importlib.util.module_from_spec(spec)
    try:
        exec(compile(content, file, "exec", dont_inherit=True), found.__dict__)  # what was compared, nothing cached
    except BaseException:
        del sys.modules[name]
        raise


def _proof(module: str, content: bytes = b"") -> str:
    """The file of a module, or of its package, with a digest; empty if there is none."""
    with contextlib.suppress(OSError, ImportError, ValueError):
        spec = None if module.endswith(".py") else importlib.util.find_spec(module.partition(".")[0])  # not imported
        file = str(spec.origin) if spec else module
        return f"{hashlib.sha256(content or Path(file).read_bytes()).hexdigest()} {file}"
    return ""


def _record(run_dir: Path) -> tuple[str, Path]:
    """A run's whole path, and the file of this user's record of it; raises `OSError` for a user without a home."""
    run, folder = os.path.realpath(run_dir), user_folder("XDG_STATE_HOME", "~/.local/state")
    if folder is None:
        raise FileNotFoundError
    return run, folder / "megajax" / "plugins" / f"{hashlib.sha256(os.fsencode(run)).hexdigest()}.json"


def remember(run_dir: Path, modules: Sequence[str]) -> None:
    """Record that this user made a run with these plugins, if there is a home to write to."""
    with contextlib.suppress(OSError, UserError):
        run, file = _record(run_dir)
        if modules:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(file, json.dumps({"run": run, "plugins": {name: _proof(name) for name in modules}}))
            file.chmod(0o600)


def _recorded(location: str) -> dict[str, str]:
    """What this user has recorded of the run whose `config.toml` is at a location, by plugin."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):  # none, or a damaged one
        run, file = _record(Path(location).parent)
        status, content = file.lstat(), reading.parse_json(reading.read_bytes(file).decode())
        ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022 and not scheme(location)
        return {name: proof for name, proof in content["plugins"].items() if ours and proof and content["run"] == run}
    return {}


def plugins_in(argv: Sequence[str]) -> list[str]:
    """The modules that a command line names, which must be there before its other flags can be read."""
    modules: list[str] = []
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == FLAG:
            modules += [value] if value else []
            for further in argv[index + 1 :] if not value else ():
                if further.startswith("-"):
                    break
                modules.append(further)
    return modules


def lasting(modules: Iterable[str]) -> tuple[str, ...]:
    """The modules with whole paths in place of relative ones, for a run that goes on elsewhere."""
    return tuple(str(Path(module).absolute()) if module.endswith(".py") else module for module in modules)


def load_plugins_of(preset: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Import the plugins that values by key name. Those of a run that are not this user's are refused, unless an
    override replaces them."""
    for values in preset, overrides:
        named = values.get("plugins", ())
        names = named if isinstance(named, list | tuple) and all(isinstance(name, str) for name in named) else ()
        if not isinstance(named, Unproven):
            load_plugins(names)
            continue
        try:
            load_plugins(lasting(names), _recorded(named.place))
        except UnprovenError:
            if "plugins" not in overrides:
                raise UserError(
                    f"{named.place} names plugins, whose code would run, and by your record you did not make this run "
                    f"with them: {', '.join(names)}; valid: {FLAG} {shlex.join(names)}, if you trust that code"
                ) from None
