"""How many layers every stage holds so that a step is shortest: `--pipeline.layers auto`.

The last virtual stage also computes the head, so it gets fewer layers. The embedding costs much less than a layer: all
others get equally many, and what is left over goes to those that come first, as in an even placement. If layers are of
two kinds, what is placed are periods.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter

import numpy as np

from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.placement import Placement
from megajax.plan.machines import Machine
from megajax.plan.memory import backend_of, memory
from megajax.plan.time import StepModel
from megajax.plan.traced import step_cost
from megajax.settings.config import Config


def placed(config: Config, machine: Machine) -> Config:
    """A valid configuration with numbers in place of `--pipeline.layers auto`: those of the fastest step that fits in
    the machine's memory or, if none fits, that needs least."""
    if config.pipeline.layers != "auto":
        return config
    periods = config.model.layers_of_periods
    even = Placement(len(periods), config.mesh.pipe, config.pipeline.chunks)
    splits = dict.fromkeys([_numbers(even), *_splits(even.num_layers, even.num_virtual)])
    possible = [replace(config, pipeline=_with_layers(config.pipeline, periods, split)) for split in splits]
    backend = backend_of(machine)
    cost = step_cost(possible[0], backend)

    def key(candidate: Config) -> tuple[int, float]:
        needed = memory(candidate, backend, cost).total
        return max(needed, machine.usable), StepModel(candidate, machine, cost).time(candidate.pipeline).seconds

    return min(possible, key=key)


def fewer_beside_the_head(model: StepModel, pipeline: PipelineConfig) -> list[PipelineConfig]:
    """Placements in which the busiest stage has less to do than in an even one: the best that needs no more slots, and
    one that needs more if that is better."""
    periods = model.config.model.layers_of_periods
    return [
        _with_layers(pipeline, periods, split)
        for split in _fewer(len(periods), model.config.mesh.pipe, pipeline.chunks, model.head_in_layers)
    ]


@lru_cache(maxsize=4096)
def _fewer(num_layers: int, pipe: int, chunks: int, head: float) -> list[tuple[int, ...]]:
    """The layers of every virtual stage in these placements, if the head costs as much as so many layers."""
    even, splits = Placement(num_layers, pipe, chunks), _splits(num_layers, pipe * chunks)
    work = np.array([_numbers(even), *splits], float).reshape(-1, chunks, pipe)
    work[:, -1, -1] += head
    of_stage, of_chunk = work.sum(1).max(1).tolist(), work.max((1, 2)).tolist()
    keys = [(stage, chunk, -split[-1]) for stage, chunk, split in zip(of_stage[1:], of_chunk[1:], splits, strict=True)]
    best, placements = of_stage[0], []
    for most in (even.layers_per_chunk, num_layers):
        among = [key for key in zip(keys, splits, strict=True) if max(key[1]) <= most]
        if among and (fastest := min(among, key=itemgetter(0)))[0][0] < best:
            best = fastest[0][0]
            placements.append(fastest[1])
    return placements


def _numbers(placement: Placement) -> tuple[int, ...]:
    return tuple(placement.counts.ravel().tolist())


def _with_layers(pipeline: PipelineConfig, periods: Sequence[int], numbers: tuple[int, ...]) -> PipelineConfig:
    """With this many periods on every virtual stage."""
    of_stages = (periods[end - number : end] for number, end in zip(numbers, accumulate(numbers), strict=True))
    return replace(pipeline, layers=",".join(str(sum(layers)) for layers in of_stages))


def _splits(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Layers of every virtual stage, with every number on the last that is at most its share."""
    if num_stages == 1:
        return [(num_layers,)]
    splits = []
    for last in range(-(-num_layers // num_stages) + 1):
        base, extra = divmod(num_layers - last, num_stages - 1)
        splits.append((*(base + (k < extra) for k in range(num_stages - 1)), last))
    return splits
