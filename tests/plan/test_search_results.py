"""What a search computes only once, or leaves out, changes no result; what it says of a layout: safer ones, whole runs,
the page."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
from test_time import CONFIG, H100
from tiny import LINEAR, LLAMA, MIXTURE, QWEN3, full, tiny_config

from megajax.core.backend import GPU
from megajax.core.models.flops import step_products
from megajax.core.pipeline.config import PipelineConfig
from megajax.plan import memory as of_memory
from megajax.plan import ranking, traced
from megajax.plan.compiled import CompiledStep
from megajax.plan.memory import memory
from megajax.plan.page import is_page, page_data, page_of_search
from megajax.plan.search import Found, command, search
from megajax.plan.time import step_time
from megajax.plan.whole_run import WholeRun, tokens_of
from megajax.settings.config import Config

GIVEN = ["train.remat"]


@pytest.fixture(scope="module", autouse=True)
def slow_ones_are_tried() -> Iterator[None]:
    """All that is slower than others, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megajax.plan.search._SLOWEST", math.inf)
        yield


@pytest.fixture(scope="module")
def found(slow_ones_are_tried: None) -> Found:
    return search(CONFIG, 4, H100, given=GIVEN)


def test_what_is_left_out_of_a_search_does_not_fit_or_only_saves_memory(found: Found) -> None:
    """With less memory, it finds those of a larger one that fit, in the same order; and others that with more memory
    have a faster one beside them, like them but for scanned layers."""
    middle = sorted(each.bytes for each in found.fitting)[len(found.fitting) // 3]
    small = replace(H100, memory=int(middle / H100.usable * H100.memory) + 1)
    less = search(CONFIG, 4, small, given=GIVEN)
    seconds = {each.config: each.seconds for each in found.fitting}
    expected = [each.config for each in found.fitting if each.bytes <= small.usable]
    assert [each.config for each in less.fitting if each.config in seconds] == expected
    more = [each for each in less.fitting if each.config not in seconds]
    assert more and expected and len(less.fitting) < less.tried
    for each in more:
        unrolled = replace(each.config, model=replace(each.config.model, scan_layers="auto"))
        assert seconds[unrolled] <= each.seconds


def test_what_saves_memory_is_tried_wherever_there_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is like another that needs half of the memory and is as fast. That holds for larger microbatches
    where of a smaller one only some schedules are tried, and none of those fits."""
    shape = {"num_layers": 8, "hidden_size": 256, "num_heads": 4, "sequence_length": 512, "global_batch": 32}
    config = tiny_config((1, 4, 1), precision="bf16", dropout=0.0, **shape)
    given = [*(f"mesh.{axis}" for axis in ("data", "pipe", "tensor")), "pipeline.vocabulary", "pipeline.layers"]
    given += ["pipeline.weight_gradients"]
    small = replace(H100, memory=int(363 * 2**20 / H100.usable * H100.memory))
    tried = {each.config for each in search(config, 4, small, given=given).fitting}
    monkeypatch.setattr("megajax.plan.search._Ample.has", lambda *_: False)
    every = {each.config: each for each in search(config, 4, small, given=given).fitting}

    def most_saving(config: Config) -> Config:
        model, train = replace(config.model, scan_layers="true"), replace(config.train, remat="stage")
        return replace(config, model=model, train=train)

    assert tried < {*every}
    for config in {*every} - tried:
        alike = [each for other, each in every.items() if most_saving(other) == most_saving(config)]
        assert any(each.bytes <= small.usable / 2 and each.seconds <= every[config].seconds for each in alike)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ((1, 8, 8), LLAMA | {"num_kv_heads": 4}),
        full((1, 8, 8), QWEN3),
        full((1, 8, 8), MIXTURE),
        full((1, 8, 8), {"precision": "fp8"} | LLAMA),
        full((1, 8, 8), {"precision": "bf16"}),
        ((1, 2, 1), MIXTURE | {"expert": 8, "num_experts": 16}),
        full((1, 8, 8), LLAMA | LINEAR | {"linear_heads": 16, "linear_key_heads": 8, "linear_layers": "3,1"}),
        full((1, 8, 2, 8), MIXTURE | {"expert": 8, "expert_capacity": 1.25, "dense_layers": 1}),
    ],
)
@pytest.mark.parametrize("cut", [False, full(True)])
@pytest.mark.slow
def test_costs_of_a_larger_axis_follow_from_two_smaller_ones(mesh: tuple[int, ...], words: dict, cut: bool) -> None:
    """`tensor` where devices share keys' heads evenly, `expert` and, with the vocabulary, `pipe`. Ends without layers
    are the same beside experts."""
    sizes = {"num_heads": 16, "hidden_size": 256, "mlp_size": 512, "vocab_size": 1024, "head_size": 16}
    words = {"sequence_length": 128, "sequence_parallel": cut, "vocabulary": "split"} | words | sizes
    words |= {"num_kv_heads": 16} if "num_kv_heads" not in words else {"num_kv_heads": 8}
    config = tiny_config(mesh, num_layers=8, **words)
    traced._traced.cache_clear()
    computed, before = traced.step_cost(config, GPU, scaled=True), traced._traced.cache_info().misses
    assert computed == (cost := traced.step_cost(config, GPU))
    assert cost.layer.products and traced._traced.cache_info().misses > before  # none was of the larger axis
    alone = traced._one_microbatch(config, "none", splits_vocabulary=True)
    assert cost.ends == traced._traced(alone, replace(GPU, expert_kernel=False), traced._ends_cost, False)


@pytest.mark.parametrize("weight_gradients", ["together", "deferred"])
def test_the_buffers_of_a_few_microbatches_tell_those_of_many(weight_gradients: str) -> None:
    deferring = PipelineConfig(weight_gradients=weight_gradients).deferring()
    for schedule, chunks, microbatches in (("gpipe", 1, 23), ("1f1b", 1, 40), ("interleaved", 2, 32)):
        shape = schedule, 4, microbatches, chunks, deferring
        assert of_memory._buffers(*shape) == of_memory._counted(*shape)


def test_unrolled_layers_are_counted() -> None:
    """Unless layers are one scan: because it is asked for, or with ZeRO-3."""
    config = replace(CONFIG, mesh=replace(CONFIG.mesh, data=4))
    unrolled, scanned = (
        memory(replace(config, model=replace(config.model, scan_layers=each))) for each in ("auto", "true")
    )
    assert scanned.unrolled == 0 < unrolled.unrolled == int(0.75 * (unrolled.of_step - unrolled.unrolled))
    assert memory(replace(config, optimizer=replace(config.optimizer, zero=3))).unrolled == 0
    one_layer = replace(unrolled, unrolled=0).total
    assert unrolled.total > one_layer


def test_a_margin_is_kept_free() -> None:
    assert replace(H100, margin=0.1).usable == H100.largest - int(0.1 * H100.largest)
    assert replace(H100, margin=2.0).usable == H100.usable - 2 * 2**30


def test_a_safer_layout_stands_beside_the_fastest(found: Found) -> None:
    best = found.best[0]
    tight = replace(H100, memory=int(1.05 * best.memory.total / H100.usable * H100.memory))
    less = search(CONFIG, 4, tight, given=GIVEN, count=1)
    assert less.safer and less.safer.memory.total <= tight.usable / 2 < less.best[0].memory.total
    lines = ranking.lines(less, "demo", CONFIG, tight)
    assert command("demo", less.safer.config, CONFIG) == lines[-3] and command("demo", best.config, CONFIG) == lines[-1]
    assert lines[-2] == "number 1:"
    assert any(line.split()[0] == "half" for line in lines if line)
    assert found.safer is None  # the fastest needs less than half


def test_of_each_kind_of_mesh_the_fastest_and_of_those_near_the_simplest(found: Found) -> None:
    """With all ranked there are several of a kind, and none is recommended but the first."""

    def kind(config: Config) -> frozenset[str]:
        return frozenset(axis for axis in ("pipe", "tensor") if config.mesh.sizes[axis] > 1)

    best = {kind(plan.config): plan.time.seconds for plan in found.best}
    assert len(best) == len(found.best) == 4
    for each, seconds in best.items():
        same = (point.config for point in found.fitting if kind(point.base) == each)
        assert seconds == min(step_time(config, H100).seconds for config in same)
    near = [each for each, seconds in best.items() if seconds <= 1.05 * found.best[0].time.seconds]
    assert len(kind(found.recommended.config)) == min(map(len, near))
    ranked = search(CONFIG, 4, H100, given=[*GIVEN, "mesh.pipe", "train.microbatch"], count=5, of_all=True)
    assert ranked.best[0] == ranked.recommended and len(ranked.best) == 5
    assert len({kind(plan.config) for plan in ranked.best}) < 5


@pytest.mark.parametrize(
    ("gib", "unrolled", "said"),
    [(60, 0, ": 60.0 GiB (fits in 70.4); "), (71, 0, "(does not fit in 70.4)"),
     (60, 11, "(fits in 70.4, but unrolled it may need 71.0)")],
)  # fmt: skip
def test_a_check_ends_with_a_verdict(found: Found, gib: int, unrolled: int, said: str) -> None:
    made = CompiledStep("XLA", 10 << 30, (gib - 10) << 30, (), 1.0)
    compilation: Any = SimpleNamespace(gpus=False, result=lambda: made)
    first = found.best[0]
    best = [replace(first, memory=replace(first.memory, unrolled=unrolled << 30)), *found.best[1:]]
    lines = ranking.lines(
        replace(found, best=best, recommended=best[0]),
        "demo",
        CONFIG,
        H100,
        [compilation],
    )
    assert said in next(line for line in lines if line.startswith("check of number 1, "))


def test_attention_is_counted_whole_and_as_the_mask_leaves_it() -> None:
    config = replace(CONFIG, mesh=replace(CONFIG.mesh, data=4))
    time, products = step_time(config, H100), step_products(config.model, 1, config.model.sequence_length)
    whole = sum(each.flops for each in products)
    scores = sum(each.flops for each in products if each.name.endswith(" keys"))
    assert time.mfu_causal / time.mfu == pytest.approx(1 - scores / 2 / whole) and scores > 0
    bert = step_time(tiny_config(precision="bf16", family="bert", layer_order="post"), H100)
    assert bert.mfu_causal == bert.mfu


@pytest.mark.parametrize(
    ("text", "number"),
    [("15T", 15e12), ("1.5t", 1.5e12), ("300B", 3e11), ("7 M", 7e6), ("10k", 1e4), ("2.5e9", 2.5e9), ("8", 8.0),
     ("", None), ("T", None), ("-3B", None), ("0", None), ("3X", None), ("1e99", None), ("nan", None)],
)  # fmt: skip
def test_tokens(text: str, number: float | None) -> None:
    assert tokens_of(text) == number


def test_a_whole_run(found: Found) -> None:
    figures = WholeRun(86_400e6, 2.0).figures(tokens_per_second=1000.0, devices=4)
    assert figures == {"days": 1000.0, "gpu_hours": 96_000.0, "cost": 192_000.0}
    assert WholeRun(price=2.0).figures(1.0, 4) == {}
    about = found, "demo", CONFIG, H100, (), WholeRun(1e12, 2.0)
    header, first = ranking.lines(*about)[1:3]
    assert re.split(r"\s{2,}", header)[-3:] == ["days", "GPU-hours", "cost"]
    best = ranking.figures(*about)["best"][0]
    assert first.split()[-1] == f"{best['cost']:,.0f}" and best["cost"] == 2 * best["gpu_hours"]
    speed = best["tokens_per_second_per_gpu"]
    assert best["gpu_hours"] == pytest.approx(1e12 / speed / 3600) and f" {speed:,.0f} " in first


def test_every_point_of_a_page_has_its_flags_and_parts(found: Found, tmp_path) -> None:
    data = page_data([(H100, found)], "demo", CONFIG)
    assert len(data["seconds"]) == len(found.fitting)
    for number in range(0, len(found.fitting), 97):
        each = found.fitting[number]
        flags = (column["flags"][column["index"][number]] for column in data["columns"])
        shown = " ".join([*data["command"], *filter(None, flags)])
        assert sorted(shown.split()) == sorted(command("demo", each.config, CONFIG).split())
        assert sum(part[number] for part in data["time"].values()) == pytest.approx(1e4 * each.seconds, abs=6)
        assert sum(part[number] for part in data["memory"].values()) == pytest.approx(each.bytes / 2**20, abs=8)
    values = {column["name"]: column["values"] for column in data["columns"]}
    assert values["tensor"] == [1, 2, 4] and values["optimizer.zero"] == [1, 3]
    page = page_of_search([(H100, found)], "</script><b>", CONFIG)
    assert "<b>" not in page and not re.search(r"(src|href)=|https?://|import\(|fetch\(", page)
    embedded = re.search(r"const data = (.*);\n", page)
    assert embedded and json.loads(embedded[1])["seconds"] == data["seconds"]
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    assert is_page(file) and not is_page(tmp_path) and attrgetter("base.mesh.data")(found.fitting[0]) in values["data"]
