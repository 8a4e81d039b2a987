"""Checks of single options, and options and values as error messages quote them."""

import reprlib
import shlex
from operator import attrgetter
from typing import Any

from megajax.core.errors import UserError
from megajax.core.options import options
from megajax.core.traits import Changes, OnlyWith, Through


def check(section: object) -> None:
    """Check the fields of a configuration dataclass's instance, and of its sections, each by itself."""
    owner: Any = type(section)
    for key, option in options(owner).items():
        if problem := option.problem(attrgetter(key)(section)):
            raise UserError(f"{option.flag} {problem}")


def check_read(section: object, name: str) -> None:
    """In the section called `name`, check that an option that is read only with some values of another option has its
    default otherwise."""
    owner: Any = type(section)
    for field, option in options(owner).items():
        value, reader = getattr(section, field), option.trait(OnlyWith)
        if reader and not reader.ignored and not reader.is_read(section) and value != option.default:
            setting, without = (as_flag(f"{name}.{field}", each) for each in (value, option.default))
            key, reader_value = f"{name}.{reader.name}", getattr(section, reader.name)
            valid = as_flag(key, True) if reader_value is False else f"--{key.replace('_', '-')} {reader.words}"
            raise UserError(f"{setting} with {as_flag(key, reader_value)}; valid: {valid}, or {without}")


def as_flag(key: str, value: object) -> str:
    """An option with a value, as on the command line: `--model.norm rmsnorm`, `--no-model.query-key-norm`."""
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    short = isinstance(value, float) and float(f"{value:g}") == value
    texts = [str(each) for each in value] if isinstance(value, tuple) else [f"{value:g}" if short else str(value)]
    return f"--{name} {shlex.join(texts)}"


def shown(value: object) -> str:
    """A value as quoted in error messages, cut if it is long."""
    return _SHOWN.repr(value)


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlong = 100


def compared(owner: type, *changes: Changes) -> dict[str, str]:
    """What to compare in two configurations to see whether they differ in options that declare one of these changes:
    keys of options, or of the properties through which they matter, each with its option's key."""
    keys = {}
    for key, option in options(owner).items():
        if option.trait(Changes) in changes:
            section, dot, _ = key.rpartition(".")
            through = option.trait(Through)
            keys[f"{section}{dot}{through.name}" if through else key] = key
    return keys
