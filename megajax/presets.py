"""Presets, TOML files with values of a configuration: finding and reading them, and replacing values by flags."""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from megajax import reading, remote
from megajax.config import Config
from megajax.errors import UserError
from megajax.options import options, sections, shown, suggest
from megajax.paths import check_path, scheme
from megajax.tasks.registry import PRETRAINING, TASKS
from megajax.validation import check_values


def preset_folders() -> tuple[Path, ...]:
    """The folders where bare names are looked up: ./configs, then the package's, in a checkout a link to its own."""
    return Path("configs"), Path(__file__).resolve().parent / "configs"


def preset_names() -> list[str]:
    """The bare names of all presets, sorted."""
    return sorted({file.stem for folder in preset_folders() for file in folder.glob("*.toml")})


def _names_in_folders() -> list[str]:
    """Names of the presets in folders of the preset folders, sorted."""
    files = (file for folder in preset_folders() for file in folder.glob("*/*.toml"))
    return sorted({f"{file.parent.name}/{file.stem}" for file in files})


def _nearest(name: str, known: list[str]) -> str:
    near = [each for each in known if each.rpartition("/")[2] == name]
    near = near or difflib.get_close_matches(name, known, n=2)
    return f"did you mean {' or '.join(near)}?" if near else ""


def find_preset(name_or_file: str | Path) -> Path:
    """The file of a preset, given by its bare name, of one in a folder as finetune/mnli-336m, or as a file.

    Raises:
        UserError: there is none.
    """
    if scheme(name_or_file):
        return remote.fetch(str(name_or_file), "PRESET")
    check_path(name_or_file, "PRESET")
    path, name = Path(name_or_file), str(name_or_file)
    bare = path.name == name or (".." not in path.parts and not reading.kind(path))
    if path.suffix != ".toml" and bare:
        for candidate in (folder / f"{path}.toml" for folder in preset_folders()):
            if reading.is_file(candidate):
                return candidate
    there = reading.kind(path)
    if there == "a folder":
        raise UserError(f"{path} is a folder; valid: a preset's name, or a TOML file such as {path / 'config.toml'}")
    if there and there != "a file":
        raise UserError(f"{path} is {there}; valid: a preset's name, or a TOML file")
    if not there:
        valid = f"valid: a TOML file, or one of {', '.join(preset_names())}"
        known = [*preset_names(), *_names_in_folders()]
        raise UserError(f"no preset {name!r}; {_nearest(name.removesuffix('.toml'), known) or valid}")
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: it cannot be read or is malformed, with the line.
    """
    try:
        return reading.parse_toml(reading.read_bytes(path).decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; valid: a TOML file that can be read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; valid: a TOML file in UTF-8") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path}: not TOML: {error}; valid: TOML, as in configs/demo.toml") from None


def load_preset(name_or_file: str | Path) -> dict[str, Any]:
    """The values of a preset by key. Its `run_dir` is

    - for the config.toml of a run directory: that directory, wherever it lies now;
    - for a copy of one, which would name the directory of a run that goes on elsewhere: runs/ and its name;
    - for any other preset: what it says, else runs/ and its name.

    Raises:
        UserError: there is no such preset; its file is malformed TOML or has an unknown key or a value of another type.
    """
    path = find_preset(name_or_file)
    tables = read_toml(path)
    values = {}
    for name, entry in tables.items():
        if isinstance(entry, dict) and name in sections(Config):
            values.update({f"{name}.{key}": value for key, value in entry.items()})
        elif isinstance(entry, dict) or name in sections(Config):
            known = ", ".join(f"[{section}]" for section in sections(Config))
            raise UserError(f"{path}: {name} = {shown(entry)}; valid tables: {known}")
        else:
            values[name] = entry
    values = {key: _convert(key, value, f"{path}: {key}") for key, value in values.items()}
    if _lies_in_run(path):
        return values | {"run_dir": str(path.parent)}
    return values | {"run_dir": (not is_of_run(tables) and values.get("run_dir")) or f"runs/{path.stem}"}


_TABLES = {"model", "mesh", "pipeline", "train", "optimizer", "data", "tokenizer", "checkpoint", "sample"}
_VALUES = {"seed", "precision", "run_dir", "resume", "simulate_devices"}


def is_of_run(tables: Mapping[str, Any]) -> bool:
    """Whether a preset has every value, as training writes one, which nobody does by hand."""
    return tables.keys() >= _TABLES | _VALUES and all(isinstance(tables[name], dict) for name in _TABLES)


def _lies_in_run(path: Path) -> bool:
    return path.name == "config.toml" and any((path.parent / name).exists() for name in ("run.json", "checkpoints"))


def run_dir_left_out(name_or_file: str | Path) -> str:
    """The `run_dir` that `load_preset` does not follow, the preset being a copy of a run's; empty if there is none.

    Raises:
        UserError: the preset cannot be read.
    """
    path = find_preset(name_or_file)
    tables = read_toml(path)
    return str(tables["run_dir"]) if is_of_run(tables) and not _lies_in_run(path) else ""


def _convert(key: str, value: object, name: str) -> Any:
    """`value` as the type of `key`; `name` is the key with its file, or the flag, for error messages."""
    table = options(Config)
    if key not in table:
        section = key.rpartition(".")[0]
        valid = ", ".join(known for known in table if known.rpartition(".")[0] == section)
        raise UserError(f"{name}: unknown key; {suggest(key, table, f'valid: {valid}')}")
    try:
        return table[key].convert(value)
    except ValueError:
        raise UserError(f"{name} = {shown(value)}; valid: {table[key].valid}") from None


def resolve(preset: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of values by key, such as `{"mesh.data": 2}`; overrides replace those of the preset.

    Raises:
        UserError: an unknown key, a value that is not valid, or a value that is given nowhere.
    """
    overrides = {key: _convert(key, value, "--" + key.replace("_", "-")) for key, value in (overrides or {}).items()}
    values = {key: _convert(key, value, key) for key, value in preset.items()}
    for key, other in (("data.path", "data.sources"), ("data.sources", "data.path")):
        if overrides.get(key) and other not in overrides:
            values.pop(other, None)  # one corpus takes the place of several, and several that of one
    values |= overrides
    if (task := TASKS.get(values.get("task.name", PRETRAINING))) is not None:
        resets = {"data.reset_attention": True} if task.continues_text else {}
        values = {"model.head": task.head, "model.num_classes": task.classes} | resets | values
    for option in options(Config).values():
        if option.default is MISSING and option.key not in values:
            raise UserError(f"{option.flag} missing ({option.help}); valid: that flag, or {option.key} in the preset")
    parts: dict[str, Any] = {"": {}} | {name: {} for name in sections(Config)}
    for key, value in values.items():
        section, _, field = key.rpartition(".")
        parts[section][field] = value
    config = Config(**parts[""], **{name: kind(**parts[name]) for name, kind in sections(Config).items()})
    check_values(config)
    return config
