"""The model of a step's time: where devices stand, what rings move, what the parts add up to, and the claims that
docs/benchmarks/planning.md makes of published figures; a search by it: what it finds, what it says where there is
nothing."""

import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import jax
import pytest
from tiny import full, tiny_config, user_error

from megajax.core.config import MeshConfig
from megajax.core.errors import UserError
from megajax.core.mesh import make_mesh, rank_groups
from megajax.core.models.flops import step_flops
from megajax.core.program.communication import Collective
from megajax.plan import ranking
from megajax.plan.communication import group_of, seconds_of
from megajax.plan.machines import MACHINES, Efficiency, peak_of
from megajax.plan.memory import backend_of, memory
from megajax.plan.search import Found, command, search
from megajax.plan.time import StepModel, step_time
from megajax.settings import pipeline_checks
from megajax.settings.config import Config
from megajax.settings.flags import Parser
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate

H100 = MACHINES["h100"]


def large(**changes) -> Config:
    mesh = {"mesh.data": 8, "mesh.pipe": 8, "mesh.tensor": 8, "train.microbatch": 2}
    return resolve(load_preset("gpt2-8.3b"), mesh | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize("server", [2, 4, 8])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2), (2, 4, 1), (1, 2, 4), (1, 2, 2, 2)])
def test_members_of_a_group_in_a_server(sizes, server):
    """As the mesh numbers its devices: those of a server are neighbours."""
    data, pipe, *context, tensor = sizes
    mesh = MeshConfig(data=data, pipe=pipe, context=math.prod(context), tensor=tensor)
    groups = rank_groups(make_mesh(jax.devices(), **mesh.sizes))
    for name in groups.keys() - {"embedding"}:
        axes = ("pipe", "tensor") if name == "model" else (name,)
        size, neighbours = group_of(axes, mesh, server)
        of_servers = {
            sum(rank // server == other // server for other in group) for group in groups[name] for rank in group
        }
        assert (size, {neighbours}) == (len(groups[name][0]), of_servers), name


def test_a_ring_moves_each_part_twice():
    """In a server of 8, and over servers by the adapters of all of its members in one."""
    mesh = MeshConfig(data=64, tensor=8)
    whole = Efficiency(all_reduce=1, others=1, network=1, server_latency=0, network_latency=0)
    bare = replace(H100, efficiency=whole)

    def taken(kind: str, axis: str, num_bytes: int) -> float:
        return seconds_of(Collective(kind, (axis,), (), num_bytes, 1), mesh, bare)

    assert taken("all-reduce", "tensor", 8_000) == pytest.approx(2 * 7_000 / 450e9)
    assert (
        taken("all-gather", "tensor", 1_000) == taken("reduce-scatter", "tensor", 8_000) == pytest.approx(7_000 / 450e9)
    )
    assert taken("all-reduce", "data", 64_000) == pytest.approx(2 * 63_000 / 50e9)  # one of 64 in a server
    assert taken("all-reduce", "pipe", 64_000) == 0  # alone


@pytest.mark.parametrize(
    "changes", [{}, {"pipeline__schedule": "interleaved", "pipeline__chunks": 3}, {"optimizer__zero": 3}]
)
def test_parts_add_up(changes):
    config = large(**changes)
    time = step_time(config, H100)
    assert time.seconds == pytest.approx(sum(time.parts.values())) and min(time.parts.values()) >= 0
    flops = step_flops(config.model, 512)
    assert time.mfu * time.seconds * 512 * 989e12 == pytest.approx(flops)
    assert time.tokens_per_second * time.seconds == pytest.approx(512 * 1024)
    assert 0 < time.bubble < 1


def test_what_must_take_longer():
    """Slower links, a smaller rate, recomputation, fewer microbatches for as many stages."""

    def of(machine=H100, **changes):
        return step_time(large(**changes), machine)

    slower = replace(H100, network=1e9)
    assert min(of(slower).seconds, of(MACHINES["a100"]).seconds) > of().seconds
    assert of(train__remat="none").seconds < of().seconds < of(train__remat="stage").seconds
    assert of(train__microbatch=8).bubble > of().bubble
    together, deferred = (of(pipeline__weight_gradients=when, train__microbatch=4) for when in ("together", "deferred"))
    assert deferred.bubble < together.bubble


@pytest.mark.parametrize(
    "words", [{"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "interleaved", "chunks": 2}]
)
@pytest.mark.parametrize("microbatches", [1, 3, 4, 6, 16])
@pytest.mark.parametrize("later", ["together", "deferred"])
def test_the_formula_of_a_pipe_is_near_its_table(words, microbatches, later):
    sizes = {"num_layers": 16, "global_batch": microbatches, "hidden_size": 1024, "sequence_length": 512}
    config = tiny_config((1, 4, 1), weight_gradients=later, **sizes, **words)
    table, formula = (step_time(config, H100, exact=exact).seconds for exact in (True, False))
    guessed = later == "deferred" and "chunks" in words and microbatches < 4
    assert formula == pytest.approx(table, rel=0.06 if guessed else 0.03)


@pytest.mark.full
def test_the_papers_figures_are_met_within_a_tenth(monkeypatch):
    """But for the epochs' days, which are of whole runs and come last."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import plan

    figures = [*itertools.takewhile(lambda each: "epoch" not in each.name, plan.of_the_paper())]
    assert len(figures) == 10 and all(abs(each.error) < 0.1 for each in figures), figures
    sys.modules.pop("plan")


@pytest.mark.parametrize("way", ["heads", full("gather")])
def test_attention_of_a_context_group_is_a_part_of_the_same_work(way):
    """On eight devices an eighth; cuDNN's only where a device has all tokens of its heads."""
    words = {"head_size": 64, "sequence_length": 16_384, "precision": "bf16", "num_heads": 8, "context_attention": way}
    words["attention"] = "blocks" if way == "gather" else "auto"
    alone, shared, few_tokens = (
        step_time(tiny_config(mesh, dropout=dropout, **words), H100).parts["attention"]
        for mesh, dropout in (((1, 1, 1), 0.1 * (way == "gather")), ((1, 1, 8, 1), 0.0), ((1, 1, 8, 1), 0.1))
    )
    assert shared == pytest.approx(alone / 8, rel=0.03)  # blocks of other lengths leave other scores out
    assert (few_tokens == shared) == (way == "gather")


def test_unknown_precisions():
    with pytest.raises(UserError, match=r"--precision bf16 with --gpu v100.*valid: fp16, fp32, fp64"):
        peak_of(MACHINES["v100"], "bf16")


def test_a_window_as_long_as_the_sequence_is_none():
    """Attention is the fused one with any; with a shorter one it has less to do."""
    words = {"head_size": 64, "sequence_length": 256, "dropout": 0.0, "precision": "bf16"}
    configs = [tiny_config(sliding_window=window, **words) for window in (0, 256, 300, 255)]
    seconds = [step_time(config, H100).seconds for config in configs]
    assert seconds[0] == seconds[1] == seconds[2] > seconds[3]


CONFIG = tiny_config(
    num_layers=4, hidden_size=512, num_heads=8, sequence_length=256, global_batch=4, precision="bf16", dropout=0.0
)


@pytest.fixture(scope="module", params=[["train.remat"], full([])], ids=["one remat", "all"])
def given(request: pytest.FixtureRequest) -> list[str]:
    return request.param


@pytest.fixture(scope="module")
def found(given: list[str]) -> Found:
    """With what only saves memory, although there is enough, and with what is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megajax.plan.search._Ample.has", lambda *_: False)
        patch.setattr("megajax.plan.search._SLOWEST", math.inf)
        return search(CONFIG, 4, H100, given=given)


def test_every_combination_is_tried_once(found, given):
    """On 4 devices: what the loops of a user would make of it, without ZeRO 0 and with free recomputation."""
    wanted, remats = set(), ["none"] if given else ["selective", "layer", "stage"]
    for data, pipe, tensor in itertools.product([1, 2, 4], repeat=3):
        if data * pipe * tensor != 4:
            continue
        schedules = [("1f1b", 1)] if pipe == 1 else [("1f1b", 1), ("gpipe", 1)]
        schedules += [("interleaved", 2)] if pipe == 2 else []
        for options in itertools.product(
            [(data, pipe, tensor)], schedules, ["together", "deferred"][: 1 + (pipe > 1)],
            ["replicated", "split"][: 1 + (pipe > 1)],
            [rows for rows in (1, 2, 4) if 4 // data % rows == 0],
            remats[: 2 + (pipe > 1)],
            [1, 3] if data > 1 else [1], [False, True][: 1 + (tensor > 1)], ["auto", "true"],
            [False, True][: 1 + (pipe == 1 < tensor)],
        ):  # fmt: skip
            microbatch, (zero, _, scan, paired) = options[4], options[-4:]
            alone = zero == 1 and scan == "auto" and microbatch < 4 // data  # two microbatches of unrolled layers
            if (zero, scan) != (3, "true") and (alone or not paired):  # ZeRO-3 scans anyway
                wanted.add(options)
    of = attrgetter(
        "train.microbatch", "train.remat", "optimizer.zero", "sequence_parallel", "model.scan_layers",
        "pipeline.paired_microbatches",
    )  # fmt: skip
    tried = []
    for each in found.fitting:
        mesh, pipeline = attrgetter("data", "pipe", "tensor")(each.config.mesh), each.pipeline
        words = pipeline.weight_gradients, pipeline.vocabulary
        tried.append((mesh, (pipeline.schedule, pipeline.chunks), *words, *of(each.config)))
    even = [each for each, one in zip(tried, found.fitting, strict=True) if not one.pipeline.counts]
    assert set(tried) == wanted and len(even) == len(wanted) <= len(tried) == found.tried
    for each in found.fitting[::29]:
        validate(each.config, 4)
        assert each.bytes == memory(each.config).total


def test_what_is_slow_is_left_out(found, given, monkeypatch):
    """It is a quarter slower than the fastest in half of the memory even if no stage waits."""
    monkeypatch.setattr("megajax.plan.search._Ample.has", lambda *_: False)
    limit = 1.25 * min(each.seconds for each in found.fitting if each.bytes <= H100.usable / 2)
    tried = {each.config for each in search(CONFIG, 4, H100, given=given).fitting}
    assert tried and all(each.config in tried or each.seconds > limit for each in found.fitting)
    slow = [each for each in found.fitting if each.config not in tried]
    assert len(slow) > len(tried) and len(found.fitting) == len(tried) + len(slow)
    for each in found.fitting[::7]:
        assert StepModel(each.config, H100).least <= each.seconds * (1 + 1e-9)


@pytest.mark.full
def test_long_sequences_are_shared():
    """In the faster way, with 4,096 tokens of a device at least, or over as many devices as are given."""
    keys, long = ["train.remat", "optimizer.zero"], replace(CONFIG.model, sequence_length=8192)
    given = replace(CONFIG, mesh=replace(CONFIG.mesh, context=4))
    some = (
        search(replace(CONFIG, model=long), 4, H100, given=keys),
        search(given, 4, H100, given=[*keys, "mesh.context"]),
    )
    ways = [{(each.base.mesh.context, each.base.model.context_attention) for each in found.fitting} for found in some]
    assert ways == [{(1, "auto"), (2, "heads")}, {(4, "gather")}]
    for each in some[1].fitting[::5]:
        other = replace(each.config, model=replace(each.config.model, context_attention="heads"))
        assert step_time(other, H100, exact=False).seconds > each.seconds
    for each in some[0].fitting[::7]:
        validate(each.config, 4)
    header, first, *_ = ranking.lines(some[1], "demo", given, H100)[1:]
    assert " context " in header and " 4 gather " in first


def test_zero_over_the_ranks_of_a_server(monkeypatch):
    """Where `data` spans servers and a step is faster so, as it is not with a fast network; others if given."""
    monkeypatch.setattr("megajax.plan.search._SLOWEST", math.inf)
    fixed = ["mesh.pipe", "mesh.tensor", "train.microbatch", "train.remat", "model.scan_layers"]
    pairs = replace(H100, server=2)
    found = search(CONFIG, 4, pairs, given=fixed)
    of = attrgetter("optimizer.zero", "optimizer.zero_ranks")
    seconds = {of(each.config): each.seconds for each in found.fitting}
    assert {*seconds} == {(1, 0), (1, 2), (3, 0), (3, 2)}
    assert seconds[1, 2] < seconds[1, 0] and seconds[3, 2] < seconds[3, 0]
    for each in found.fitting:
        validate(each.config, 4)
        assert each.bytes == memory(each.config).total
    alike = replace(H100.efficiency, network=1.0, network_latency=H100.efficiency.server_latency)
    found = search(CONFIG, 4, replace(pairs, network=pairs.link, efficiency=alike), given=fixed)
    assert {of(each.config) for each in found.fitting} == {(1, 0), (3, 0)}
    given = replace(CONFIG, optimizer=replace(CONFIG.optimizer, zero_ranks=1))
    found = search(given, 4, H100, given=[*fixed, "optimizer.zero_ranks"])
    assert {of(each.config) for each in found.fitting} == {(1, 1), (3, 1)}


def test_memory_is_that_of_the_gpu():
    """A V100 has no fused attention, so that scores need room."""
    v100 = MACHINES["v100"]
    found = search(replace(CONFIG, precision="fp16"), 1, v100, given=["train.remat"], count=2)
    for each in found.best:
        assert each.memory == memory(each.config, backend_of(v100)) != memory(each.config)
    assert found.fitting[0].bytes == memory(found.fitting[0].config, backend_of(v100)).total


def test_the_best_is_the_fastest_of_all(found):
    exact = min(step_time(each.config, H100).seconds for each in found.fitting)
    assert found.best[0].time.seconds == exact
    assert [each.time.seconds for each in found.best] == sorted(each.time.seconds for each in found.best)


def test_nothing_undercuts_the_frontier(found):
    frontier = found.frontier
    assert frontier[0].seconds == found.fitting[0].seconds
    assert frontier[-1].bytes == min(each.bytes for each in found.fitting)
    for point, each in itertools.product(frontier, found.fitting):
        assert not (each.seconds <= point.seconds and each.bytes < point.bytes)


@pytest.mark.full
def test_the_printed_line_is_what_was_planned():
    """Read again by train.py's parser it is the same run, and valid."""
    original = resolve(load_preset("gpt2-355m"), {})
    config = resolve(load_preset("gpt2-355m"), {"train.global_batch": 16, "precision": "fp16"})
    for each in search(config, 2, H100, given=["train.microbatch"], count=3).best:
        program, script, preset, *flags = shlex.split(command("gpt2-355m", each.config, original))
        parser = Parser("", "")
        parser.add_config_flags()
        again = resolve(load_preset(preset), parser.overrides(parser.parse_args(flags)))
        assert [program, script] == ["megajax", "train"] and again == each.config
        validate(again, 2)


def test_what_is_given_stays():
    given = ["mesh.tensor", "train.remat", "pipeline.schedule", "optimizer.zero"]
    config = replace(
        CONFIG, mesh=replace(CONFIG.mesh, tensor=2), train=replace(CONFIG.train, remat="layer"),
        pipeline=replace(CONFIG.pipeline, schedule="gpipe"), optimizer=replace(CONFIG.optimizer, zero=0),
    )  # fmt: skip
    for each in search(config, 4, H100, given=given).fitting:
        assert [attrgetter(key)(each.config) for key in given] == [2, "layer", "gpipe", 0]


def test_tables_too_large_to_make_are_left_out(monkeypatch):
    """Though fewer microbatches tell their buffers."""
    monkeypatch.setattr(pipeline_checks, "_MOST_CELLS", 200)
    train, given = replace(CONFIG.train, global_batch=64), ["mesh.pipe", "train.microbatch", "train.remat"]
    config = replace(CONFIG, train=train, mesh=replace(CONFIG.mesh, pipe=2))
    for each in search(config, 2, H100, given=given, count=1).fitting:
        assert each.pipeline.schedule != "interleaved"  # which has twice as many cells
        validate(each.config, 2)
    config = replace(config, mesh=replace(CONFIG.mesh, pipe=4))
    with pytest.raises(UserError, match=r"--mesh\.pipe 4 x .* is a table of 256 forwards; valid: at most 200"):
        search(config, 4, H100, given=given)


def impossible(config: Config, devices: int, gpu: str = "h100", given: Sequence[str] = ()) -> str:
    return user_error(search, config, devices, MACHINES[gpu], given=given)


def test_nothing_fits():
    one_layer = {"num_layers": 1, "hidden_size": 16_384, "num_heads": 8, "vocab_size": 128, "sequence_length": 64}
    said = impossible(tiny_config(precision="fp16", global_batch=1, **one_layer), 1, "v100", ["train.remat"])
    assert "no configuration fits in memory; the smallest (--mesh.data 1" in said
    assert "GiB of the 28.2 GiB usable; valid: more --devices" in said


def test_our_own_kernel_takes_what_cudnn_cannot():
    """On Hopper GPUs, and where it is faster than blocks; its dropout takes longer, hashing as many bits whatever the
    head size; and it can be asked for, or blocks."""
    words = {"head_size": 128, "sequence_length": 4096, "num_heads": 8, "precision": "bf16"}

    def attention(machine: str = "h200", **options: object) -> float:
        parts = step_time(tiny_config(**{"dropout": 0.0} | words | options), MACHINES[machine]).parts
        return parts["attention"] + parts["memory"]

    kernel, dropped = attention(attention="kernel"), attention(attention="kernel", dropout=0.1)
    assert kernel < dropped == attention(dropout=0.1) < attention(attention="blocks", dropout=0.1)
    assert kernel == attention() == attention(attention="cudnn")  # which has no dropout
    # Of cuDNN's 3.5 times 4 FLOP for every feature and score, at 40% of the peak.
    cudnn = step_time(tiny_config(**words, dropout=0.0), MACHINES["h200"]).parts["attention"]
    more = sum(MACHINES["h200"].kernel.dropped) * 0.4 / (3.5 * 4 * 128)
    assert (dropped - kernel) / cudnn == pytest.approx(more, rel=1e-6)
    assert attention("a100", dropout=0.1) == attention("a100", dropout=0.1, attention="blocks")
