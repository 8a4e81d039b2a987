"""What the annotations of a field say of its values: ranges, names that are found at run time, and all that resuming,
`--init`, `verify` and the mesh need to know of it, shown with options that only the tests add."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from tiny import user_error

from megajax.convert.exchange import Exchange
from megajax.convert.families import EXCHANGES
from megajax.core.errors import UserError
from megajax.core.mesh import RULES
from megajax.core.models.config import ModelConfig
from megajax.core.options import AT_LEAST_ZERO, SHARE, OneOf, Option, between, is_whole, number, options, sections
from megajax.core.parallel.collectives import TENSOR
from megajax.core.traits import COMPUTATION, NOTHING, WEIGHTS, Changes, ShrinkRule, Size
from megajax.generation.generate_options import GenerateOptions
from megajax.preparation.prepare_options import PrepareOptions
from megajax.runs.directory import check_claim
from megajax.runs.init import check_init
from megajax.runs.ownership import mark
from megajax.settings.config import Config, to_toml
from megajax.settings.flags import Parser
from megajax.settings.option_errors import check, shown
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_mesh
from megajax.verify.shrink import shrink

FAMILIES = {"gpt": 1}


@dataclass(frozen=True, kw_only=True)
class Section:
    dropout: Annotated[float, "100% of it", SHARE] = 0.0
    family: Annotated[str, "a name", OneOf(FAMILIES)] = "gpt"


@dataclass(frozen=True, kw_only=True)
class Sections:
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
    assert user_error(check, given) == message


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
    assert "100% of it [0]" in parser.format_help()
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
    assert re.search(r"\d$|=|not given$|never$|\^64$|core$|less than 1$", option.valid), option.valid


@pytest.mark.parametrize("text", ["٣", "１", "²", "1 ", " 1", "", "1e-3", "0x1", "--1", "1" * 301, "\n1"])
def test_whole_numbers_are_in_the_digits_0_to_9(text: str) -> None:
    with pytest.raises(ValueError):
        number(text)
    assert not is_whole(text) or len(text) > 300


def test_numbers() -> None:
    assert [number("12"), number("300_000"), number("1e3"), number("1e-3", float)] == [12, 300_000, 1000, 1e-3]
    assert is_whole("0") and not is_whole("-1") and not is_whole("1_0")
    for text in ("٣.٥", "1" * 301):
        with pytest.raises(ValueError):
            number(text, float)
    rate = options(Sections)["rate"]
    for value in (10**400, -(10**400), float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError):
            rate.convert(value)
    assert len(shown("9" * 5000)) < 100 and len(shown(10**4000)) < 200


MODEL = options(ModelConfig)


@pytest.mark.parametrize("option", MODEL.values(), ids=MODEL)
def test_every_option_of_a_model_says_what_another_value_changes_and_how_it_is_made_small(option: Option) -> None:
    assert option.trait(Changes) is not None
    assert option.kind is not int or option.trait(Size) or option.trait(ShrinkRule)


def test_sizes_are_split_as_the_weights_are() -> None:
    """What `validate_mesh` checks is what the mesh's table divides."""
    sizes = {size.dim: size for option in MODEL.values() if (size := option.trait(Size))}
    assert {dim for dim, size in sizes.items() if size.split} == {dim for dim in sizes if RULES[dim] == TENSOR}
    assert {dim for dim, axis in RULES.items() if axis == TENSOR} <= sizes.keys()


@pytest.fixture
def new_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three further options of `ModelConfig`, which a branch would add by a line each."""
    further = {
        "num_streams": (Annotated[int, "streams", AT_LEAST_ZERO, WEIGHTS, Size("streams", split=True)], 0),
        "temperature": (Annotated[float, "of attention", between(0.0, 9.0), COMPUTATION], 1.0),
        "lookback": (Annotated[int, "tokens", AT_LEAST_ZERO, NOTHING, ShrinkRule(tokens=True)], 0),
    }
    fields: list[Any] = [(name, kind, dataclasses.field(default=value)) for name, (kind, value) in further.items()]
    wider = dataclasses.make_dataclass("Wider", fields, bases=(ModelConfig,), frozen=True, kw_only=True)
    for name, (kind, _) in further.items():
        monkeypatch.setitem(ModelConfig.__annotations__, name, kind)
    for name in "__init__", "__eq__", "__dataclass_fields__":
        monkeypatch.setattr(ModelConfig, name, getattr(wider, name))
    for cached in options, sections:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in options, sections:
        cached.cache_clear()


def demo(**values: Any) -> Config:
    return resolve(load_preset("demo"), {key.replace("__", "."): value for key, value in values.items()})


@pytest.mark.usefixtures("new_options")
def test_a_run_keeps_a_new_option_as_it_says(tmp_path: Path) -> None:
    mark(tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(demo(model__num_streams=8)))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    check_claim(tmp_path, demo(model__num_streams=8, model__lookback=7))
    for given, words in (
        ({}, "model.num_streams 8, not 0"),
        ({"model__num_streams": 8, "model__temperature": 2.0}, "model.temperature 1.0, not 2.0"),
    ):
        with pytest.raises(UserError, match=f"holds a run with {words}; valid: the same"):
            check_claim(tmp_path, demo(**given))
    with pytest.raises(UserError, match=r"holds another model; valid: --model.num-streams 8, or"):
        check_init(demo(init=str(tmp_path), model__num_streams=4))
    with pytest.raises(UserError, match="holds no checkpoint"):  # another temperature is no reason to refuse
        check_init(demo(init=str(tmp_path), model__num_streams=8, model__temperature=2.0))


@pytest.mark.usefixtures("new_options")
def test_a_new_size_is_divided_and_made_small() -> None:
    config = demo(model__num_streams=64, model__lookback=256, mesh__tensor=4, model__sequence_length=512)
    validate_mesh(config, 4)
    small = shrink(config, 4).config.model
    assert small.num_streams == 8 and small.lookback == small.sequence_length // 2
    with pytest.raises(UserError, match=r"--mesh.tensor 4 does not divide --model.num-streams 6; valid: 1, 2"):
        validate_mesh(demo(model__num_streams=6, mesh__tensor=4), 4)


@pytest.mark.usefixtures("new_options")
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.model_type)
def test_no_class_of_transformers_takes_a_new_option(exchange: Exchange) -> None:
    model = demo().model
    known = set(exchange.lacks(model))
    for name, value in (("num_streams", 8), ("temperature", 2.0)):
        assert exchange.lacks(dataclasses.replace(model, **{name: value})).keys() - known == {name}
