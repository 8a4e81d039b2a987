"""Print a configuration as a preset that says where every value comes from (`--print-config`)."""

from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import tomli_w

from megajax.core.options import Option, options
from megajax.settings.config import Config
from megajax.settings.presets import OF_START, Preset, task_values

_WIDTH = 40  # column of the comments, if values are short


def printed(config: Config, preset: Preset, overrides: Mapping[str, Any]) -> str:
    """The text of a preset that gives `config`, which was made from `preset` and `overrides`.

    Values that belong to one run and its machine are commented out, unless a flag or the user's preset sets them.
    """
    origins = {"run_dir": "the preset's name"} | dict.fromkeys(task_values({**preset.values, **overrides}), "task.name")
    origins |= preset.origins | {key: f"flag {options(Config)[key].flag}" for key in overrides}
    lines = [f"# The configuration of {_comment(preset.place)}, with where every value is from."]
    section = ""
    for key, option in options(Config).items():
        table, _, field = key.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        value = attrgetter(key)(config)
        line = f"{field} = {_toml(value)}"
        if key in OF_START and key not in overrides and (key not in preset.origins or preset.of_run):
            line = f"# {line}"
        lines.append(f"{line:<{_WIDTH}}  # {_comment(origins.get(key) or _default_origin(option, value))}")
    return "\n".join(lines)


def _default_origin(option: Option, value: Any) -> str:
    """Where a value comes from that is set by no flag, preset or task."""
    if value == option.default:
        return "default"
    meaning = next((part for part in option.help.split("; ") if part.startswith(f"{option.default}: ")), "")
    return f"default, {meaning}" if meaning else "default"


def _toml(value: Any) -> str:
    """A value as one line of TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if hasattr(value, "__dataclass_fields__"):
        value = asdict(value)
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(part)}' for key, part in value.items())} }}"
    return tomli_w.dumps({"value": value}).partition(" = ")[2].rstrip("\n")


def _comment(text: str) -> str:
    """A text that is safe in a comment, and on any terminal."""
    return text.encode("unicode_escape", "backslashreplace").decode() if not text.isprintable() else text
