"""The fields of configuration dataclasses as options: a key, a type, a default and a help text each.

A field is declared once, as in `keep: Annotated[int, "newest checkpoints to keep"] = 3`; presets, flags, `--help` and
error messages are derived from it. A field whose type is a dataclass is a section.
"""

import difflib
import functools
import math
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Option:
    """One field: as a preset's key (`train.global_batch`), as a flag (`--train.global-batch`)."""

    key: str
    kind: Any  # int, float, bool, str, a Literal of strings or whole numbers, or a tuple of a dataclass's records
    default: Any  # dataclasses.MISSING where a value must be given
    help: str

    @property
    def flag(self) -> str:
        """The key as a flag."""
        return "--" + self.key.replace("_", "-")

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal; empty for any other type."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def record(self) -> Any:
        """The dataclass of `tuple[Record, ...]`; None for any other type."""
        return get_args(self.kind)[0] if get_origin(self.kind) is tuple else None

    @property
    def valid(self) -> str:
        """What may be written, in words."""
        if self.choices:
            return ", ".join(map(str, self.choices))
        if self.record:
            entries = ", ".join(f"{field.name} = …" for field in fields(self.record))
            return f"TOML as in [{{ {entries} }}, …]"
        return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text in UTF-8"}[self.kind]

    def convert(self, value: Any) -> Any:
        """`value` as this field's type. Raises `ValueError` where it isn't one: nothing is guessed, "8" is not 8."""
        if self.choices:
            value = str(value).lower() if isinstance(value, bool) else value
            good = any(type(value) is type(choice) and value == choice for choice in self.choices)
        elif self.record:
            return _records(self.record, value)
        elif self.kind is float:
            good = type(value) in (int, float) and math.isfinite(value)
            value = float(value) if good else value
        else:
            good = type(value) is self.kind
        if not good:
            raise ValueError(value)
        if isinstance(value, str):
            value.encode()  # an argument that is not UTF-8 has surrogates, which no file would take
        return value

    def parse(self, text: str) -> Any:
        """`convert` for the text of a flag. Raises `ValueError`."""
        if self.choices:
            return self.convert({str(choice): choice for choice in self.choices}.get(text, text))
        if self.kind is bool:
            return self.convert({"true": True, "false": False}.get(text))
        if self.record:
            return self.convert(tomllib.loads(f"value = {text}")["value"])
        return self.convert(self.kind(text))


def _records(kind: Any, value: Any) -> tuple[Any, ...]:
    """A list of tables, or of records that already are one, as records. Raises `ValueError`."""
    if not isinstance(value, list | tuple):
        raise ValueError(value)
    known, records = options(kind), []
    for entry in value:
        entry = asdict(entry) if isinstance(entry, kind) else entry
        required = {key for key, option in known.items() if option.default is MISSING}
        if not isinstance(entry, dict) or not required <= entry.keys() <= known.keys():
            raise ValueError(entry)
        records.append(kind(**{key: known[key].convert(part) for key, part in entry.items()}))
    return tuple(records)


@functools.cache
def sections(owner: type) -> dict[str, type]:
    """The fields of the dataclass `owner` whose types are dataclasses."""
    return {name: kind for name, kind in get_type_hints(owner).items() if isinstance(kind, type) and is_dataclass(kind)}


@functools.cache
def options(owner: type) -> dict[str, Option]:
    """Every field of the dataclass `owner` and of its sections by key, in the order of declaration."""
    table = {}
    for prefix, part in {"": owner, **{f"{name}.": kind for name, kind in sections(owner).items()}}.items():
        hints = get_type_hints(part, include_extras=True)
        for field in fields(part):
            if get_origin(hints[field.name]) is Annotated:
                kind, help_text = get_args(hints[field.name])
                table[prefix + field.name] = Option(prefix + field.name, kind, field.default, help_text)
    return table


def suggest(unknown: str, valid: Iterable[str], otherwise: str) -> str:
    """The end of an error message about an unknown key or flag: the valid ones nearest to it, or else `otherwise`."""

    def split(name: str) -> tuple[str, str]:
        section, _, word = name.rpartition(".")
        return section, word.lstrip("-").replace("_", "-")

    (section, word), valid = split(unknown), list(valid)
    same_section = {split(name)[1]: name for name in valid if split(name)[0] == section}
    near = (
        [name for name in valid if split(name)[1] == word]
        or [same_section[match] for match in difflib.get_close_matches(word, same_section, n=2)]
        or difflib.get_close_matches(unknown, valid, n=2, cutoff=0.85)
    )
    return f"did you mean {' or '.join(near)}?" if near else otherwise
