"""Gradients summed over devices into their owners' shards, and weights gathered from these: in the order in which XLA
overlaps the collectives with the passes that need or make them, or all at once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec

from megajax.core.axes import MESH_AXES
from megajax.core.models.staged import of_kind
from megajax.core.parallel.collectives import PIPE, axis_size, complete, gather_shards, spec_axes, varying_axes
from megajax.core.parallel.shards import NOT_SHARDED, Shards
from megajax.core.parallel.sites import checked
from megajax.core.pipeline.sums import Gradients, one_layer
from megajax.core.private import tied
from megajax.core.program.program import Program
from megajax.core.trees import Path, Tree

Arrays = dict[Path, Array]  # weights or gradients
_LARGE = 2**20  # elements that are exchanged by themselves


@dataclass(frozen=True)
class GradientReduction:
    """See `pipeline.sums.Reduction`."""

    program: Program

    def everywhere(self, gradients: Gradients, *but: str) -> Gradients:
        """Global sums of local ones; not over some axes."""
        shards = _shards(self.program.layout.per_step, gradients)
        return self.over_stages(shards.scatter(gradients), *but)

    def on_stage(self, gradients: Gradients) -> Gradients:
        """Sums over all axes but `pipe`, in turn."""
        if not gradients:
            return {}
        return _in_turn(self.program, gradients, lambda some: self.everywhere(some, PIPE), {})[0]

    def over_stages(self, gradients: Gradients, *but: str) -> Gradients:
        """Sums of shards over all axes over which they vary but some; while recording, every one is checked."""
        trained = flatten_dict(self.program.layout.trained_specs)
        specs = {path: PartitionSpec(*trained.get(path, ()), *but) for path in gradients}
        names = jax.tree.map(_name, gradients, specs)
        return checked(complete(gradients, specs), partial(jax.tree.map, _summed_by_gather, gradients, specs), names)


def gathered_in_turn(program: Program, shared: Tree, blocks: Tree) -> tuple[Tree, Tree]:
    """The weights of the ends, and a tuple of those of every layer (by kind, if there are several), from the ends' and
    the stacked layers' as a step leaves them: in turn those of the layers, then those of the head."""
    late, before, kinds, periods = program.layout.at_start, Arrays(), program.layout.stacks, program.layout.placement
    gather, layers = partial(_gathered, late), {kind: tuple[Tree, ...]() for kind in kinds}
    stacks, ends = flatten_dict({"blocks": blocks}), flatten_dict({"shared": shared})
    for period, kind in product(range(periods.num_chunks * periods.layers_per_chunk), kinds):
        own, run = {path: x for path, x in stacks.items() if not kind or path[1] == kind}, kinds[kind].run
        for place in range(period * run, (period + 1) * run):
            gathered, before = _in_turn(program, one_layer(own, place), gather, before)
            layers[kind] += (of_kind(unflatten_dict(gathered)["blocks"], kind),)
    shardings = flatten_dict(late.shardings)
    of_head = {path: shard for path, shard in ends.items() if shardings[path] != NOT_SHARDED}
    return unflatten_dict(ends | _in_turn(program, of_head, gather, before)[0])["shared"], layers.get("", layers)


def _in_turn(
    program: Program, arrays: Arrays, function: Callable[[Arrays], Arrays], before: Arrays
) -> tuple[Arrays, Arrays]:
    """The results of a collective, one large weight after the other and `before`, those of another turn; and those of
    the last one. XLA believes that collectives under way together take as long as one, and so would begin all of them
    too late."""
    records, results = flatten_dict(program.layout.trained(program.layout.weights)), Arrays()
    large = [path for path in arrays if path in records and prod(records[path].whole) >= _LARGE]
    for paths in ([path for path in arrays if path not in large], *([path] for path in large)):
        part, before = tied(({path: arrays[path] for path in paths}, before))
        before = function(part)
        results |= before
    return results, before


def _shards(storage: Shards, arrays: Arrays) -> Shards:
    shardings = flatten_dict(storage.shardings)
    return Shards({path: shardings.get(path, NOT_SHARDED) for path in arrays})


def _gathered(storage: Shards, arrays: Arrays) -> Arrays:
    return _shards(storage, arrays).gather(arrays)


def _missing(gradient: Array, spec: PartitionSpec) -> tuple[str, ...]:
    """Axes over which a gradient is still to be summed."""
    return tuple(axis for axis in MESH_AXES if axis_size(axis) > 1 and axis in varying_axes(gradient) - spec_axes(spec))


def _summed_by_gather(gradient: Array, spec: PartitionSpec) -> Array:
    axes = _missing(gradient, spec)
    return gather_shards(gradient[None], 0, axes).sum(0) if axes else gradient


def _name(gradient: Array, spec: PartitionSpec) -> str:
    return f"all-reduce over {' and '.join(_missing(gradient, spec))} of the gradient of"
