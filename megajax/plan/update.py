"""What an optimizer keeps; and what a device computes and sends for Muon's update of layer matrices, by arithmetic on
shapes (`core/optim/muon.py`)."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import jax

from megajax.core.backend import CPU
from megajax.core.config import MeshConfig
from megajax.core.optim.own import own_optimizer
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.program.memory import kept_bytes, whole_bytes
from megajax.core.program.program import Program
from megajax.core.program.weight import Shape, Weight
from megajax.plan.sizes import Sizes
from megajax.settings.config import Config

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Dealt:
    """Matrices on a stage that are orthogonalized together.

    Attributes:
        rows, columns: of one matrix, with no more rows than columns.
        shard: shape of a device's shard of each.
        owners: mesh axes of the devices that hold a matrix together.
        copied_over: mesh axes over which matrices are replicated.
        filled: number of matrices, including zero ones that make all shares equal.
        devices, num_owners: devices that share the work, and those that hold a matrix together.
    """

    rows: int
    columns: int
    shard: Shape
    owners: Axes
    copied_over: Axes
    filled: int
    devices: int
    num_owners: int

    @property
    def share(self) -> int:
        """Matrices per device."""
        return self.filled // self.devices

    @property
    def operand(self) -> Shape:
        """Shape of what a device exchanges in either direction, and of what it gathers if there are copies."""
        return (self.share * self.num_owners, *self.shard)

    def flops(self, steps: int) -> int:
        """FLOPs of a device's share."""
        return steps * self.share * 2 * self.rows**2 * (2 * self.columns + self.rows)


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer's state for each number that a device trains, and of the rest, which every device has; and
    of the whole gradients, weights and updates that some of the user's need."""

    each: int
    rest: int
    whole: int = 0


def optimizer_bytes(sizes: Sizes) -> OptimizerBytes:
    """Of the optimizer, or of AdamW in place of Muon."""
    config = sizes.config
    if own_optimizer(config.optimizer, config.own_optimizer) is None:
        return OptimizerBytes(2 * sizes.wide, rest=2 * 4)  # two moments, two counters
    train = replace(config.train, global_batch=1, microbatch=1, remat="none", ramp_start=0)
    alone = replace(config, mesh=MeshConfig(), pipeline=PipelineConfig(), train=train, sequence_parallel=False)
    return _of_own(replace(alone, optimizer=replace(config.optimizer, zero=0, zero_ranks=0)))


@lru_cache(maxsize=64)
def _of_own(alone: Config) -> OptimizerBytes:
    layout = Program.abstract(alone, CPU).layout
    kept, whole = kept_bytes(layout)["moments"], sum(whole_bytes(layout).values())
    numbers = sum(weight.size(weight.owned) for weight in jax.tree.leaves(layout.trained(layout.weights)))
    return OptimizerBytes(0, kept, whole) if whole else OptimizerBytes(*divmod(kept, numbers))


def matrices_of(sizes: Sizes) -> list[Weight]:
    """The weights that Muon updates."""
    trained = sizes.held.trained if sizes.config.optimizer.name == "muon" else ()
    return [weight for weight in trained if weight.matrices]


def dealt(sizes: Sizes) -> list[Dealt]:
    """All matrices that Muon updates, grouped by shape and sharding."""
    mesh, found = sizes.config.mesh, Counter[tuple]()
    for weight in matrices_of(sizes):
        of, local = weight.matrices, weight.stage_shape(weight.owned)
        assert of is not None
        sides = slice(-of.rows - of.columns, -of.columns), slice(-of.columns, None)
        axes = of.row_axes, of.column_axes
        whole = weight.owned.padded_shape(weight.shape)
        numbers, shard = (tuple(prod(dims[side]) for side in sides) for dims in (whole, local))
        kind = min((numbers, axes, shard), (numbers[::-1], axes[::-1], shard[::-1]))
        found[*kind, mesh.there(of.copied_over)] += prod(local[: -of.rows - of.columns])

    def alike(kind: tuple, number: int) -> Dealt:
        (rows, columns), axes, shard, copied = kind
        owners = sum(axes, ())
        devices = mesh.size_of(owners + copied)
        filled = -(-number // devices) * devices
        return Dealt(rows, columns, shard, owners, copied, filled, devices, mesh.size_of(owners))

    return [alike(kind, number) for kind, number in found.items()]
