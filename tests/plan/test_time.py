"""The model of a step's time: where devices stand, what rings move, what the parts add up to, and the claims that
docs/plan-time.md makes of published figures."""

import dataclasses
import sys
from pathlib import Path

import jax
import pytest
from tiny import tiny_config

from megajax.axes import AXES
from megajax.config import Config, MeshConfig
from megajax.errors import UserError
from megajax.mesh import make_mesh, rank_groups
from megajax.models.family import step_flops
from megajax.plan.communication import group_of, seconds_of
from megajax.plan.machines import MACHINES, Efficiency, peak_of
from megajax.plan.memory import memory
from megajax.plan.sizes import steady_state_microbatches
from megajax.plan.time import step_time
from megajax.program.communication import Collective
from megajax.settings.presets import load_preset, resolve

H100 = MACHINES["h100"]


def large(**changes) -> Config:
    mesh = {"mesh.data": 8, "mesh.pipe": 8, "mesh.tensor": 8, "train.microbatch": 2}
    return resolve(load_preset("gpt2-8.3b"), mesh | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize("server", [2, 4, 8])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2), (2, 4, 1), (1, 2, 4)])
def test_members_of_a_group_in_a_server(sizes, server):
    """As the mesh numbers its devices: those of a server are neighbours."""
    mesh = MeshConfig(**dict(zip(AXES, sizes, strict=True)))
    groups = rank_groups(make_mesh(jax.devices(), **mesh.sizes))
    for name in (*AXES, "model"):
        axes = ("pipe", "tensor") if name == "model" else (name,)
        size, neighbours = group_of(axes, mesh, server)
        of_servers = {
            sum(rank // server == other // server for other in group) for group in groups[name] for rank in group
        }
        assert (size, {neighbours}) == (len(groups[name][0]), of_servers), name


def test_a_ring_moves_each_part_twice():
    """In a server of 8, and over servers by the adapters of all of its members in one."""
    mesh = MeshConfig(data=64, tensor=8)
    full = Efficiency(all_reduce=1, others=1, network=1, server_latency=0, network_latency=0)
    bare = dataclasses.replace(H100, efficiency=full)

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

    slower = dataclasses.replace(H100, network=1e9)
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


@pytest.mark.parametrize("words", [{"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2}])
@pytest.mark.parametrize("later", ["together", "deferred"])
def test_few_microbatches_tell_the_buffers_of_many(words, later):
    settled = steady_state_microbatches(words["schedule"], 4, 32)
    many, few = (
        memory(tiny_config((1, 4, 1), num_layers=8, global_batch=m, weight_gradients=later, **words))
        for m in (32, settled)
    )
    assert settled == 16 and dataclasses.replace(many, batch=0) == dataclasses.replace(few, batch=0)


def test_the_papers_figures_are_met_within_a_tenth(monkeypatch):
    """But for the epochs' days, which are of whole runs."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import plan_paper

    figures = [each for each in plan_paper.of_the_paper() if "epoch" not in each.name]
    assert len(figures) == 10 and all(abs(each.error) < 0.1 for each in figures), figures
    sys.modules.pop("plan_paper")


def test_unknown_precisions():
    with pytest.raises(UserError, match=r"--precision bf16 with --gpu v100.*valid: fp16, fp32, fp64"):
        peak_of(MACHINES["v100"], "bf16")


def test_a_window_as_long_as_the_sequence_is_none():
    """Attention is the fused one with any; with a shorter one it has less to do."""
    words = {"head_size": 64, "sequence_length": 256, "dropout": 0.0, "precision": "bf16"}
    configs = [tiny_config(sliding_window=window, **words) for window in (0, 256, 300, 255)]
    seconds = [step_time(config, H100).seconds for config in configs]
    assert seconds[0] == seconds[1] == seconds[2] > seconds[3]
