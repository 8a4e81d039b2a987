"""What the annotations of a field say of its values: ranges, and names that are found at run time."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from megajax.config import Config
from megajax.errors import UserError
from megajax.flags import Parser
from megajax.generation.options import GenerateOptions
from megajax.options import AT_LEAST_ZERO, SHARE, OneOf, check, options
from megajax.preparation.options import PrepareOptions

FAMILIES = {"gpt": 1}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section."""

    dropout: Annotated[float, "a rate", SHARE] = 0.0
    family: Annotated[str, "a name", OneOf(FAMILIES)] = "gpt"


@dataclass(frozen=True, kw_only=True)
class Sections:
    """A configuration."""

    size: Annotated[int, "a number that declares no range"] = 1
    rate: Annotated[float, "another"] = 1.0
    rest: Annotated[int, "one that does", AT_LEAST_ZERO] = 0
    model: Section = Section()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Sections(size=0), "--size 0; valid: 1 or more"),
        (Sections(rate=0.0), "--rate 0.0; valid: more than 0"),
        (Sections(rest=-1), "--rest -1; valid: 0 or more"),
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
    for line, words in (
        ("--size 0", "--size 0; valid: 1 or more"),
        ("--model.family=gptt", r"--model.family 'gptt'; valid: gpt \(did you mean gpt\?\)"),
        ("--model.family", "--model.family needs a value; valid: gpt"),
    ):
        with pytest.raises(UserError, match=words):
            parser.parse_args(line.split())
