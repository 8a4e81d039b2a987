"""The mesh never changes the numbers, exactly: a step over finite fields on any mesh, by any schedule and with any
option is that of one device. What only a compiler can show is in `test_parity.py` and beside it."""

import dataclasses
from typing import Any

import jax
import numpy as np
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
    OF_MUON,
    PIPELINES,
    ROWS,
    SCHEDULE,
    TASKS,
    TRIPLES,
    config_of,
    name,
    pairwise,
    row,
)
from tiny import GEMMA, GPT_OSS, LATENT, LLAMA, MIXTURE, full, tiny_config

from megajax.core.backend import CPU, HOPPER
from megajax.core.models.lora_config import LoraConfig
from megajax.core.models.router import LOAD
from megajax.core.program.program import Program
from megajax.core.program.train_step import whole_weights
from megajax.data.synthetic import random_batch
from megajax.plan.sizes import Sizes
from megajax.settings.config import Config
from megajax.verify import fields
from megajax.verify.fields import Drawn, recorded_step, run_step, unequal
from megajax.verify.forms import in_blocks
from megajax.verify.recording import SitePlace
from megajax.verify.shrink import shown


def first(table: dict[str, Any], number: int = 1) -> list[Any]:
    """The names in a table of cases, of which only the first are run by default."""
    return [name if name in [*table][:number] else full(name) for name in table]


def virtual_stages(each: tuple) -> int:
    return each[MESH][1] * int(each[SCHEDULE].rpartition("-")[2])


# Every two columns of the grid meet, or their kinds do, on every mesh of up to four virtual stages.
PAIRS = pairwise([each for each in ALL if virtual_stages(each) <= 4], FURTHER_APART, seed=2)
CLASSES = row(microbatches="fewer", sequence_parallel=True, model="bert-post-classes")
MODELS = [FEW_LORAS[0], CLASSES]  # Llama by Muon: tests/core/program/test_freeze.py
MORE_MODELS = [
    *FEW_MODELS,  # the second of which is by default in 8 bits, below
    row(mesh=(1, 4, 2), schedule="interleaved-2", vocabulary="split", remat="selective", weight_gradients="deferred"),
    row(mesh=(1, 4, 2), schedule="interleaved-2", vocabulary="split", remat="stage", model="bert-pre-span"),
    row(schedule="interleaved-4", microbatches="a multiple", layers="divisible", zero=3, sequence_parallel=True),
    row(schedule="interleaved-2", vocabulary="split", zero=3, sequence_parallel=True, model="olmo2"),
    row(mesh=(2, 1, 2), zero=0, microbatches="fewer", layers="divisible", model="qwen3-muon"),
    row(mesh=(1, 4, 2), schedule="gpipe-1", remat="layer", weight_gradients="deferred", model="llama"),
    FEW_LORAS[1],
    row(mesh=(1, 1, 8), microbatches="fewer", layers="divisible", model="gpt2-lora"),
    row(mesh=(4, 1, 2), microbatches="fewer", layers="divisible", zero=3, model="bert-post-choice"),
]
MORE = dict.fromkeys([*MORE_MODELS, *PAIRS, *TRIPLES, *PIPELINES, *TASKS, *OF_DECODERS, *OF_MUON, *OF_LORAS])
LONG = [each for each in MORE if each not in MODELS]


def of_grid(each: tuple) -> Config:
    """Of three layers, or of four or eight, which the virtual stages divide."""
    size = {"num_layers": 3, "vocab_size": 21}
    if "divisible" in each:
        size = {"num_layers": max(4, virtual_stages(each)), "vocab_size": 24}
    _, pipe, tensor = each[MESH]
    size["num_heads"] = max(4, tensor)
    if pipe == 4 and "a multiple" in each:
        size["microbatch"] = ROWS // pipe
    return config_of(each, **SMALL | {"sequence_length": 8} | size)


@pytest.mark.parametrize("each", [*MODELS, *map(full, LONG)], ids=name)
def test_grid(each: tuple) -> None:
    config = of_grid(each)
    if each == CLASSES:
        config = with_layers(config, "0,3")
    assert_exact(config, branches=each in MODELS, planned=each in [CLASSES, *LONG])


def with_layers(config: Config, layers: str) -> Config:
    return dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, layers=layers))


RING = {"schedule": "interleaved", "chunks": 2}
UNEVEN = [
    ((1, 3, 1), "2,0,1", {"schedule": "gpipe", "vocabulary": "split"}),
    ((1, 2, 2), "3,0", {"weight_gradients": "deferred", "precision": "fp16", "optimizer": {"name": "muon"}}),
    ((2, 2, 2), "0,2,1,0", RING | {"zero": 3, "weight_gradients": "deferred", "sequence_parallel": True}),
    ((1, 4, 1), "0,1,2,0", {"remat": "stage", "weight_gradients": "deferred"}),
    ((1, 3, 1), "1,0,0,0,1,1", RING | {"remat": "layer", "lora": LoraConfig(rank=2)}),
    ((2, 4, 1), "1,0,1,0,0,1,0,0", RING | {"vocabulary": "split", "zero": 0}),
]


@pytest.mark.full
@pytest.mark.parametrize(("mesh", "layers", "others"), UNEVEN, ids=lambda each: each if isinstance(each, str) else "")
def test_any_numbers_of_layers_on_the_stages(mesh: tuple[int, ...], layers: str, others: dict[str, Any]) -> None:
    """None, too; by default in the grid."""
    assert_exact(tiny_config(mesh, layers=layers, **FEW | {"num_layers": 3, "vocab_size": 24} | others))


def small_context(each: tuple) -> Config:
    """With two microbatches, no more layers than virtual stages, and few blocks of attention."""
    (data, pipe, context, _), way, model = each[:3]
    size = {"sequence_length": max(24, 8 * context), "num_layers": pipe * (1 + ("interleaved-2" in each))}
    size |= {"global_batch": 2 * data, "microbatch": 1, "num_heads": 8 if way == "heads" else 4, "vocab_size": 21}
    size |= {"num_kv_heads": 2} if model in test_context.MODELS else {}
    return test_context.config_of(each, **SMALL | size)


FEW_CONTEXTS = test_context.DEFAULT[:1]  # and BERT: test_context.py


@pytest.mark.parametrize(
    "each", [each if each in FEW_CONTEXTS else full(each) for each in test_context.DEFAULT], ids=name
)
def test_one_sequence_over_several_devices(each: tuple) -> None:
    config = small_context(each)
    step = assert_exact(config, branches=False, planned=each in test_context.DEFAULT[::2])
    test_context.check_what_is_sent(config, step.collectives)


FEW_EXPERTS = SMALL | {"sequence_length": 8, "num_experts": 4, "vocab_size": 21, "num_heads": 4}


@pytest.mark.parametrize("each", list(map(full, test_experts.DEFAULT)), ids=name)
def test_mixtures_of_experts(each: tuple) -> None:
    config = test_experts.config_of(each, **FEW_EXPERTS)
    step = assert_exact(config, branches=False, planned=each in test_experts.DEFAULT[:2])
    assert "experts/dropped" in step.taken.metrics


MIXED = SMALL | MIXTURE | {"num_layers": 1, "sequence_length": 8, "num_experts": 4, "global_batch": 4, "vocab_size": 21}
MIXED |= {"num_heads": 4}
LIMITED = MIXED | LATENT | {"num_experts": 4, "expert_groups": 2, "balance": "both", "share_scale": 2.5}
MIXED |= GPT_OSS
UNDROPPED = {"dropout": 0.0}  # by default in the grid, in contexts and where reductions overlap
IN_8_BITS = [
    of_grid(row(mesh=(1, 2, 4), weight_gradients="deferred", sequence_parallel=True, model="qwen3")),
    tiny_config((1, 1, 2), expert=2, dense_layers=1, bf16_layers="1,1", remat="selective", **MIXED | {"num_layers": 3}),
]
DEFERRED = MIXED | {"num_layers": 2, "weight_gradients": "deferred"}
MUON = {"optimizer": {"name": "muon"}, "num_layers": 2}
SHORT = SMALL | {"global_batch": 4, "num_heads": 4, "sequence_length": 8}
OTHERS = [
    *(dataclasses.replace(config, precision="fp8") for config in IN_8_BITS),
    tiny_config(
        (2, 1, 2), precision="fp16", ema=0.5, expert=2, balance="bias", **MIXED | MUON | UNDROPPED | {"num_layers": 1}
    ),
    tiny_config((2, 1, 2, 2), precision="bf16", zero=3, **SHORT | LLAMA | MUON),
    tiny_config((1, 2, 1), expert=2, lora=LoraConfig(rank=2, targets=("attention", "experts")), **DEFERRED | UNDROPPED),
    tiny_config((2, 2, 2), precision="fp64", zero=0, reset_attention=True, schedule="gpipe", remat="stage", **SHORT),
]


@pytest.mark.parametrize(
    "config",
    [OTHERS[2], OTHERS[4], *map(full, (OTHERS[0], OTHERS[1], OTHERS[3], OTHERS[5]))],
    ids=lambda each: f"{each.precision}, {shown(each.mesh)}",
)
def test_other_precisions_optimizers_and_mixtures(config: Config) -> None:
    """Experts that drop nothing multiply several blocks at once, as on GPUs."""
    assert_exact(config, branches=config.precision in ("fp16", "fp8"), planned=False, expert_bytes=2**12)


def test_dropless_experts_in_the_blocks_of_kernels() -> None:
    """On axes of experts and context, their products in a loop: the kernels' interpreter has one device. Keys of
    documents are gathered, as in no other default row."""
    blocks = {name: getattr(HOPPER, name) for name in ("expert_block", "expert_bytes", "expert_kernel")}
    gathered = {"context_attention": "gather", "reset_attention": True, "sliding_window": 3}
    config = tiny_config((1, 1, 2, 1), expert=2, **MIXED | UNDROPPED | gathered)
    assert_exact(config, branches=False, planned=False, **blocks)


PLAIN_QUERIES = {"query_latent_size": 0}
LATER = {"weight_gradients": "deferred", "num_layers": 2}
OF_LATENTS = {
    "mixture, sequence, deferred": LATER
    | LIMITED
    | UNDROPPED
    | {"mesh": (1, 1, 2), "expert": 2, "expert_capacity": 1.0, "dense_layers": 1, "num_layers": 2}
    | {"sequence_parallel": True, "router_scores": "sigmoid"},
    "mixture, stages": LATER
    | LIMITED
    | {"mesh": (1, 2, 1), "expert": 2, "dense_layers": 1, "num_layers": 3, "router_scores": "sigmoid"},
    "sequence, deferred": {"mesh": (1, 2, 2), "sequence_parallel": True, "remat": "selective", **LATER},
    "gathered": {"mesh": (1, 1, 2, 2), "context_attention": "gather", "remat": "selective", "dropout": 0.5},
    "plain queries, sequence": PLAIN_QUERIES | {"mesh": (2, 1, 2), "sequence_parallel": True, "zero": 3},
    "sequence, deferred, plain queries": PLAIN_QUERIES | LATER | {"mesh": (1, 2, 2), "sequence_parallel": True},
    "layer": {"mesh": (1, 2, 2), "sequence_parallel": True, "remat": "layer", "num_layers": 2},
    "stage": PLAIN_QUERIES | {"mesh": (1, 2, 2), "remat": "stage", "num_layers": 2},
    "gathered, sequence": {"mesh": (1, 1, 2, 2), "context_attention": "gather", "sequence_parallel": True},
    "gathered, layer": PLAIN_QUERIES
    | {"mesh": (1, 2, 2, 1), "context_attention": "gather", "remat": "layer", "num_layers": 2},
    "heads": {"mesh": (1, 1, 2, 2), "context_attention": "heads", "remat": "selective"},
    "window": {"mesh": (1, 1, 2, 2), "sliding_window": 3, "sequence_length": 16},
    "window, stages": {"mesh": (1, 2, 2, 1), "sliding_window": 3, "sequence_length": 16, "num_layers": 2},
    "float8": {"mesh": (1, 1, 2), "precision": "fp8", "sequence_parallel": True},
    "float8, deferred": PLAIN_QUERIES | LATER | {"mesh": (1, 2, 2), "precision": "fp8"},
    "float8, gathered": {"mesh": (1, 1, 2, 2), "precision": "fp8", "context_attention": "gather"},
    "adapters": {"mesh": (1, 1, 2), "lora": LoraConfig(rank=2)},
    "adapters, sequence": PLAIN_QUERIES | {"mesh": (2, 1, 2), "sequence_parallel": True, "lora": LoraConfig(rank=2)},
    "muon": {"mesh": (2, 1, 2), "precision": "fp16", "optimizer": {"name": "muon"}},
    "groups of softmax": LIMITED
    | {"mesh": (1, 1, 1), "expert": 2, "balance": "loss", "renormalize_shares": False, **PLAIN_QUERIES},
}


@pytest.mark.parametrize("name", first(OF_LATENTS))
def test_latent_attention(name: str) -> None:
    config = tiny_config(**SHORT | {"vocab_size": 21} | LATENT | OF_LATENTS[name])
    assert_exact(config, branches=False, planned=name not in [*OF_LATENTS][:1])


IN_STAGES = {"mesh": (1, 2, 1), "expert": 2, "num_layers": 3, "dense_layers": 1}
PREDICTING = {
    "documents, stages, sequence": {"mesh": (1, 2, 2), "reset_attention": True, "sequence_parallel": True, "zero": 3}
    | {"num_layers": 2, "tied_embedding": True, "sliding_window": 3, "window_layers": "1,1", **UNDROPPED},
    "mixture, stages, deferred": LATER | MIXED | IN_STAGES | {"balance": "both", "expert_capacity": 1.0},
    "mixture, split": MIXED | {"mesh": (1, 2, 1), "expert": 2, "num_layers": 2, "vocabulary": "split"},
    "mixture, gathered": MIXED | {"mesh": (1, 1, 2, 1), "expert": 2, "balance": "both", "context_attention": "gather"},
    "latents, sequence, layer": LATENT
    | {"mesh": (1, 2, 2), "num_layers": 2, "sequence_parallel": True, "remat": "layer"},
    "heads, documents, dropout": {"mesh": (1, 1, 2, 2), "context_attention": "heads", "reset_attention": True}
    | {"dropout": 0.5},
    "window of some layers": GEMMA | {"mesh": (1, 2, 2), "num_layers": 2, "sliding_window": 3},
    "learned positions": {"mesh": (1, 1, 2), "positions": "learned", "sequence_parallel": True, "dropout": 0.5},
    "chunks, stage": LATER | RING | {"mesh": (1, 2, 1), "num_layers": 4, "remat": "stage"},
    "float8, gathered latents": LATENT | {"mesh": (1, 1, 2, 2), "precision": "fp8", "context_attention": "gather"},
    "adapters": {"mesh": (1, 1, 2), "sequence_parallel": True, "lora": LoraConfig(rank=2)},
    "muon": {"mesh": (2, 1, 2), "precision": "fp16", "ema": 0.5, "optimizer": {"name": "muon"}},
    "overlapped": {"mesh": (2, 2, 1), "num_layers": 2, "tied_embedding": True}
    | {"optimizer": {"overlap_reductions": "true", "overlap_gathers": "true"}},
    "idle": {"mesh": (1, 2, 1), "num_layers": 2, "prediction_coefficient": 0.0},
}


@pytest.mark.parametrize("name", first(PREDICTING))
def test_modules_for_further_tokens(name: str) -> None:
    size = {"vocab_size": 21, "num_layers": 1, "prediction_modules": 2}
    config = tiny_config(**SHORT | LLAMA | size | PREDICTING[name])
    step = assert_exact(config, branches=False, planned=name not in [*PREDICTING][:1])
    assert ("prediction/loss_2" in step.taken.metrics) == (name != "idle")
    if config.model.num_experts:  # every token that has one as far ahead chooses experts
        assert step.taken.metrics[LOAD][0, 0].sum(axis=1).tolist() == [60] * config.model.num_blocks + [52, 44]


FEW = SMALL | {"num_heads": 4, "sequence_length": 8, "microbatch": 1}
IN_THREES = {"optimizer": {"name": "muon", "zero_ranks": 3}}
ODD = [  # numbers of devices that divide no dim of most weights
    tiny_config(
        (3, 1, 2, 2), global_batch=6, zero=3, precision="fp8", sequence_parallel=True, **FEW | LLAMA | UNDROPPED
    ),
    tiny_config(
        (3, 2, 1), expert=2, global_batch=12, zero=1, ema=0.5, **FEW | MIXTURE | UNDROPPED | {"num_experts": 4}
    ),
    tiny_config((6, 2, 1), global_batch=12, zero=1, vocabulary="split", **FEW | MUON | IN_THREES),
    tiny_config((6, 2, 1), global_batch=12, zero=1, vocabulary="split", precision="bf16", **FEW | MUON),
    tiny_config((5, 1, 1), global_batch=10, zero=3, precision="fp16", **FEW | LLAMA | MUON),
    tiny_config((7, 1, 1), global_batch=7, zero=3, lora=LoraConfig(rank=2), **FEW | {"num_layers": 2}),
    tiny_config((12, 1, 2), global_batch=12, zero=3, precision="fp16", **FEW | {"num_layers": 2}),
]


@pytest.mark.parametrize("config", [*ODD[:3], *map(full, ODD[3:])], ids=lambda each: f"{each.precision}, {each.mesh}")
def test_state_is_sharded_over_any_number_of_devices(config: Config) -> None:
    """Padded, and where that suffices with two dims joined, and as exact: norms, clipped gradients, moments and
    averages among it."""
    step = assert_exact(config, branches=config in (ODD[4], ODD[6]), planned=config not in ODD[:2])
    weights = jax.tree.leaves(Program.abstract(config, CPU).layout.weights)
    assert any(weight.zero.padding for weight in weights) and step.taken.metrics
    assert any(weight.zero.joined and weight.matrices for weight in weights) == (config not in (ODD[0], ODD[4]))


ON_FOUR = {"mesh": (4, 1, 1), "ranks": 2}
OF_SIX = {"mesh": (6, 1, 2), "ranks": 3, "global_batch": 12}  # padded
ON_STAGES = {"mesh": (4, 2, 1), "ranks": 2, "global_batch": 16, "weight_gradients": "deferred"}
ON_EXPERTS = {"mesh": (4, 1, 1), "ranks": 2, "expert": 2, "global_batch": 16, **MIXTURE, "num_experts": 4}
AT_ONCE = {"overlap_reductions": "true", "overlap_gathers": "true"}
REPLICAS = {
    "ZeRO-3": ON_FOUR | UNDROPPED | {"zero": 3, "precision": "fp16"},
    "padded, reduced at once": OF_SIX | {"mesh": (6, 1, 1), "optimizer": AT_ONCE},
    "padded": OF_SIX | {"ema": 0.5},
    "padded, ZeRO-3": OF_SIX | {"zero": 3, "precision": "fp16", "sequence_parallel": True},
    "stages, reduced at once": ON_STAGES | {"optimizer": AT_ONCE},
    "stages, ZeRO-3, reduced at once": ON_STAGES | {"zero": 3, "optimizer": AT_ONCE},
    "chunks, ZeRO-3, Muon": ON_STAGES
    | {"zero": 3, "schedule": "interleaved", "chunks": 2, "num_layers": 4, "optimizer": AT_ONCE | {"name": "muon"}},
    "vocabulary, ZeRO-3": ON_STAGES | {"zero": 3, "vocabulary": "split", "weight_gradients": "together"},
    "experts": ON_EXPERTS,
    "experts, ZeRO-3": ON_EXPERTS | {"zero": 3},
    "experts, each replica one rank": ON_EXPERTS | {"ranks": 1, "zero": 3},
    "Muon": ON_FOUR | LLAMA | {"mesh": (4, 1, 2), "optimizer": {"name": "muon"}},
    "adapters, ZeRO-3": ON_FOUR | {"zero": 3, "lora": LoraConfig(rank=2)},
    "float8, context, ZeRO-3": ON_FOUR | LLAMA | {"mesh": (4, 1, 2, 2), "zero": 3, "precision": "fp8"},
    "alone": ON_FOUR | {"ranks": 1},
}


@pytest.mark.parametrize("name", first(REPLICAS))
def test_state_is_sharded_over_some_ranks_of_data(name: str) -> None:
    """The others are replicas: a device's shards of gradients are summed over them once a step."""
    given = FEW | {"num_layers": 3, "global_batch": 8, "vocab_size": 21} | REPLICAS[name]
    optimizer = {"zero_ranks": given.pop("ranks")} | given.pop("optimizer", {})
    config = tiny_config(optimizer=optimizer, **given)
    assert config.mesh.replica * optimizer["zero_ranks"] == config.mesh.data
    step = assert_exact(config, branches=config.precision == "fp16")
    if config.mesh.pipe == config.mesh.tensor == config.mesh.expert == 1 and config.mesh.zero_shards > 1:
        sums = [each for each in step.collectives if {*each.axes} - {"pipe", "tensor"} == {"replica"}]
        layout = Program.abstract(config, CPU).layout
        weights = jax.tree.leaves(layout.trained(layout.weights))
        shards = sum(each.size(each.owned) for each in weights if each.zero.axes)
        assert 0 < 4 * shards == sum(each.count * each.num_bytes for each in sums)


PIPED = {"mesh": (2, 2, 1), "schedule": "interleaved", "chunks": 2}
WAITING = {"weight_gradients": "deferred"}
ADAPTED = {"lora": LoraConfig(rank=2), "sequence_parallel": True}
OVERLAPPED = {
    "deferred, padded layers of two kinds, split": GEMMA
    | PIPED
    | WAITING
    | {"global_batch": 6, "vocabulary": "split", "sliding_window": 3},
    "one, reduced at the end": {"mesh": (4, 1, 1), "microbatch": 2, "optimizer": {"overlap_reductions": "false"}},
    "alone, padded shards, untied": {"mesh": (3, 1, 1), "global_batch": 6, "tied_embedding": False},
    "one microbatch": {"mesh": (4, 1, 1), "microbatch": 2},
    "stages": {"mesh": (2, 3, 1), "precision": "bf16", "remat": "layer", "optimizer": {"overlap_reductions": "false"}},
    "one microbatch on stages": {"mesh": (2, 2, 1), "microbatch": 4, "num_layers": 4},
    "chunks": PIPED | {"num_layers": 4, "precision": "fp16", "ema": 0.5},
    "deferred, copied state": WAITING | {"mesh": (2, 3, 1), "sequence_parallel": True, "zero": 0},
    "deferred, gpipe": WAITING | {"mesh": (2, 2, 1), "schedule": "gpipe", "remat": "stage"},
    "adapters": ADAPTED | {"mesh": (2, 1, 2)},
    "adapters on stages": ADAPTED | {"mesh": (2, 2, 2)},
    "bert": {"mesh": (2, 2, 2), "family": "bert", "layer_order": "post", "sequence_parallel": True},
    "context": LLAMA | {"mesh": (1, 2, 2, 1), "optimizer": {"name": "muon"}},
    "experts": MIXED | WAITING | {"mesh": (1, 2, 1), "expert": 2, "dense_layers": 1, "num_layers": 3},
    "float8": {"mesh": (2, 2, 2), "precision": "fp8"},
}


GATHERED_AT_THE_END = ("deferred, copied state", "adapters", "adapters on stages", "float8")


@pytest.mark.parametrize("name", first(OVERLAPPED, 2))
def test_reductions_and_gathers_beside_the_passes(name: str) -> None:
    """Every layer's gradients are reduced by themselves, and its weights gathered during the first forward pass."""
    given = FEW | {"num_layers": 3, "global_batch": 8, "vocab_size": 21} | OVERLAPPED[name]
    optimizer = {"overlap_reductions": "true", "overlap_gathers": "true"} | given.pop("optimizer", {})
    config = tiny_config(optimizer=optimizer, **given)
    sizes = Sizes(config)  # what is communicated is compared with this
    assert sizes.overlaps_reductions == (optimizer["overlap_reductions"] == "true")
    assert sizes.gathers_late == (optimizer["overlap_gathers"] == "true" and name not in GATHERED_AT_THE_END)
    assert_exact(config, branches=False)


def test_an_evaluation_has_the_weights_that_the_next_step_gathers() -> None:
    options = FEW | {"num_layers": 3, "global_batch": 6, "tied_embedding": False}
    drawn = Drawn(tiny_config((3, 2, 1), optimizer={"overlap_gathers": "true"}, **options))
    layout, (_, expected) = drawn.program.layout, drawn.weights
    found = drawn.run(whole_weights(drawn.program), (layout.shapes.params, drawn.state.params))
    same = jax.tree.map(
        lambda x, y: x.shape[2:] == y.shape[2:] and np.array_equal(*np.broadcast_arrays(x, y)), found, expected
    )
    assert layout.gathers_late and all(jax.tree.leaves(same)), same


STAGES = {"mesh": (2, 2, 1)}
REDUCED = {"optimizer": {"overlap_reductions": "true"}}
OVERLAPPING = {"optimizer": {"overlap_reductions": "true", "overlap_gathers": "true"}, "paired_microbatches": True}
OVERLAPPING |= {"num_layers": 2, "tied_embedding": False, **UNDROPPED}
UNROLLED = {
    "everything": OVERLAPPING | {"mesh": (2, 1, 1)},  # pairs two microbatches of four
    "everything on stages": OVERLAPPING | STAGES | WAITING,
    "stages, reductions during the last backward pass": STAGES | REDUCED | {"num_layers": 4},
    "deferred, reductions": STAGES | WAITING | REDUCED | {"vocabulary": "split"},
}


@pytest.mark.parametrize("name", first(UNROLLED, 2))
def test_forms_of_gpus(name: str) -> None:
    """Unrolled layers with communication beside the passes, and pairs of microbatches."""
    given = FEW | {"num_layers": 3, "global_batch": 8, "vocab_size": 21, "scan_layers": "false"} | UNROLLED[name]
    assert_exact(tiny_config(**given), branches=False, planned=name not in [*UNROLLED][:1])


ALONE = {
    "one device": {"balance": "both", "router_z_loss": 0.1, "prediction_modules": 1, "global_batch": 2},
    "mixture": {"expert": 2, "balance": "both", "router_z_loss": 0.1, "prediction_modules": 1},
    "capacity, stages": {"mesh": (1, 2, 1), "expert": 2, "balance": "loss", "expert_capacity": 1.0, "num_layers": 2},
    "context": {"mesh": (1, 1, 2, 1), "balance": "both", "context_attention": "gather"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first(ALONE))
def test_what_a_mesh_alone_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another loss scale gradients and weights are the same, and with more rows, which are padding."""
    config = tiny_config(precision="fp16", **MIXED | UNDROPPED | ALONE[name])
    real, drawn, more = random_batch(config, 0), fields._drawn, config.mesh.row_shards
    expected = run_step(config, in_blocks(config), branches=False)
    with monkeypatch.context() as patch:
        patch.setattr(fields, "_drawn", lambda name, leaf: drawn(name + "'" * ("loss_scale" in name), leaf))
        found = [run_step(config, in_blocks(config), branches=False)]
    fill = {name: np.full_like(x[:more], -1 if name == "targets" else 1) for name, x in real.items()}
    batch = {name: np.concatenate([x, fill[name]]) for name, x in real.items()}
    monkeypatch.setattr(fields, "random_batch", lambda *given: batch)
    rows = dataclasses.replace(config.train, global_batch=config.train.global_batch + more)
    config = dataclasses.replace(config, train=rows)
    found.append(run_step(config, in_blocks(config), branches=False))
    for step in found:
        for of in (lambda step: step.gradients, lambda step: step.taken.state["params"]):
            wrong = {leaf: unequal(x, of(step)[leaf]) for leaf, x in of(expected).items()}
            assert not any(wrong.values()), wrong


def test_every_layer_and_row_has_dropout_of_its_own() -> None:
    recording = recorded_step(tiny_config((1, 2, 1), **SHORT | {"num_layers": 3, "dropout": 0.5, "vocab_size": 21}))
    dropped = [place for place in recording.places if place.site.endswith("dropout") and not place.backward]
    masks = [x.value == 0 for place in dropped for _, x in recording.activations(place)]
    assert {place.layer for place in dropped} == {0, 1, 2} and len(masks) == 2 * 3 * 4
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert all(0.3 < mask.mean() < 0.7 for mask in masks)


@pytest.mark.parametrize("mesh", [(1, 2, 1), full((1, 1, 2, 1))])
def test_the_layers_with_a_window_see_no_further(mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token changes what the first layer has for the three that see it, and then all of the second one's."""
    options = {"num_layers": 2, "sliding_window": 3, "window_layers": "1,1", "context_attention": "gather"}
    config = tiny_config(mesh, **SHORT | LLAMA | UNDROPPED | options | {"vocab_size": 21})
    recordings, batch = [], random_batch(config, 0)
    for first_token in (1, 2):
        tokens = batch["tokens"].copy()
        tokens[:, 0] = first_token
        monkeypatch.setattr(fields, "random_batch", lambda *given, tokens=tokens: batch | {"tokens": tokens})
        recordings.append(recorded_step(config, in_blocks(config)))
    for layer, seen in ((0, 3), (1, 8)):
        place = SitePlace(layer, "attention_heads", False)
        (_, one), (_, other) = (next(recording.activations(place)) for recording in recordings)
        assert np.flatnonzero((one.value != other.value).any((0, 2, 3))).tolist() == list(range(seen))


@pytest.mark.full
@pytest.mark.parametrize("grid", [test_context, test_experts])
def test_whole_grids(grid: Any) -> None:
    for each in grid.pairwise(grid.rows()):
        assert_exact(grid.config_of(each, **SMALL, vocab_size=21))
