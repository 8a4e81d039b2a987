"""How many layers every stage holds so that a step is shortest: `--pipeline.layers auto`.

The first virtual stage also computes the embedding and the last one the head, so they get fewer layers. All others get
equally many; what is left over goes to those that come first, as in an even placement.
"""

from collections.abc import Iterator
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
    even, backend = replace(config, pipeline=replace(config.pipeline, layers="even")), backend_of(machine)
    cost = step_cost(even, backend)
    model = StepModel(even, machine, cost)
    possible = [replace(config, pipeline=each) for each in placements(model, even.pipeline)]
    seconds = {each: StepModel(each, machine, cost).time(each.pipeline).seconds for each in possible}
    needed = {each: memory(each, backend, cost).total for each in possible}
    return min(possible, key=lambda each: (max(needed[each], machine.usable), seconds[each]))


def placements(model: StepModel, pipeline: PipelineConfig) -> list[PipelineConfig]:
    """The pipeline with the numbers of layers that may be best, the even ones first."""
    pipe, num_layers = model.config.mesh.pipe, model.config.model.num_blocks
    even = Placement(num_layers, pipe, pipeline.chunks)
    found = {tuple(even.counts.ravel().tolist()), *_splits(num_layers, even.num_virtual, model.ends_in_layers)}
    return [replace(pipeline, layers=",".join(map(str, counts))) for counts in found]


def fewer_at_the_ends(model: StepModel, pipeline: PipelineConfig) -> list[PipelineConfig]:
    """Of these placements the best by the work of the busiest stage: the one that needs as few slots as an even one,
    and the one that may need more; none that is not better than an even one."""
    pipe, chunks = model.config.mesh.pipe, pipeline.chunks
    first, last = model.ends_in_layers

    def key(counts: tuple[int, ...]) -> tuple[float, float, int]:
        work = np.asarray(counts, float).reshape(chunks, pipe)
        work[0, 0] += first
        work[-1, -1] += last
        return float(work.sum(0).max()), float(work.max()), -counts[-1]

    even = Placement(model.config.model.num_blocks, pipe, chunks)
    splits = list(_splits(even.num_layers, even.num_virtual, (first, last)))
    same = [each for each in splits if max(each) <= even.layers_per_chunk]
    best = key(tuple(even.counts.ravel().tolist()))
    found = []
    for among in filter(None, (same, splits)):
        fastest = min(among, key=key)
        if key(fastest)[0] < best[0]:
            best = key(fastest)
            found.append(replace(pipeline, layers=",".join(map(str, fastest))))
    return found


def _splits(num_layers: int, number: int, ends: tuple[float, float]) -> Iterator[tuple[int, ...]]:
    """Layers of every virtual stage, with every number on the last that is at most its share. If the embedding costs
    layers (as with `model.dense_layers`), the first has as many fewer."""
    share = -(-num_layers // number)
    firsts = {share, max(0, share - round(ends[0]))} if number > 2 else set()
    for last in range(share + 1) if number > 1 else ():
        yield (*_evenly(num_layers - last, number - 1), last)
        for first in firsts - {share}:
            yield (first, *_evenly(num_layers - first - last, number - 2), last)


def _evenly(num_layers: int, number: int) -> tuple[int, ...]:
    base, extra = divmod(num_layers, number)
    return tuple(base + (k < extra) for k in range(number))
