"""The mesh never changes the numbers, exactly: a step over finite fields on any mesh, by any schedule and with any
option is that of one device. What only a compiler can show is in `test_parity.py` and beside it."""

import dataclasses
from typing import Any

import pytest
import test_context
import test_experts
from field import SMALL, assert_exact
from parity_grid import (
    ALL,
    FEW_LORAS,
    FEW_MODELS,
    FURTHER_APART,
    MESH,
    OF_DECODERS,
    OF_LORAS,
    ROWS,
    SCHEDULE,
    TASKS,
    TRIPLES,
    config_of,
    limited,
    name,
    pairwise,
    row,
)
from tiny import LLAMA, MIXTURE, full, tiny_config

from megajax.config import Config
from megajax.models.lora_config import LoraConfig
from megajax.verify.shrink import shown


def virtual_stages(each: tuple) -> int:
    return each[MESH][1] * int(each[SCHEDULE].rpartition("-")[2])


# Of the grid every two columns meet, or their kinds do, on every mesh of up to four virtual stages: by default in the
# rows that meet most. Rows of one reference stand together.
PAIRS = limited(pairwise([each for each in ALL if virtual_stages(each) <= 4], FURTHER_APART, seed=2))
GRID = sorted(PAIRS[:18], key=lambda each: (each[-1], each[-4]))
MODELS = [
    row(mesh=(1, 4, 2), schedule="interleaved-2", vocabulary="split", remat="selective", weight_gradients="deferred"),
    row(schedule="interleaved-4", microbatches="a multiple", layers="divisible", zero=3, sequence_parallel=True),
    *FEW_MODELS,
    row(mesh=(2, 1, 2), zero=0, microbatches="fewer", layers="divisible", model="qwen3-muon"),
    row(schedule="interleaved-2", vocabulary="split", zero=3, sequence_parallel=True, model="olmo2"),
    row(mesh=(1, 4, 2), schedule="gpipe-1", remat="layer", weight_gradients="deferred-1", model="llama"),
    *FEW_LORAS,
    row(mesh=(1, 1, 8), microbatches="fewer", layers="divisible", model="gpt2-lora"),
    row(microbatches="fewer", sequence_parallel=True, model="bert-post-classes"),
    row(mesh=(1, 4, 2), schedule="interleaved-2", vocabulary="split", remat="stage", model="bert-pre-span"),
    row(mesh=(4, 1, 2), microbatches="fewer", layers="divisible", zero=3, model="bert-post-choice"),
]
MORE = dict.fromkeys([*PAIRS, *TRIPLES, *TASKS, *OF_DECODERS, *OF_LORAS])
LONG = [each for each in MORE if each not in [*GRID, *MODELS]]


def of_grid(each: tuple) -> Config:
    """Of three layers, or of four or eight, which the virtual stages divide."""
    size = {"num_layers": 3, "vocab_size": 21}
    if "divisible" in each:
        size = {"num_layers": max(4, virtual_stages(each)), "vocab_size": 24}
    _, pipe, _ = each[MESH]
    if pipe == 4 and "a multiple" in each:
        size["microbatch"] = ROWS // pipe
    return config_of(each, **SMALL | {"sequence_length": 8} | size)


@pytest.mark.parametrize("each", [*GRID, *MODELS, *map(full, LONG)], ids=name)
def test_grid(each: tuple) -> None:
    assert_exact(of_grid(each), branches=each in MODELS)


def some(grid: Any, count: int, references: list) -> list[tuple]:
    """Of a grid's rows those that meet most, of few references: a reference takes as long as a row."""
    rows = [each for each in grid.rows() if grid.reference_of(each) in references]
    return sorted(grid.pairwise(rows)[:count], key=lambda each: str(grid.reference_of(each)))


CONTEXTS = [
    *(("gpt2", True, 5), ("few keys", True, 20), ("bert-pre", False, 0), ("llama", False, 20), ("lora", True, 0)),
    ("bert-pre-span", False, 0),
]
OF_CONTEXT = [*test_context.DEFAULT, *some(test_context, 1, CONTEXTS)]
FEW_EXPERTS = SMALL | {"sequence_length": 8, "num_experts": 4, "vocab_size": 21}
MIXTURES = [(0.0, "loss", 0, 1), (1.0, "bias", 8, 0)]
OF_EXPERTS = [*test_experts.DEFAULT[::2], *some(test_experts, 2, MIXTURES)]


@pytest.mark.parametrize("each", dict.fromkeys(OF_CONTEXT), ids=name)
def test_one_sequence_over_several_devices(each: tuple) -> None:
    config = test_context.config_of(each, **SMALL, vocab_size=21)
    test_context.check_what_is_sent(config, assert_exact(config, branches=False).collectives)


@pytest.mark.parametrize("each", dict.fromkeys(OF_EXPERTS), ids=name)
def test_mixtures_of_experts(each: tuple) -> None:
    step = assert_exact(test_experts.config_of(each, **FEW_EXPERTS), branches=False)
    assert "experts/dropped" in step.taken.metrics


MIXED = SMALL | MIXTURE | {"num_layers": 1, "sequence_length": 8, "num_experts": 4, "global_batch": 4, "vocab_size": 21}
IN_8_BITS = [
    of_grid(row(mesh=(1, 2, 4), weight_gradients="deferred", sequence_parallel=True, model="qwen3")),
    tiny_config((1, 1, 2), expert=2, dense_layers=1, bf16_layers="1,1", remat="selective", **MIXED | {"num_layers": 4}),
]
MUON = {"optimizer": {"name": "muon"}, "num_layers": 2}
OTHERS = [
    *(dataclasses.replace(config, precision="fp8") for config in IN_8_BITS),
    tiny_config((2, 1, 2), precision="fp16", ema=0.5, expert=2, balance="bias", **MIXED | MUON | {"num_layers": 1}),
    tiny_config((2, 1, 2, 2), precision="bf16", zero=3, **SMALL | LLAMA | MUON),
    tiny_config(
        (1, 2, 2), expert=2, lora=LoraConfig(rank=2, targets=("attention", "experts")), **MIXED | {"num_layers": 2}
    ),
    tiny_config((2, 2, 2), precision="fp64", zero=0, reset_attention=True, schedule="gpipe", remat="stage", **SMALL),
]


@pytest.mark.parametrize("config", OTHERS, ids=lambda each: f"{each.precision}, {shown(each.mesh)}")
def test_other_precisions_optimizers_and_mixtures(config: Config) -> None:
    assert_exact(config)


def test_experts_with_several_blocks_at_once() -> None:
    """As on GPUs."""
    assert_exact(tiny_config((1, 1, 2), expert=2, **MIXED), branches=False, expert_bytes=2**12)


@pytest.mark.full
@pytest.mark.parametrize("grid", [test_context, test_experts])
def test_whole_grids(grid: Any) -> None:
    for each in grid.pairwise(grid.rows()):
        assert_exact(grid.config_of(each, **SMALL, vocab_size=21))
