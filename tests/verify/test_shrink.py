"""Configurations in small: valid, small, and as divisible, as uneven and of the same words as the large ones; and what
is printed of a mesh, and its figures."""

import dataclasses
import itertools
import json
import math
from operator import attrgetter
from pathlib import Path

import pytest
from tiny import user_error

from megajax.core.backend import CPU
from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.context_attention import tile_queries
from megajax.core.options import options
from megajax.core.program.program import Program
from megajax.core.traits import ShrinkRule, Size
from megajax.settings.config import Config
from megajax.settings.preset_files import preset_folders
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate, validate_imagined
from megajax.verify.forms import in_blocks
from megajax.verify.locate import AxesThatDiffer, Result, first_in_words
from megajax.verify.recording import Difference, SitePlace
from megajax.verify.report import Report
from megajax.verify.shrink import Shrunk, fold, shown_sizes, shrink
from megajax.verify.verdict import Finding, Verdict

PRESETS = [*(file for folder in preset_folders()[1:] for file in sorted(folder.rglob("*.toml")))]
MESHES = [(1, 1, 1), (2, 2, 2), (1, 3, 2), (3, 1, 2), (1, 4, 2), (2, 1, 4), (1, 2, 3), (64, 1, 8), (8, 8, 8), (2, 5, 1)]
SAME = [  # a model's options that are no sizes
    name for name, option in options(ModelConfig).items() if not (option.trait(Size) or option.trait(ShrinkRule))
]


def preset(file: Path | str, **flags: object) -> Config:
    return resolve(load_preset(file), {key.replace("__", "."): value for key, value in flags.items()})


def on_mesh(config: Config, sizes: tuple[int, int, int]) -> Config:
    """On a mesh, with a batch that `data` divides."""
    data, pipe, tensor = sizes
    rows = data * config.train.microbatch
    train = dataclasses.replace(config.train, global_batch=-(-config.train.global_batch // rows) * rows)
    return dataclasses.replace(config, train=train, mesh=MeshConfig(data=data, pipe=pipe, tensor=tensor))


def divisibility(config: Config) -> dict[str, object]:
    """What a mesh makes of sizes."""
    model, mesh = config.model, config.mesh
    heads, kv_heads, groups = model.num_heads, model.num_kv_heads, mesh.tensor
    layers, virtual = len(model.layers_of_periods), mesh.pipe * config.pipeline.chunks
    microbatches = config.train.global_batch // (mesh.data * config.train.microbatch)
    devices = mesh.tensor * (mesh.pipe if config.splits_vocabulary else 1)
    return {
        "heads are divided": heads % groups == 0,
        "one head a device": heads == groups,
        "heads of keys are held": "several times" if kv_heads < groups else "divided" if groups > 1 else "whole",
        "heads of queries for one of keys": min(2, heads // kv_heads),
        "a head is the hidden size's": model.head_size * heads == model.hidden_size,
        "an even head": model.head_size % 2,
        "mlp": (model.mlp_size == 4 * model.hidden_size, model.mlp_size % groups),
        "vocabulary is padded": model.padded_vocab_size > model.vocab_size,
        "vocabulary is divided": model.padded_vocab_size % devices,
        "layers": (layers % mesh.pipe == 0, layers % virtual == 0, layers >= virtual),
        "microbatches": (microbatches < mesh.pipe, microbatches % mesh.pipe == 0, microbatches == 1),
        "window": (0 < model.sliding_window < model.sequence_length, model.sliding_window > 0),
        "layers with the window": {*model.windowed},
    }


def shards(config: Config) -> dict[str, bool]:
    model, data = config.model, config.mesh.data
    devices = config.mesh.tensor * (config.mesh.pipe if config.splits_vocabulary else 1)
    return {
        "hidden size": model.hidden_size % data == 0,
        "mlp": model.mlp_size // config.mesh.tensor % data == 0,
        "vocabulary": model.padded_vocab_size // devices % data == 0,
    }


def inequalities(config: Config) -> set[tuple[str, str]]:
    """What is smaller than what."""
    model = config.model
    sizes = {"one": 1, "experts per token": model.experts_per_token, "experts": model.num_experts}
    sizes |= {"chosen groups": model.chosen_groups, "groups": model.expert_groups}
    found = {(a, b) for a, b in itertools.permutations(sizes, 2) if sizes[a] < sizes[b] and "groups" not in (a + b)}
    found |= {(a, b) for a, b in itertools.permutations(("one", "chosen groups", "groups"), 2) if sizes[a] < sizes[b]}
    if model.latent_size:
        latents = {name: getattr(model, name) for name in ("head_size", "value_head_size", "rotary_size")}
        latents |= {"latents": model.latent_size, "latents of queries": model.query_latent_size}
        latents |= {"cached": model.latent_size + model.rotary_size, "plain": model.head_size - model.rotary_size}
        found |= {(a, b) for a, b in itertools.permutations(latents, 2) if latents[a] < latents[b]}
    apart = {"heads": model.num_heads, "size of a head": model.head_size}
    if model.shared_expert_size:
        apart |= {"expert": model.expert_size, "shared": model.shared_expert_size}
    pairs = [("heads", "size of a head"), ("expert", "shared")]
    return found | {pair for pair in pairs if apart.get(pair[0]) != apart.get(pair[1])}


def check(config: Config, small: Shrunk) -> None:
    ours = small.config
    validate(ours, ours.mesh.num_devices)
    assert divisibility(ours) == divisibility(config)
    assert inequalities(ours) >= inequalities(config)
    assert small.notes or shards(ours) == shards(config)
    assert {name: getattr(ours.model, name) for name in SAME} == {name: getattr(config.model, name) for name in SAME}
    same = attrgetter(
        *("precision", "sequence_parallel", "task", "data"),
        *("train.remat", "optimizer.zero", "optimizer.gradient_dtype"),
        *(f"pipeline.{name}" for name in ("schedule", "chunks", "vocabulary", "weight_gradients")),
    )
    assert same(ours) == same(config)
    model = ours.model
    most = 8 * max(ours.mesh.tensor, 2)
    periods = model.layers_of_periods
    assert len(periods) <= 2 * ours.mesh.pipe * ours.pipeline.chunks and max(periods) <= 4 and model.num_heads <= most
    assert model.hidden_size <= 200 and model.sequence_length < 40 and model.padded_vocab_size <= 200
    assert ours.train.global_batch <= 48 * ours.mesh.data


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_every_preset_on_every_mesh_it_can_have(file: Path) -> None:
    config, verified = preset(file), 0
    for sizes in MESHES:
        theirs = on_mesh(config, sizes)
        try:
            validate(theirs, math.prod(sizes))
        except UserError:
            continue
        check(theirs, shrink(theirs, 16))
        verified += 1
    assert verified >= 3


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [
        ((2, 2, 2), {"pipeline__schedule": "interleaved", "pipeline__chunks": 5, "model__num_layers": 13}),
        ((1, 4, 2), {"pipeline__schedule": "interleaved", "pipeline__chunks": 3, "model__num_layers": 16}),
        ((2, 2, 2), {"pipeline__vocabulary": "split", "sequence_parallel": True, "optimizer__zero": 3}),
        ((2, 2, 3), {"model__num_heads": 12, "model__hidden_size": 132, "model__vocab_multiple": 999}),
        ((1, 6, 1), {"model__num_layers": 8, "train__global_batch": 5, "train__microbatch": 1}),
        ((1, 4, 1), {"train__global_batch": 7, "train__microbatch": 1, "pipeline__weight_gradients": "deferred"}),
        ((4, 1, 2), {"model__hidden_size": 136, "model__num_heads": 8, "train__remat": "stage"}),
        (
            (3, 1, 2),
            {"model__positions": "rotary", "model__head_size": 33, "model__rotary_size": 8, "model__mlp_size": 500},
        ),
        ((1, 1, 8), {"model__num_kv_heads": 2, "model__sliding_window": 3, "model__window_layers": "1,2"}),
        (
            (1, 1, 3),
            {
                "model__num_heads": 3,
                "model__positions": "rotary",
                "model__head_size": 64,
                "model__hidden_size": 48,
                "model__mlp_size": 192,
                "model__vocab_multiple": 999,
            },
        ),
        ((2, 1, 4), {"model__num_kv_heads": 2, "model__num_heads": 24, "model__hidden_size": 144}),
        ((1, 4, 1), {"pipeline__layers": "5,6,1,0", "model__num_layers": 12}),
        ((2, 4, 1), {"precision": "fp16", "optimizer__gradient_dtype": "fp16", "data__reset_attention": True}),
    ],
    ids=str,
)
def test_what_is_uneven_or_special_stays_so(sizes: tuple[int, int, int], flags: dict[str, object]) -> None:
    config = on_mesh(preset("demo", **flags), sizes)
    validate(config, math.prod(sizes))
    check(config, shrink(config, 16))


@pytest.mark.parametrize(
    ("pipe", "chunks", "layers", "small"),
    [
        (4, 1, "5,6,1,0", "1,2,1,0"),
        (2, 2, "3,3,3,3", "2,2,2,2"),
        (8, 1, "4,4,4,4,4,4,4,3", "2,1"),  # folded to two stages
        (4, 2, "1,0,2,2,2,2,2,1", "1,2,2,2"),
        (4, 1, "auto", "2,2,2,1"),
        (1, 1, "auto", "even"),
    ],
)
def test_stages_with_fewer_layers_stay(pipe: int, chunks: int, layers: str, small: str) -> None:
    flags: dict[str, object] = {"pipeline__schedule": "interleaved", "pipeline__chunks": chunks} if chunks > 1 else {}
    total = 12 if layers == "auto" else sum(map(int, layers.split(",")))
    config = on_mesh(preset("demo", pipeline__layers=layers, model__num_layers=total, **flags), (2, pipe, 1))
    found = shrink(config, 16 if pipe * chunks < 8 else 4).config
    validate(found, found.mesh.num_devices)
    assert found.pipeline.layers == small


@pytest.mark.parametrize("context", [2, 3, 4])
def test_a_piece_of_a_sequence_has_several_tiles(context: int) -> None:
    config = dataclasses.replace(preset("demo", model__context_attention="gather"), mesh=MeshConfig(context=context))
    small = shrink(config, 16).config
    validate(small, context)
    piece = small.model.sequence_length // (2 * context)
    assert tile_queries(piece, in_blocks(small).block_of(piece)) < piece


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("pipe", [2, 3, 4])
def test_the_last_deferred_gradients_are_not_in_the_first_slot(schedule: str, pipe: int) -> None:
    flags = {"pipeline__weight_gradients": "deferred", "pipeline__schedule": schedule}
    flags |= {"pipeline__chunks": 1 + (schedule == "interleaved"), "model__num_layers": 4 * pipe}
    small = shrink(on_mesh(preset("demo", train__global_batch=96, **flags), (1, pipe, 1)), 16).config
    table = Program.abstract(small, CPU).schedule
    assert (table.num_microbatches * table.num_chunks - 1) % table.deferral.num_slots
    assert table.num_microbatches % pipe == 0


def test_padding_that_fills_whole_shards_still_does() -> None:
    """Of a vocabulary of 1030, padded to 2048, three devices of eight hold nothing but padding."""
    config = on_mesh(preset("demo", model__vocab_size=1030), (1, 1, 8))
    model: ModelConfig = shrink(config, 16).config.model
    assert (model.padded_vocab_size - model.vocab_size) // (model.padded_vocab_size // 8) == 3


@pytest.mark.parametrize(
    ("mesh", "most", "folded"),
    [
        ((2, 2, 2), 8, (2, 2, 2)),
        ((64, 1, 8), 16, (4, 1, 4)),
        ((8, 8, 8), 16, (2, 4, 2)),
        ((128, 1, 4), 16, (4, 1, 4)),
        ((100_000, 1, 1), 16, (16, 1, 1)),
        ((1, 17, 1), 16, (1, 16, 1)),
        ((9, 1, 3), 16, (3, 1, 3)),
        ((7, 5, 1), 16, (3, 5, 1)),
        ((64, 64, 64), 8, (2, 2, 2)),
        ((8, 1, 8, 8), 8, (2, 1, 2, 2)),
    ],
)
def test_a_folded_mesh_has_every_axis(mesh, most, folded) -> None:
    data, pipe, *context, tensor = mesh
    large = MeshConfig(data=data, pipe=pipe, context=math.prod(context), tensor=tensor)
    assert shown_sizes(fold(large, most)) == folded


@pytest.mark.parametrize(
    ("flags", "sizes", "message"),
    [
        ({}, (8, 2, 2), "--devices 4 for a mesh of 8 x 2 x 2; valid: 8 or more"),
        (
            {"model__num_layers": 200, "pipeline__schedule": "interleaved", "pipeline__chunks": 50},
            (1, 2, 1),
            "--pipeline.chunks 50 x 2 stages is too large to scale down; valid: at most 32 chunks",
        ),
    ],
)
def test_what_cannot_be_shrunk(flags, sizes, message) -> None:
    config = on_mesh(preset("demo", **flags), sizes)
    validate_imagined(config)
    assert message in user_error(shrink, config, 4)


CONFIG = on_mesh(preset("gpt2-8.3b"), (64, 1, 8))
SMALL = shrink(CONFIG, 16)
RIGHT = Finding("fp64 losses", 3e-16, 1e-12, "step 2")
WRONG = Finding("fp64 gradients", math.inf, 1e-12, "blocks/mlp/up/weight, layer 1, step 1", (1,))


def printed(capsys, result: Result) -> tuple[str, dict]:
    report = Report("gpt2-8.3b", CONFIG, SMALL)
    report.start("one device, fp64")
    for finding in result.verdict.findings:
        report.found(finding)
    report.close(result)
    return capsys.readouterr().out, report.figures(result)


def test_of_a_right_mesh(capsys) -> None:
    text, figures = printed(capsys, Result(Verdict((RIGHT,))))
    lines = text.splitlines()
    assert lines[0] == "gpt2-8.3b on 64 x 1 x 8 (data x pipe x tensor), on 16 simulated devices"
    assert lines[1].startswith("folded to 4 x 1 x 4") and "num_layers 72 -> 2" in lines[2]
    assert "fp64 losses" in text and "3.0e-16" in text and "limit 1e-12" in text and "DIFFERS" not in text
    assert "1 check agrees" in lines[-1]
    assert figures["passed"] and figures["mesh"] == (64, 1, 8) and figures["verified_mesh"] == (4, 1, 4)
    assert figures["checks"][0]["figure"] == 3e-16 and figures["first_difference"] is None
    json.dumps(figures)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([("data",)], "data alone"),
        ([("data",), ("pipe",)], "data alone, or pipe alone"),
        ([("data", "tensor")], "data with tensor"),
        ([()], "none: with microbatches, blocks or recomputation, the run already differs on one device"),
    ],
)
def test_of_a_wrong_mesh(capsys, sets, words) -> None:
    axes, first = AxesThatDiffer(tuple(sets), SMALL.config), "mlp_up of layer 1, forward: different numbers"
    text, figures = printed(capsys, Result(Verdict((RIGHT, WRONG)), axes, first))
    assert "1 of 2 checks differs" in text and f"axes       {words}" in text
    assert "first      mlp_up of layer 1, forward" in text and "blocks/mlp/up/weight, layer 1, step 1  DIFFERS" in text
    assert figures["axes"] == [list(axes) for axes in sets] and not figures["passed"]


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (WRONG, "a gradient of weights, or its reduction: blocks/mlp/up/weight, layer 1"),
        (Finding("fp64 gradients", 1.0, 1e-12, "x, step 2"), "the update of the weights: x, step 2"),
        (Finding("fp64 losses", 1.0, 1e-12, "step 1, loss/x"), "forward: the sum of the losses: step 1, loss/x"),
        (
            Finding("fp64 other metrics of the steps", 1.0, 1e-12, "grad_norm, step 1"),
            "the norm of the gradients: grad",
        ),
        (Finding("exact weights after one step", 1.0, 1e-12, "x"), "the update of the weights: x"),
        (Finding("exact communication against the plan", 1, 0, "2 instead of 1"), "the plan: 2 instead of 1"),
    ],
)
def test_what_it_is_where_no_activation_differs(finding, words) -> None:
    assert words in first_in_words(None, (finding,))


def test_the_losses_come_before_gradients() -> None:
    """Where they differ in the first step, and no activation forward."""
    backward = Difference(SitePlace(1, "output", True), "different numbers", [0], 4)
    forward = dataclasses.replace(backward, place=SitePlace(1, "output", False))
    failed = (dataclasses.replace(WRONG, name="fp64 losses", where="step 1"),)
    assert first_in_words(backward, failed).endswith("the sum of the losses: step 1")
    assert first_in_words(backward, (WRONG,)) == str(backward) and first_in_words(forward, failed) == str(forward)
