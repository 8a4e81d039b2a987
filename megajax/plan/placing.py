"""How many layers every stage holds so that a step is shortest: `--pipeline.layers auto`.

The last virtual stage also computes the head, so it gets fewer layers. The embedding costs much less than a layer: all
others get equally many, and what is left over goes to those that come first, as in an even placement.
"""

from dataclasses import replace

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
    even = Placement(config.model.num_blocks, config.mesh.pipe, config.pipeline.chunks)
    splits = dict.fromkeys([_numbers(even), *_splits(even.num_layers, even.num_virtual)])
    possible = [replace(config, pipeline=_with_layers(config.pipeline, each)) for each in splits]
    backend = backend_of(machine)
    cost = step_cost(possible[0], backend)

    def key(each: Config) -> tuple[int, float]:
        needed = memory(each, backend, cost).total
        return max(needed, machine.usable), StepModel(each, machine, cost).time(each.pipeline).seconds

    return min(possible, key=key)


def fewer_beside_the_head(model: StepModel, pipeline: PipelineConfig) -> list[PipelineConfig]:
    """Placements in which the busiest stage has less to do than in an even one: the best that needs no more slots, and
    one that needs more if that is better."""
    pipe, chunks = model.config.mesh.pipe, pipeline.chunks

    def key(counts: tuple[int, ...]) -> tuple[float, float, int]:
        work = np.asarray(counts, float).reshape(chunks, pipe)
        work[-1, -1] += model.head_in_layers
        return float(work.sum(0).max()), float(work.max()), -counts[-1]

    even = Placement(model.config.model.num_blocks, pipe, chunks)
    splits = _splits(even.num_layers, even.num_virtual)
    same = [each for each in splits if max(each) <= even.layers_per_chunk]
    best = key(_numbers(even))
    found = []
    for among in filter(None, (same, splits)):
        fastest = min(among, key=key)
        if key(fastest)[0] < best[0]:
            best = key(fastest)
            found.append(_with_layers(pipeline, fastest))
    return found


def _numbers(placement: Placement) -> tuple[int, ...]:
    return tuple(placement.counts.ravel().tolist())


def _with_layers(pipeline: PipelineConfig, numbers: tuple[int, ...]) -> PipelineConfig:
    return replace(pipeline, layers=",".join(map(str, numbers)))


def _splits(num_layers: int, number: int) -> list[tuple[int, ...]]:
    """Layers of every virtual stage, with every number on the last that is at most its share."""
    if number == 1:
        return [(num_layers,)]
    found = []
    for last in range(-(-num_layers // number) + 1):
        base, extra = divmod(num_layers - last, number - 1)
        found.append((*(base + (k < extra) for k in range(number - 1)), last))
    return found
