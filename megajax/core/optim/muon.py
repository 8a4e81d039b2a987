"""Muon (Jordan et al., https://kellerjordan.github.io/posts/muon): matrices are updated with their orthogonalized
momentum, all other weights with AdamW. The update is the same on every mesh.

A step needs whole matrices, but `tensor` and ZeRO shard them over devices. So the matrices are dealt out: one
all-to-all turns shards of n matrices on g devices into n / g whole matrices on each, which are orthogonalized in one
batch; a second all-to-all returns the shards. If devices hold copies, each orthogonalizes a share, and the results are
gathered. Momentum and gradients are sharded like AdamW's moments. If several mesh axes shard rows or columns, they may
be reordered in the reassembled matrix, which is harmless: orthogonalizing commutes with permutations.

Letters: N matrices, R rows, C columns.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from megajax.core.axes import MESH_AXES
from megajax.core.mesh import matrix_dims
from megajax.core.optim.adam import choose, scale_by_adam
from megajax.core.optim.config import OptimizerConfig
from megajax.core.parallel.collectives import axis_size, entry_axes, exchange, gather_shards, own_shard, spec_axes
from megajax.core.parallel.fixed_tree import pairwise
from megajax.core.parallel.shards import NOT_SHARDED, Sharding
from megajax.core.trees import Path, Tree

COEFFICIENTS = 3.4445, -4.775, 2.0315  # a, b, c of an iteration, X <- (a + b A + c A A) X with A = X X'


@dataclass(frozen=True)
class Matrices:
    """The matrices in a weight, `[…, *rows, *columns]`, and how a mesh shards them.

    Attributes:
        rows, columns: how many of the weight's last dims are rows and columns, as ZeRO shards it; 0 and 1 if it joins
            both to one dim.
        num_rows, num_columns: of a matrix, without the zeros of ZeRO's padding, which change no update.
        row_axes, column_axes: mesh axes that shard them.
        copied_over: mesh axes over which they are replicated.
    """

    rows: int
    columns: int
    num_rows: int
    num_columns: int
    row_axes: tuple[str, ...]
    column_axes: tuple[str, ...]
    copied_over: tuple[str, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], logical: PartitionSpec, spec: PartitionSpec, zero: Sharding = NOT_SHARDED
    ) -> "Matrices | None":
        """The matrices of a weight with these sizes and names of its dims, that ZeRO shards so, and with this spec when
        stacked; None if it has none."""
        dims = matrix_dims(logical)
        if dims is None:
            return None
        rows, columns = dims

        def axes(entries: tuple) -> tuple[str, ...]:
            return tuple(axis for entry in entries for axis in entry_axes(entry))

        num_rows, num_columns = math.prod(shape[-rows - columns : -columns]), math.prod(shape[-columns:])
        if zero.joined and zero.dim > -columns:
            columns -= 1
        elif zero.joined:
            rows -= 1
        sides = slice(-rows - columns, -columns), slice(-columns, None)
        copied_over = tuple(axis for axis in MESH_AXES if axis not in spec_axes(spec))
        row_axes, column_axes = (axes(spec[side]) for side in sides)
        return cls(rows, columns, num_rows, num_columns, row_axes, column_axes, copied_over)


def joinable_dims(logical: PartitionSpec) -> Sequence[int]:
    """Which dims of a weight with these names ZeRO may join to the next: those of one side of its matrices, and both
    sides that are one dim each."""
    ndim, sides = len(logical), matrix_dims(logical)
    if sides is None:
        return range(ndim)
    last_row = ndim - sides[1] - 1
    return [dim for dim in range(ndim - sum(sides), ndim) if dim != last_row or sides == (1, 1)]


@dataclass(frozen=True, order=True)
class _Deal:
    """How matrices of the same shape are dealt out and returned. Matrices are wide: no more rows than columns.

    Attributes:
        num_rows, num_columns: of a whole matrix, with padding.
        row_axes, column_axes, copied_over: see `Matrices`.
        joined: rows and columns of a matrix that shards hold as one row.
    """

    num_rows: int
    num_columns: int
    row_axes: tuple[str, ...]
    column_axes: tuple[str, ...]
    copied_over: tuple[str, ...]
    joined: tuple[int, ...] = ()

    @property
    def transposed(self) -> "_Deal":
        return _Deal(self.num_columns, self.num_rows, self.column_axes, self.row_axes, self.copied_over)

    @property
    def devices(self) -> int:
        """Number of devices that share the work."""
        return self._owners * axis_size(self.copied_over)

    @property
    def _owners(self) -> int:
        """Number of devices that hold one matrix together."""
        return axis_size(self.row_axes) * axis_size(self.column_axes)

    @property
    def _is_wide(self) -> bool:
        """Whether joined matrices are."""
        return self.joined[0] <= self.joined[1]

    def whole(self, x_NRC: Array) -> Array:
        """This device's share of whole matrices, from its shards of all, whose number `devices` must divide."""
        x_NRC = own_shard(x_NRC, 0, self.copied_over) if axis_size(self.copied_over) > 1 else x_NRC
        if self._owners == 1:
            return x_NRC
        _, rows, columns = x_NRC.shape
        x_NRC = self._exchanged(x_NRC)
        x = x_NRC.reshape(axis_size(self.row_axes), axis_size(self.column_axes), -1, rows, columns)
        x_NRC = x.transpose(2, 0, 3, 1, 4).reshape(-1, self.num_rows, self.num_columns)
        if not self.joined:
            return x_NRC
        x_NRC = x_NRC[:, 0, : math.prod(self.joined)].reshape(-1, *self.joined)
        return x_NRC if self._is_wide else x_NRC.mT

    def shards(self, x_NRC: Array) -> Array:
        """The inverse of `whole`."""
        if self.joined:
            x_NRC = (x_NRC if self._is_wide else x_NRC.mT).reshape(len(x_NRC), 1, -1)
            x_NRC = jnp.pad(x_NRC, ((0, 0), (0, 0), (0, self.num_columns - x_NRC.shape[2])))
        if self._owners > 1:
            row_parts, column_parts = axis_size(self.row_axes), axis_size(self.column_axes)
            rows, columns = self.num_rows // row_parts, self.num_columns // column_parts
            x = x_NRC.reshape(-1, row_parts, rows, column_parts, columns).transpose(1, 3, 0, 2, 4)
            x_NRC = self._exchanged(x.reshape(-1, rows, columns))
        copies = axis_size(self.copied_over)
        return gather_shards(x_NRC, 0, self.copied_over, invariant=True) if copies > 1 else x_NRC

    def _exchanged(self, x_NRC: Array) -> Array:
        """Exchange parts of the first dim among the devices that hold matrices together."""
        # Without the barrier XLA may give transposed parts another layout, which it then rejects itself.
        return exchange(lax.optimization_barrier(x_NRC), 0, 0, (*self.row_axes, *self.column_axes))


class MuonState(NamedTuple):
    """Muon's state."""

    momentum: Tree  # of the matrices, in the structure of the weights
    adam: optax.ScaleByAdamState  # of all other weights


def scale_by_muon(
    config: OptimizerConfig, matrices: Mapping[Path, Matrices], dtype: DTypeLike, *, same_bits: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Updates by Muon for the weights at the paths of `matrices`, by AdamW for the others, before weight decay and
    learning rate. Like `scale_by_adam`, the state does not change if a step is not `taken`. Products are in `dtype`.
    `same_bits`: however matrices are dealt out."""
    adam, beta = scale_by_adam(config), config.muon_momentum

    def parts(tree: Tree) -> tuple[Tree, Tree]:
        flat = flatten_dict(tree)
        mine = {path: leaf for path, leaf in flat.items() if path in matrices}
        return unflatten_dict(mine), unflatten_dict({path: flat[path] for path in flat if path not in mine})

    def init(params: Tree) -> MuonState:
        mine, others = parts(params)
        return MuonState(jax.tree.map(jnp.zeros_like, mine), adam.init(others))

    def advance(grads: Tree, state: MuonState, params: Tree = None, *, taken: Array | bool) -> tuple[Tree, MuonState]:
        mine, others = parts(grads)
        steps, adams = adam.update(others, state.adam, taken=taken)
        momentum = choose(taken, optax.tree.update_moment(mine, state.momentum, beta, 1), state.momentum)
        momentum = jax.tree.map(lax.optimization_barrier, momentum)  # see `scale_by_adam`
        count = state.adam.count + 1
        ahead = optax.tree.bias_correction(momentum, beta, count + 1)
        now = optax.tree.bias_correction(mine, beta, count)
        nesterov = jax.tree.map(lambda mean, grad: beta * mean + (1 - beta) * grad, ahead, now)
        updates = orthogonal_updates(flatten_dict(nesterov), matrices, config, dtype, same_bits=same_bits)
        return unflatten_dict(flatten_dict(steps) | updates), MuonState(momentum, adams)

    return optax.GradientTransformationExtraArgs(init, advance)


@jax.named_scope("muon")
def orthogonal_updates(
    momenta: Mapping[Path, Array],
    matrices: Mapping[Path, Matrices],
    config: OptimizerConfig,
    dtype: DTypeLike,
    *,
    same_bits: bool = False,
) -> dict[Path, Array]:
    """The updates of matrix weights from their momenta; both are this device's shards."""
    dealt: dict[_Deal, dict[Path, Array]] = defaultdict(dict)
    scales: dict[Path, float] = {}
    is_wide: dict[Path, bool] = {}
    for path, x in momenta.items():
        matrix = matrices[path]
        sides = x.shape[-matrix.rows - matrix.columns :]
        x_NRC = x.reshape(-1, math.prod(sides[: matrix.rows]), math.prod(sides[matrix.rows :]))
        rows, columns = x_NRC.shape[1] * axis_size(matrix.row_axes), x_NRC.shape[2] * axis_size(matrix.column_axes)
        joined = () if matrix.rows else (matrix.num_rows, matrix.num_columns)
        deal = _Deal(rows, columns, matrix.row_axes, matrix.column_axes, matrix.copied_over, joined)
        scales[path], is_wide[path] = _scale(matrix.num_rows, matrix.num_columns, config), deal <= deal.transposed
        dealt[min(deal, deal.transposed)][path] = x_NRC if is_wide[path] else x_NRC.mT
    updates = {}
    for deal, parts in dealt.items():
        stacked = jnp.concatenate([*parts.values()])
        filled = jnp.pad(stacked, ((0, -len(stacked) % deal.devices), (0, 0), (0, 0)))
        shards = deal.shards(orthogonalized(deal.whole(filled), config, dtype, same_bits=same_bits))
        ends = list(itertools.accumulate(map(len, parts.values())))
        for path, x_NRC in zip(parts, jnp.split(shards, ends)[:-1], strict=True):
            x_NRC = x_NRC if is_wide[path] else x_NRC.mT
            updates[path] = scales[path] * x_NRC.reshape(momenta[path].shape).astype(momenta[path].dtype)
    return updates


def orthogonalized(x_NRC: Array, config: OptimizerConfig, dtype: DTypeLike, *, same_bits: bool = False) -> Array:
    """Approximately U V' for every matrix U S V', by Newton-Schulz iterations in `dtype`; a matrix may not have more
    rows than columns."""
    squares_NRC = jnp.square(x_NRC)
    # XLA adds in another order where matrices have come by an exchange, or are transposed: it lays them out otherwise.
    total_N = pairwise(squares_NRC.reshape(len(x_NRC), -1).T) if same_bits else jnp.sum(squares_NRC, (1, 2))
    norm_N11 = jnp.sqrt(total_N)[:, None, None]
    x_NRC = (x_NRC / (norm_N11 + config.epsilon)).astype(dtype)
    a, b, c = (jnp.asarray(value, dtype) for value in COEFFICIENTS)
    # GPUs may use fewer bits for fp32 products (TF32), unless fp32 was requested for these iterations.
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST if config.muon_precision == "fp32" else None)
    for _ in range(config.muon_steps):
        a_NRR = product(x_NRC, x_NRC.mT)
        x_NRC = a * x_NRC + product(b * a_NRR + c * product(a_NRR, a_NRR), x_NRC)
    return x_NRC


def _scale(inputs: int, outputs: int, config: OptimizerConfig) -> float:
    if config.muon_scale == "spectral":
        return math.sqrt(max(1.0, outputs / inputs))
    return 0.2 * math.sqrt(max(inputs, outputs))
