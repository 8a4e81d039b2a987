"""Layers on stages by the plan's times: against every split, in memory, and where it is resolved."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest
from tiny import LINEAR, tiny_config, user_error

from megajax.plan.figures import figures, text
from megajax.plan.machines import GIB, MACHINES
from megajax.plan.memory import memory, padding
from megajax.plan.placing import placed
from megajax.plan.search import schedule_in_words, search
from megajax.plan.time import step_time
from megajax.settings.config import Config, to_toml
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate
from megajax.training import begin

H100 = MACHINES["h100"]
RING = {"schedule": "interleaved", "chunks": 2}
# The head costs 2.6 of so narrow layers.
NARROW = {"hidden_size": 512, "num_heads": 8, "sequence_length": 1024, "precision": "bf16", "dropout": 0.0}
NARROW |= {"vocab_size": 50_000}


def with_layers(config: Config, layers: str) -> Config:
    return replace(config, pipeline=replace(config.pipeline, layers=layers))


def splits(num_layers: int, number: int) -> Iterator[tuple[int, ...]]:
    """Every split with no more than two layers more on a virtual stage than an even one."""
    most = -(-num_layers // number) + 2
    return (each for each in itertools.product(range(most + 1), repeat=number) if sum(each) == num_layers)


def seconds(config: Config, layers: str) -> float:
    return step_time(with_layers(config, layers), H100).seconds


@pytest.mark.parametrize(
    ("pipe", "others", "near"),
    [
        (2, {"num_layers": 12}, 1.0),
        (3, {"num_layers": 9}, 1.01),
        (3, {"num_layers": 9, "schedule": "gpipe", "global_batch": 6}, 1.0),
        (2, {"num_layers": 8} | RING, 1.02),
        (3, {"num_layers": 9, "weight_gradients": "deferred"}, 1.01),
    ],
)
def test_it_is_as_fast_as_the_fastest_split(pipe: int, others: dict, near: float) -> None:
    config = tiny_config((1, pipe, 1), layers="auto", **NARROW | others)
    found = placed(config, H100).pipeline.layers
    number = pipe * config.pipeline.chunks
    best = min(seconds(config, ",".join(map(str, each))) for each in splits(config.model.num_layers, number))
    assert best <= seconds(config, found) <= near * best < seconds(config, "even")


@pytest.mark.full
def test_large_models_have_a_layer_less_beside_the_head() -> None:

    def of(preset: str, pipe: int, gpu: str = "h100", **flags: object) -> str:
        given = {"mesh.pipe": pipe, "mesh.tensor": 8, "pipeline.layers": "auto"}
        given |= {key.replace("__", "."): value for key, value in flags.items()}
        return placed(resolve(load_preset(preset), given), MACHINES[gpu]).pipeline.layers

    assert of("llama3-8b", 4) == "9,8,8,7" and of("llama3-8b", 8, "h200") == "5,4,4,4,4,4,4,3"
    assert of("llama3-8b", 4, pipeline__vocabulary="split") == "8,8,8,8"  # all stages share the head


def test_what_does_not_fit_is_not_taken() -> None:
    """Stages pad to the largest: with too little memory they stay even."""
    config = tiny_config((1, 2, 1), layers="auto", num_layers=12, **NARROW)
    uneven, even = placed(config, H100), with_layers(config, "6,6")
    assert uneven.pipeline.layers == "8,4"
    share = H100.usable / H100.memory
    enough, less = (
        placed(config, replace(H100, memory=int((memory(each).total + 1000) / share))) for each in (uneven, even)
    )
    assert enough == uneven and less == even and memory(even).total < memory(uneven).total
    assert placed(config, replace(H100, memory=1)) == even  # needs least


@pytest.mark.parametrize("others", [{}, {"weight_gradients": "deferred", "zero": 0, "ema": 0.5}, {"precision": "fp8"}])
def test_the_bytes_of_padding_are_those_of_slots(others: dict) -> None:
    """What as many more layers on all stages need is theirs: 8 and 4 layers are padded to 8."""
    config = tiny_config((2, 2, 1), num_layers=12, layers="8,4", **NARROW | others)
    needed = [memory(replace(config, model=replace(config.model, num_layers=n), pipeline=each)) for n, each in (
        (8, replace(config.pipeline, layers="even")), (16, replace(config.pipeline, layers="even")),
    )]  # fmt: skip
    more = sum(
        getattr(needed[1], part) - getattr(needed[0], part)
        for part in ("weights", "main_weights", "moments", "average", "copies", "gradients", "kept", "factors")
    )
    assert padding(config, memory(config)) == pytest.approx(more, rel=1e-6)
    assert padding(with_layers(config, "6,6"), needed[0]) == 0


def test_the_plan_says_what_uneven_stages_cost() -> None:
    config = with_layers(tiny_config((1, 2, 1), num_layers=12, **NARROW), "8,4")
    plan = figures("tiny", config, H100, None)
    assert plan["layers"] == [8, 4] and plan["padding"] == padding(config, memory(config)) > 0
    first, last = plan["stage_seconds"]
    assert first > last and plan["step_seconds"] > first
    lines = text(plan | {"seconds": 1.0, "peak_bytes": 1}, config).splitlines()
    assert f"  layers 8,4, padded to 8: up to {plan['padding'] / GIB:.3f} hold none" in lines
    assert any(line.endswith(f"the stages work {last:.3f} to {first:.3f} s") for line in lines)


@pytest.mark.parametrize("microbatches", [4, 8, 32])
@pytest.mark.parametrize(("words", "layers"), [
    ({}, "5,4,4,3"), ({}, "5,5,4,2"), ({"schedule": "gpipe"}, "5,4,4,3"), (RING, "3,2,2,2,2,2,2,1"),
])  # fmt: skip
def test_the_formula_of_uneven_stages_is_near_their_table(words: dict, layers: str, microbatches: int) -> None:
    sizes = {"num_layers": 16, "global_batch": microbatches, "hidden_size": 1024, "sequence_length": 512}
    config = tiny_config((1, 4, 1), layers=layers, **sizes, **words)
    table, formula = (step_time(config, H100, exact=exact).seconds for exact in (True, False))
    assert formula == pytest.approx(table, rel=0.1 if microbatches < 8 else 0.03)


def test_a_search_tries_uneven_stages_and_a_split_vocabulary() -> None:
    config = tiny_config(num_layers=12, global_batch=8, **NARROW)
    given = ["mesh.pipe", "train.remat", "train.microbatch", "pipeline.weight_gradients"]
    config = replace(config, mesh=replace(config.mesh, pipe=2))
    found = search(config, 2, H100, given=given)
    tried = {schedule_in_words(each.pipeline) for each in found.fitting}
    assert {"1f1b", "1f1b, uneven", "1f1b, split vocabulary", "gpipe, uneven"} <= tried
    assert "1f1b, uneven, split vocabulary" not in tried
    for each in found.fitting[::5]:
        assert each.bytes == memory(each.config).total

    def layers(given_layers: str) -> set[str]:
        fixed = [*given, "pipeline.layers", "pipeline.vocabulary"]
        found = search(with_layers(config, given_layers), 2, H100, given=fixed)
        return {each.pipeline.layers for each in found.fitting}

    assert layers("even") == {"even"} and layers("8,4") == {"8,4"}
    assert "even" not in layers("auto") and "7,5" in layers("auto")
    with_too_many = with_layers(config, "1,1,10")
    said = user_error(search, with_too_many, 2, H100, given=[*given, "pipeline.layers", "pipeline.schedule"])
    assert said.startswith("--pipeline.layers 1,1,10: 3 numbers with the sum 12, with --mesh.pipe 2 and")


def test_a_search_gives_stages_whole_periods() -> None:
    """Of layers of two kinds, here of three, but for the last one: no more stages than there are periods."""
    config = tiny_config(**NARROW | LINEAR | {"num_layers": 11, "linear_layers": "2,1", "global_batch": 8})
    stays = ("mesh.tensor", "train.remat", "train.microbatch", "optimizer.zero", "model.scan_layers")
    others = (f"pipeline.{name}" for name in ("schedule", "vocabulary", "weight_gradients", "paired_microbatches"))
    stages = set()
    for each in search(config, 8, H100, given=[*stays, *others]).fitting:
        validate(each.config, 8)
        assert each.bytes == memory(each.config).total
        stages.add((each.base.mesh.pipe, each.pipeline.layers))
    assert {1, 2, 4} == {pipe for pipe, _ in stages} and (2, "9,2") in stages


def test_a_run_keeps_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """In its config.toml; with another number of stages they are found anew."""
    flags = {"mesh.data": 4, "mesh.pipe": 2, "model.vocab_size": 30_000, "pipeline.layers": "auto"}
    assert jax.device_count() == 8
    config = begin.with_layers(resolve(load_preset("demo"), flags))
    assert config.pipeline.layers == "5,3"
    assert capsys.readouterr().out == "--pipeline.layers auto: 5,3, by predicted times on H100s\n"
    assert 'layers = "5,3"' in to_toml(config) and begin.with_layers(config) == config
    assert not capsys.readouterr().out
