"""What the annotations of a field say of its values: ranges, and names that are found at run time."""

import re
from dataclasses import MISSING, dataclass
from typing import Annotated, Literal

import pytest

from megajax.config import Config
from megajax.errors import UserError
from megajax.generation.options import GenerateOptions
from megajax.options import AT_LEAST_ZERO, SHARE, OneOf, Option, check, is_whole, number, options, shown
from megajax.preparation.options import PrepareOptions
from megajax.settings.flags import Parser

FAMILIES = {"gpt": 1}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section."""

    dropout: Annotated[float, "100% of it", SHARE] = 0.0
    family: Annotated[str, "a name", OneOf(FAMILIES)] = "gpt"


@dataclass(frozen=True, kw_only=True)
class Sections:
    """A configuration."""

    size: Annotated[int, "a number that declares no range"] = 1
    rate: Annotated[float, "another"] = 1.0
    switch: Annotated[bool, "on or off"] = False
    zero: Annotated[Literal[0, 1, 3], "a numbered choice"] = 0
    rest: Annotated[int, "one that does", AT_LEAST_ZERO] = 0
    model: Section = Section()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Sections(size=0), "--size 0; valid: 1 to 1000000000"),
        (Sections(rate=0.0), "--rate 0.0; valid: more than 0 and at most 1000000000"),
        (Sections(rest=-1), "--rest -1; valid: 0 to 1000000000"),
        (Sections(model=Section(dropout=1.5)), "--model.dropout 1.5; valid: 0 or more and less than 1"),
        (Sections(model=Section(family="zzz")), "--model.family 'zzz'; valid: gpt"),
        (Sections(model=Section(family="gtp")), "--model.family 'gtp'; valid: gpt (did you mean gpt?)"),
        (GenerateOptions(top_p=1.5), "--top-p 1.5; valid: more than 0 and at most 1"),
        (PrepareOptions(jaccard=0.1), "--jaccard 0.1; valid: 0.3 to 0.99"),
        (PrepareOptions(text_key=""), "--text-key is empty; valid: one character or more"),
    ],
)
def test_a_value_that_is_not_valid_is_named_with_what_is(given: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check(given)
    assert str(caught.value) == message


def test_valid_values_are_passed() -> None:
    for given in Sections(), Sections(rest=0), GenerateOptions(), PrepareOptions(duplicates="keep"):
        check(given)


def test_names_that_come_later_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="valid: gpt"):
        check(Sections(model=Section(family="bert")))
    monkeypatch.setitem(FAMILIES, "bert", 2)
    check(Sections(model=Section(family="bert")))
    assert options(Sections)["model.family"].choices == ("gpt", "bert")


def test_flags_are_checked_as_they_are_read_and_help_lists_the_names() -> None:
    parser = Parser("Test.", "test")
    parser.add_config_flags(owner=Sections)
    parser.add_config_flags("mesh", owner=Config)
    assert "--model.family {gpt}" in parser.format_help()
    args = parser.parse_args(["--model.family", "gpt", "--size", "3", "--mesh.data", "2"])
    assert parser.overrides(args, Sections) == {"model.family": "gpt", "size": 3}
    assert parser.overrides(args) == {"model.family": "gpt", "size": 3, "mesh.data": 2}
    assert parser.overrides(parser.parse_args([]), Sections) == {}
    args = parser.parse_args(["--switch", "--zero", "0"])
    assert parser.overrides(args, Sections) == {"switch": True, "zero": 0}
    assert parser.overrides(parser.parse_args(["--no-switch"]), Sections) == {"switch": False}
    assert "100% of it [0.0]" in parser.format_help()
    for line, words in (
        ("--size 0", "--size 0; valid: 1 to 1000000000"),
        ("--model.family=gptt", r"--model.family 'gptt'; valid: gpt \(did you mean gpt\?\)"),
        ("--switch=3", "takes no value; valid:"),
        ("--zero 2", "valid: 0, 1, 3"),
        ("--model.family", "--model.family needs a value; valid: gpt"),
    ):
        with pytest.raises(UserError, match=words):
            parser.parse_args(line.split())


NUMBERS = [
    pytest.param(option, id=f"{owner.__name__} {option.flag}")
    for owner in (Config, GenerateOptions, PrepareOptions)
    for option in options(owner).values()
    if option.kind in (int, float)
]


@pytest.mark.parametrize("option", NUMBERS)
def test_every_number_has_a_range(option: Option) -> None:
    """So that a slip of some digits is found before anything is allocated; the default lies in it."""
    assert option.problem(option.kind(1e30) * 10) and option.problem(-option.kind(1e30))
    assert option.default is MISSING or not option.problem(option.default)
    assert re.search(r"\d$|=|not given$|norm$|\^64$|core$|less than 1$", option.valid), option.valid


@pytest.mark.parametrize("text", ["٣", "１", "²", "1 ", " 1", "", "1e3", "0x1", "--1", "1" * 301, "\n1"])
def test_whole_numbers_are_in_the_digits_0_to_9(text: str) -> None:
    with pytest.raises(ValueError):
        number(text)
    assert not is_whole(text) or len(text) > 300


def test_numbers() -> None:
    assert [number("12"), number("-3"), number("300_000"), number("1e-3", float)] == [12, -3, 300_000, 1e-3]
    assert is_whole("0") and not is_whole("-1") and not is_whole("1_0")
    for text in ("٣.٥", "1" * 301):
        with pytest.raises(ValueError):
            number(text, float)
    rate = options(Sections)["rate"]
    for value in (10**400, -(10**400), float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError):
            rate.convert(value)
    assert len(shown("9" * 5000)) < 100 and len(shown(10**4000)) < 200
