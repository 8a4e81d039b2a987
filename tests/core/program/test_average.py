"""The average of the weights over the steps (`train.ema`): the same on every mesh, stored beside the weights, and what
is read of a run. One step on a mesh: `test_skipped_steps.py`."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import LLAMA, tiny_config, tiny_program

from megajax.core.models.lora_config import LoraConfig
from megajax.core.program.program import Program
from megajax.core.program.train_step import average_weights, train_step
from megajax.data.synthetic import random_batch
from megajax.runs.checkpoint import Checkpoints
from megajax.runs.trained import restore_params, weights_in_parts
from megajax.verify.run import drawn_state

DECAY = 0.75


def program(mesh: tuple[int, int, int] = (1, 1, 1), *, ema: float = DECAY, **options: Any) -> Program:
    return tiny_program(tiny_config(mesh, ema=ema, **options))


def averages(made: Program, steps: int) -> tuple[list[Any], list[Any]]:
    """Canonical weights and averages, before the first step and after every one."""
    begun = drawn_state(made)
    state = made.layout.from_canonical(dataclasses.replace(begun, average=begun.params))
    found = [jax.device_get(made.layout.to_canonical(state))]
    step = None
    for number in range(steps):
        batch = made.put_batch(random_batch(made.config, number), made.local_rows)
        step = step or train_step(made).lower(state, batch).compile({"xla_backend_optimization_level": 0})
        state, _ = step(state, batch)
        found.append(jax.device_get(made.layout.to_canonical(state)))
    return [each.params for each in found], [each.average for each in found]


def assert_close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), found, expected)


@pytest.mark.full
@pytest.mark.parametrize("zero", [3, 1])
def test_the_average_is_that_of_one_device_and_the_definition_s(zero: int) -> None:
    """On (2, 2, 2), with layers that the pipe does not divide; in fp64: Adam amplifies rounding."""
    options = {"precision": "fp64", "num_layers": 3, **LLAMA}
    with jax.enable_x64(True):
        weights, expected = averages(program(**options, microbatch=8), 4)
        average = expected[0]
        for number in range(1, 5):
            average = jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, average, weights[number])
            assert_close(expected[number], average)
        found = averages(program((2, 2, 2), zero=zero, **options), 4)[1]
    assert_close(found[-1], expected[-1])
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), weights[-1], expected[-1])
    assert min(jax.tree.leaves(moved)) > 1e-5  # it is not the weights


@pytest.mark.slow
def test_it_begins_with_new_weights_and_follows_the_main_ones() -> None:
    """Not those that layers compute with, which are rounded."""
    made = program(precision="bf16", num_layers=1, optimizer={"warmup_steps": 0})
    new = jax.device_get(made.layout.to_canonical(made.layout.init()))
    jax.tree.map(np.testing.assert_array_equal, new.average, new.params)
    (_, weights), (old, average) = averages(made, 1)
    assert_close(average, jax.tree.map(lambda x, y: DECAY * x + (1 - DECAY) * y, old, weights), 1e-6)


def test_it_is_fp32_and_lies_like_the_optimizer_s_state() -> None:
    layout = program((2, 2, 2), precision="bf16", zero=1).layout
    assert layout.specs.average == layout.trained_specs
    assert {leaf.dtype for leaf in jax.tree.leaves(layout.shapes.average)} == {np.dtype("float32")}


def filled(made: Program) -> Any:
    """A state of random numbers."""
    rng, shapes = np.random.default_rng(0), made.layout.canonical_shapes
    return made.layout.from_canonical(
        jax.tree.map(lambda leaf: rng.uniform(1, 9, leaf.shape).astype(leaf.dtype), shapes)
    )


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


@pytest.mark.full  # by default: tests/runs/test_checkpoint.py and test_resume.py
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)], ids=["all weights", "adapters"])
def test_it_is_stored_and_read_on_any_mesh(
    tmp_path: Path, lora: LoraConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default the average is read; without `train.ema`, which is what `--weights trained` says, the weights are."""
    options = {"num_layers": 3, "lora": lora, **LLAMA}
    first, other = program((1, 2, 2), **options), program((2, 1, 1), zero=3, **options)
    state = filled(first)
    canonical = first.layout.to_canonical(state)
    writer = Checkpoints(tmp_path, first.layout, keep=1)
    writer.save(5, state)
    writer.wait()
    again = Checkpoints(tmp_path, other.layout)
    assert_same(other.layout.to_canonical(again.restore(5)), canonical)
    assert not again.average_news
    expected = first.layout.with_trained(canonical.params, canonical.average)
    params, _ = restore_params(other, tmp_path, "latest")
    assert_same(other.layout.canonical_weights(params), expected)
    assert "--weights trained" in capsys.readouterr().err
    assert_same(
        other.layout.canonical_weights(average_weights(other)(again.restore(5).params, again.restore(5).average)),
        expected,
    )
    if not lora.rank:
        read, _ = weights_in_parts(first.layout, tmp_path, "latest")
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(expected), strict=True)
        assert_same(read(list(paths)), list(leaves))
    without = program((2, 1, 1), zero=3, ema=0.0, **options)
    params, _ = restore_params(without, tmp_path, "latest")
    assert_same(without.layout.canonical_weights(params), canonical.params)


@pytest.mark.full
def test_it_begins_and_ends_where_a_run_goes_on(tmp_path: Path) -> None:
    options = {"num_layers": 3, **LLAMA}
    without, made = program((1, 2, 1), ema=0.0, **options), program((2, 1, 1), **options)
    state = filled(without)
    writer = Checkpoints(tmp_path, without.layout, keep=3)
    writer.save(1, state)
    writer.wait()
    resumed = Checkpoints(tmp_path, made.layout, keep=3)  # which removes what is half written
    begun = resumed.restore(1)
    assert resumed.average_news == "the weight average (--train.ema) starts from the weights of step 1"
    assert_same(made.layout.to_canonical(begun).average, without.layout.to_canonical(state).params)
    resumed.save(2, begun)
    resumed.wait()
    ended = Checkpoints(tmp_path, without.layout)
    assert_same(without.layout.to_canonical(ended.restore(2)), without.layout.to_canonical(state))
    assert ended.average_news == "the weight average is dropped after step 2 (--train.ema 0)"
