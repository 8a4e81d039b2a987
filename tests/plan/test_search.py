"""A search: what it tries and finds, what it says where there is nothing."""

import itertools
import json
import shlex
from dataclasses import replace
from operator import attrgetter

import pytest
from tiny import tiny_config, user_error

from megajax.config import Config
from megajax.errors import UserError
from megajax.host.pictures import is_marked
from megajax.pipeline import config as pipeline_config
from megajax.plan import ranking
from megajax.plan.machines import MACHINES
from megajax.plan.memory import backend_of, memory
from megajax.plan.picture import MARK, draw_search
from megajax.plan.search import VARIED, Found, command, search
from megajax.plan.time import step_time
from megajax.settings.flags import Parser
from megajax.settings.presets import load_preset, resolve
from megajax.settings.validation import validate

H100 = MACHINES["h100"]
CONFIG = tiny_config(num_layers=4, hidden_size=512, num_heads=8, sequence_length=256, global_batch=4, precision="bf16")


@pytest.fixture(scope="module")
def found() -> Found:
    return search(CONFIG, 4, H100)


def test_every_combination_is_tried_once(found):
    """On 4 devices: what the loops of a user would make of it, and all of it can be trained."""
    wanted = set()
    for data, pipe, tensor in itertools.product([1, 2, 4], repeat=3):
        if data * pipe * tensor != 4:
            continue
        schedules = [("1f1b", 1)] if pipe == 1 else [("1f1b", 1), ("gpipe", 1)]
        schedules += [("interleaved", 2)] if pipe == 2 else []
        for options in itertools.product(
            [(data, pipe, tensor)], schedules, ["together", "deferred"][: 1 + (pipe > 1)],
            [rows for rows in (1, 2, 4) if 4 // data % rows == 0],
            ["none", "selective", "layer", "stage"][: 3 + (pipe > 1)],
            [0, 1, 3] if data > 1 else [1], [False, True][: 1 + (tensor > 1)],
        ):  # fmt: skip
            wanted.add(options)
    of = attrgetter("train.microbatch", "train.remat", "optimizer.zero", "sequence_parallel")
    tried = []
    for each in found.fitting:
        mesh, pipeline = (*each.config.mesh.sizes.values(),), each.pipeline
        tried.append((mesh, (pipeline.schedule, pipeline.chunks), pipeline.weight_gradients, *of(each.config)))
    assert set(tried) == wanted and len(tried) == len(wanted) == found.tried
    for each in found.fitting[::7]:
        validate(each.config, 4)
        assert each.bytes == memory(each.config).total


def test_memory_is_that_of_the_gpu():
    """A V100 has no fused attention, so that scores need room."""
    v100 = MACHINES["v100"]
    found = search(replace(CONFIG, model=replace(CONFIG.model, dropout=0.0), precision="fp16"), 1, v100, count=2)
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
    monkeypatch.setattr(pipeline_config, "_MOST_CELLS", 200)
    train, given = replace(CONFIG.train, global_batch=64), ["mesh.pipe", "train.microbatch", "train.remat"]
    config = replace(CONFIG, train=train, mesh=replace(CONFIG.mesh, pipe=2))
    for each in search(config, 2, H100, given=given, count=1).fitting:
        assert each.pipeline.schedule != "interleaved"  # which has twice as many cells
        validate(each.config, 2)
    config = replace(config, mesh=replace(CONFIG.mesh, pipe=4))
    with pytest.raises(UserError, match=r"--mesh\.pipe 4 x .* is a table of 256 forwards; valid: at most 200"):
        search(config, 4, H100, given=given)


def impossible(config: Config, devices: int, gpu: str = "h100") -> str:
    return user_error(search, config, devices, MACHINES[gpu])


def test_nothing_fits():
    one_layer = {"num_layers": 1, "hidden_size": 16_384, "num_heads": 8, "vocab_size": 128, "sequence_length": 64}
    said = impossible(tiny_config(precision="fp16", global_batch=1, **one_layer), 1, "v100")
    assert "no configuration fits in memory; the smallest (--mesh.data 1" in said
    assert "GiB of the 29.4 GiB that a program can have; valid: more --devices" in said


def test_no_mesh_of_so_many():
    said = impossible(CONFIG, 7)
    assert "--devices 7: no mesh of so many; --mesh.data has to divide --train.global-batch 4" in said
    assert said.endswith("valid: such as 6 or 8")


def test_figures_and_lines(found):
    """All of it is JSON; a line for every one of the best."""
    told = found, "demo", CONFIG, H100
    figures = json.loads(json.dumps(ranking.figures(*told)))
    assert len(figures["best"]) == len(found.best) == 10 and figures["fitting"] == len(found.fitting)
    assert figures["best"][0]["flags"].keys() == set(VARIED)
    assert [point["seconds"] for point in figures["frontier"]] == [each.seconds for each in found.frontier]
    lines = ranking.lines(*told)
    assert len(lines) == 1 + 1 + 10 + 1 + 1 and lines[-1] == figures["best"][0]["command"]


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_picture(found, tmp_path, kind):
    file = tmp_path / f"search.{kind}"
    draw_search(file, "a search", found, H100)
    assert is_marked(file, MARK) and not is_marked(tmp_path, MARK)
