"""What an option declares on its field is all that resuming, `--init`, `verify` and the mesh need to know of it: shown
with options that only the tests add."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from megajax.config import Config, to_toml
from megajax.convert.exchange import Exchange
from megajax.convert.families import EXCHANGES
from megajax.errors import UserError
from megajax.mesh import RULES
from megajax.models.config import ModelConfig
from megajax.options import AT_LEAST_ZERO, Option, between, options, sections
from megajax.parallel.collectives import TENSOR
from megajax.runs.directory import check_claim
from megajax.runs.init import check_init
from megajax.runs.ownership import mark
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate_mesh
from megajax.traits import COMPUTATION, NOTHING, WEIGHTS, Changes, Size, Small
from megajax.verify.shrink import shrink

MODEL = options(ModelConfig)


@pytest.mark.parametrize("option", MODEL.values(), ids=MODEL)
def test_every_option_of_a_model_says_what_another_value_changes_and_how_it_is_made_small(option: Option) -> None:
    assert option.trait(Changes) is not None
    assert option.kind is not int or option.trait(Size) or option.trait(Small)


def test_sizes_are_split_as_the_weights_are() -> None:
    """What `validate_mesh` checks is what the mesh's table divides."""
    sizes = {size.dim: size for option in MODEL.values() if (size := option.trait(Size))}
    assert {dim for dim, size in sizes.items() if size.split} == {dim for dim in sizes if RULES[dim] == TENSOR}
    assert {dim for dim, axis in RULES.items() if axis == TENSOR} <= sizes.keys()


@pytest.fixture
def new_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three further options of `ModelConfig`, which a branch would add by a line each."""
    further = {
        "num_experts": (Annotated[int, "experts", AT_LEAST_ZERO, WEIGHTS, Size("experts", split=True)], 0),
        "temperature": (Annotated[float, "of attention", between(0.0, 9.0), COMPUTATION], 1.0),
        "lookback": (Annotated[int, "tokens", AT_LEAST_ZERO, NOTHING, Small(tokens=True)], 0),
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
    (tmp_path / "config.toml").write_text(to_toml(demo(model__num_experts=8)))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    check_claim(tmp_path, demo(model__num_experts=8, model__lookback=7))
    for given, words in (
        ({}, "model.num_experts 8, not 0"),
        ({"model__num_experts": 8, "model__temperature": 2.0}, "model.temperature 1.0, not 2.0"),
    ):
        with pytest.raises(UserError, match=f"holds a run with {words}; valid: the same"):
            check_claim(tmp_path, demo(**given))
    with pytest.raises(UserError, match=r"holds a model with model.num_experts 8, not 4; valid: --model.num-experts 8"):
        check_init(demo(init=str(tmp_path), model__num_experts=4))
    with pytest.raises(UserError, match="holds no checkpoint"):  # another temperature is no reason to refuse
        check_init(demo(init=str(tmp_path), model__num_experts=8, model__temperature=2.0))


@pytest.mark.usefixtures("new_options")
def test_a_new_size_is_divided_and_made_small() -> None:
    config = demo(model__num_experts=64, model__lookback=256, mesh__tensor=4, model__sequence_length=512)
    validate_mesh(config, 4)
    small = shrink(config, 4).config.model
    assert small.num_experts == 8 and small.lookback == small.sequence_length // 2
    with pytest.raises(UserError, match=r"--mesh.tensor 4 does not divide --model.num-experts 6; valid: 1, 2"):
        validate_mesh(demo(model__num_experts=6, mesh__tensor=4), 4)


@pytest.mark.usefixtures("new_options")
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.model_type)
def test_no_class_of_transformers_takes_a_new_option(exchange: Exchange) -> None:
    model = demo().model
    known = set(exchange.lacks(model))
    for name, value in (("num_experts", 8), ("temperature", 2.0)):
        assert exchange.lacks(dataclasses.replace(model, **{name: value})).keys() - known == {name}
