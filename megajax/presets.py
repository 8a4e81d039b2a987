"""Presets, TOML files with values of a configuration: finding and reading them, and replacing values by flags."""

import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from megajax.config import Config
from megajax.errors import UserError
from megajax.options import options, sections, suggest
from megajax.validation import check_values


def preset_folders() -> tuple[Path, ...]:
    """The folders where bare names are looked up: ./configs, then the source checkout's."""
    return Path("configs"), Path(__file__).resolve().parents[1] / "configs"


def preset_names() -> list[str]:
    """The bare names of all presets, sorted."""
    return sorted({file.stem for folder in preset_folders() for file in folder.glob("*.toml")})


def find_preset(name_or_file: str | Path) -> Path:
    """The file of a preset, given by its bare name or as a file.

    Raises:
        UserError: there is none.
    """
    path = Path(name_or_file)
    if path.suffix != ".toml" and path.name == str(name_or_file):
        for candidate in (folder / f"{path}.toml" for folder in preset_folders()):
            if candidate.is_file():
                return candidate
    if path.is_dir():
        raise UserError(f"{path} is a folder; valid: a preset's name, or a TOML file such as {path / 'config.toml'}")
    if not path.is_file():
        valid = f"valid: a TOML file, or one of {', '.join(preset_names())}"
        raise UserError(f"no preset {str(name_or_file)!r}; {suggest(path.stem, preset_names(), valid)}")
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: it cannot be read or is malformed, with the line.
    """
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; valid: a TOML file that can be read") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; valid: a TOML file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def load_preset(name_or_file: str | Path) -> dict[str, Any]:
    """The values of a preset by key; without a `run_dir` in it, that is runs/ and its name.

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
            raise UserError(f"{path}: {name} = {reprlib.repr(entry)}; valid tables: {known}")
        else:
            values[name] = entry
    values = {key: _convert(key, value, f"{path}: {key}") for key, value in values.items()}
    return values | {"run_dir": values.get("run_dir") or f"runs/{path.stem}"}


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
        raise UserError(f"{name} = {reprlib.repr(value)}; valid: {table[key].valid}") from None


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
    for option in options(Config).values():
        if option.default is MISSING and option.key not in values:
            raise UserError(f"the preset lacks {option.key} ({option.help}): add it, or pass {option.flag}")
    parts: dict[str, Any] = {"": {}} | {name: {} for name in sections(Config)}
    for key, value in values.items():
        section, _, field = key.rpartition(".")
        parts[section][field] = value
    config = Config(**parts[""], **{name: kind(**parts[name]) for name, kind in sections(Config).items()})
    check_values(config)
    return config
