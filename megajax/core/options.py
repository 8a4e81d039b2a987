"""The fields of configuration dataclasses as options: a key, a type, a default, a help text and valid values.

A field is declared once, as in `dropout: Annotated[float, "probability to drop", SHARE] = 0.1`; presets, flags,
`--help`, checks and error messages are derived from it. A number without a declared range must be positive and at most
10^9. A field whose type is a dataclass is a section.
"""

import difflib
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from megajax.core.traits import IsPath, Named

_Trait = TypeVar("_Trait")


@dataclass(frozen=True)
class Range:
    """The valid values of a numeric or text field, given by a condition."""

    contains: Callable[[Any], bool]  # whether a value of the field's type is valid
    words: str  # the valid values, as in error messages

    def problem(self, value: Any) -> str:
        """The end of an error message about `value`; empty if it is valid."""
        return "" if self.contains(value) else f"{'is empty' if value == '' else value}; valid: {self.words}"


@dataclass(frozen=True, eq=False)
class OneOf:
    """The valid names for a text field, looked up whenever they are needed."""

    names: Collection[str]  # such as the keys of a dict, which may grow after the field is declared
    instead: Mapping[str, str] | None = None  # what to use for names in other systems

    def problem(self, value: str) -> str:
        """The end of an error message about `value`, with the nearest name; empty if it is valid."""
        if value in self.names:
            return ""
        near = (self.instead or {}).get(value.lower()) or suggest(value, self.names, otherwise="")
        return f"{value!r}; valid: {', '.join(self.names)}{near and f' ({near})'}"


def between(least: float, most: float) -> Range:
    """The numbers from `least` to `most`, inclusive."""
    return Range(lambda x: least <= x <= most, f"{least} to {most}")


def above(least: float, most: float) -> Range:
    """The numbers above `least`, up to and including `most`."""
    return Range(lambda x: least < x <= most, f"more than {least} and at most {most}")


MOST = 10**9  # limit of a number without a declared range; more is a typo
AT_LEAST_ONE = between(1, MOST)
AT_LEAST_ZERO = between(0, MOST)
MORE_THAN_ZERO = above(0, MOST)
SHARE = Range(lambda x: 0 <= x < 1, "0 or more and less than 1")
SEED = between(0, 2**31 - 1)
NOT_EMPTY = Range(bool, "one character or more")


@dataclass(frozen=True)
class Option:
    """A field, as a key of presets (`train.global_batch`) and as a flag (`--train.global-batch`)."""

    key: str  # the field's name, after its section's name if it is in one
    kind: Any  # int, float, bool, str, a Literal of strings or ints, a tuple of texts or of a dataclass's records
    default: Any  # dataclasses.MISSING if a value must be given
    help: str
    declared: Range | OneOf | None = None  # valid values; None: all of its type, for numbers the positive ones
    traits: tuple[Any, ...] = ()  # everything else that the field declares (`megajax.core.traits`)

    def trait(self, kind: type[_Trait]) -> _Trait | None:
        """The field's trait of this type; None if it does not declare one."""
        return next((trait for trait in self.traits if isinstance(trait, kind)), None)

    @property
    def flag(self) -> str:
        """The key as a flag."""
        return "--" + self.key.replace("_", "-")

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal, or the names of a `OneOf`; empty for anything else."""
        return tuple(self.declared.names) if isinstance(self.declared, OneOf) else self._literals

    @property
    def _literals(self) -> tuple[Any, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def record(self) -> Any:
        """The dataclass of `tuple[Record, ...]`; None for any other type."""
        return get_args(self.kind)[0] if get_origin(self.kind) is tuple and not self.is_list else None

    @property
    def is_list(self) -> bool:
        """Whether it is a list of texts, `tuple[str, ...]`: a list in presets, several arguments of one flag."""
        return self.kind == tuple[str, ...]

    @property
    def valid(self) -> str:
        """The valid values of its type, in words."""
        if self.choices:
            return ", ".join(map(str, self.choices))
        if self.record:
            entries = ", ".join(f"{field.name} = …" for field in fields(self.record))
            return f"TOML as in [{{ {entries} }}, …]"
        if self.is_list:
            return "one text or more, each in UTF-8, without NUL"
        words = {bool: "true or false", str: "text in UTF-8, without NUL", int: "a whole number"}
        word = words.get(self.kind, "a finite number")
        word = f"{named.word}, or {word}" if (named := self.trait(Named)) else word
        return f"{word}, {self._range.words}" if self.kind in (int, float) and self._range.words else word

    @property
    def _range(self) -> Range:
        """The range of a number."""
        default = AT_LEAST_ONE if self.kind is int else MORE_THAN_ZERO
        return self.declared if isinstance(self.declared, Range) else default

    def convert(self, value: Any) -> Any:
        """`value` as this field's type; raises `ValueError` if it has another type: "8" is not a number."""
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif getattr(value, "shape", None) == ():  # a number of NumPy or JAX
            value = value.item()
        elif (named := self.trait(Named)) and value == named.word:
            return named.number
        if self._literals:
            value = str(value).lower() if isinstance(value, bool) else value
            good = any(type(value) is type(choice) and value == choice for choice in self._literals)
        elif self.record:
            return _records(self.record, value)
        elif self.is_list:
            if not isinstance(value, list | tuple):
                raise ValueError(value)
            return tuple(map(replace(self, kind=str).convert, value))
        elif self.kind is float:
            good = type(value) is float or (type(value) is int and abs(value) < 1 << 1000)  # fits in a float
            good = good and math.isfinite(value)
            value = float(value) if good else value
        else:
            good = type(value) is self.kind
        if not good:
            raise ValueError(value)
        if isinstance(value, str):
            value.encode()  # raises for an argument that is not UTF-8: its surrogates could not be written to a file
            if "\0" in value:  # not valid in paths
                raise ValueError(value)
            if self.trait(IsPath):
                value = os.path.expanduser(value)
        return value

    def parse(self, text: str) -> Any:
        """A flag's text, or one argument of a list, as this field's type (but records); raises `ValueError` if it is
        not valid."""
        if self._literals:
            return self.convert({str(choice): choice for choice in self._literals}.get(text, text))
        if self.kind is bool:
            return self.convert({"true": True, "false": False}.get(text))
        if self.is_list:
            return replace(self, kind=str).convert(text)
        is_word = (named := self.trait(Named)) is not None and text == named.word
        return self.convert(text if self.kind is str or is_word else number(text, self.kind))

    def problem(self, value: Any) -> str:
        """What an error message says after the flag about a value of the right type; empty if it is valid."""
        valid = self._range if self.kind in (int, float) else self.declared
        each = value if isinstance(value, tuple) and self.is_list else (value,)
        return next(filter(None, map(valid.problem, each)), "") if valid else ""


def number(text: str, kind: type[int] | type[float] = int) -> Any:
    """The number that a text spells with digits 0 to 9, also as 1e3 where it is whole; raises `ValueError` if it spells
    none, or is too long."""
    if not text.isascii() or len(text) > _LONGEST or text != text.strip():
        raise ValueError(text)
    if kind is int and re.fullmatch(r"[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,2}", text):
        whole = Decimal(text)
        if whole != whole.to_integral_value():
            raise ValueError(text)
        return int(whole)
    return kind(text)


def is_whole(text: str) -> bool:
    """Whether a text is a whole number, 0 or more, in digits 0 to 9."""
    return text.isascii() and text.isdecimal() and len(text) <= _LONGEST


_LONGEST = 300  # characters in a number


def _records(kind: Any, value: Any) -> tuple[Any, ...]:
    """A list of tables or records, converted to records; raises `ValueError` if it is not one."""
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
    """Every field of the dataclass `owner` and of its sections, by key, in the order of declaration."""
    table = {}
    for prefix, part in {"": owner, **{f"{name}.": kind for name, kind in sections(owner).items()}}.items():
        hints = get_type_hints(part, include_extras=True)
        for field in fields(part):
            if get_origin(hints[field.name]) is Annotated:
                kind, help_text, *rest = get_args(hints[field.name])
                declared = next((each for each in rest if isinstance(each, Range | OneOf)), None)
                traits = tuple(each for each in rest if each is not declared)
                key = prefix + field.name
                table[key] = Option(key, kind, field.default, help_text, declared, traits)
    return table


def counted(number: float, noun: str, form: str = ",") -> str:
    """`1 step`, `2,000 steps`, `2 processes`."""
    text = f"{number:{form}}"
    return f"{text} {noun}{'' if text == '1' else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def suggest(unknown: str, valid: Iterable[str], otherwise: str) -> str:
    """The end of an error message about an unknown key, flag or name: the nearest valid ones, or `otherwise`."""

    def parts(name: str) -> tuple[str, str]:
        section, _, word = name.rpartition(".")
        return section, word.lstrip("-").replace("_", "-").lower()

    (section, word), valid = parts(unknown), list(valid)
    same_section = {parts(name)[1]: name for name in valid if parts(name)[0] == section}
    near = (
        [name for name in valid if parts(name)[1] == word]
        or [same_section[match] for match in difflib.get_close_matches(word, same_section, n=2)]
        or difflib.get_close_matches(unknown, valid, n=2, cutoff=0.85)
    )
    return f"did you mean {' or '.join(near)}?" if near else otherwise
