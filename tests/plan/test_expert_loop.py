"""Dropless experts are priced as they run: as a loop over blocks of rows."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_config

from megajax.core.backend import GPU
from megajax.core.models.grouped import in_blocks
from megajax.plan.costs import Dims, Product
from megajax.plan.expert_loop import ExpertLoop
from megajax.plan.figures import figures, text
from megajax.plan.machines import MACHINES
from megajax.plan.time import step_time
from megajax.settings.presets import load_preset, resolve

H200 = MACHINES["h200"]


@pytest.mark.parametrize(("groups", "experts", "at_once"), [(1, 8, 1), (8, 2, 3)])
def test_the_turns_are_those_of_the_loop(groups: int, experts: int, at_once: int) -> None:
    """Of a device with so many experts, one of a group of so many; 512 rows of each choose at random."""
    backend = replace(GPU, expert_block=16, expert_bytes=at_once * 2 * 24 * 8)
    product = Product(Dims((0, 24, 16), (128, 0, 0)), experts=experts, weights=2)  # of [24, 8]
    loop = ExpertLoop.from_config(tiny_config(expert=groups), backend, product, 4, 2)
    chosen = np.random.default_rng(0).integers(experts * groups, size=512 * groups, dtype=np.int32)
    blocks, _ = in_blocks(np.where(chosen < experts, chosen, experts), experts, 16, at_once)
    assert blocks.group_MG.shape == (loop.rows // 16 // loop.blocks, loop.blocks)
    assert abs(loop.turns + int(-blocks.used // blocks.group_MG.shape[1])) <= 1


def olmoe(**options: object):
    """The two layers of docs/benchmarks/gpu.md."""
    measured = {"model.num_layers": 2, "train.microbatch": 2, "train.global_batch": 4, "train.remat": "none"}
    return resolve(load_preset("olmoe-1b-7b"), measured | options)


@pytest.mark.slow
def test_the_measured_steps_of_olmoe() -> None:
    """With a capacity, by kernels, these in 8 bits, and in the loop, of 64 blocks and of one, which is what
    --deterministic runs without kernels. A plan says which."""
    without = replace(H200, kernel=None)
    capacity, kernel, float8 = (
        step_time(olmoe(**options), H200) for options in ({"model.expert_capacity": 1.25}, {}, {"precision": "fp8"})
    )
    loop, one_block = (step_time(olmoe(deterministic=value), without) for value in (False, True))
    found = [each.seconds for each in (capacity, kernel, float8, loop, one_block)]
    assert found == pytest.approx([0.064, 0.064, 0.064, 0.174, 0.619], rel=0.06)
    assert (loop.expert_loop, kernel.expert_loop) == (ExpertLoop(9, 64, 128, 9 * 64 * 128), None)

    for gpu, said, other in ((H200, "is one kernel", "loop"), (without, "9 turns of 64 blocks of 128 rows", "kernel")):
        plan = text(figures("olmoe", olmoe(), gpu, None) | {"seconds": 1.0, "peak_bytes": 1}, olmoe())
        assert said in plan and other not in plan


def test_what_kernels_cannot_multiply_is_a_loop() -> None:
    """Widths that 128 does not divide, and fp32."""
    assert step_time(olmoe(**{"model.expert_size": 960}), H200).expert_loop
    assert step_time(olmoe(precision="fp32"), H200).expert_loop
