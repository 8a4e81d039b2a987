"""Products of rows in blocks with the weights of their groups, and the gradients of these weights, for Hopper GPUs.

As many thread blocks as the GPU has multiprocessors compute tiles in turn. One warpgroup loads the factors of one step
after another, and of the next tile while two others still multiply this one's; these have half of a tile's rows each.

Letters: E groups, I what goes into a product, O what comes out, R rows of all blocks, M blocks.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.core.kernels.tiles import GROUPS, ROWS, tile
from megajax.core.private import kernels_are_interpreted

BLOCK = GROUPS * ROWS  # rows of a block, and of a tile
_LINE = 128  # bytes: of each row, a step multiplies as many, and as many are stored at once
_STAGES = 4  # steps whose factors are in shared memory
_WIDTHS = (256, 192, 128)  # columns of a tile, of which the first that divides is taken
_PROCESSORS = 132  # of an H100 and an H200
_LOADING, _MULTIPLYING = 40, 232  # registers of a thread


class TileWork(NamedTuple):
    """What a kernel computes: tiles, each the sum of products over a number of steps."""

    tiles: tuple[int, ...]  # how many there are along each dim
    steps: Callable[..., Array]  # of a tile
    left: Callable[..., Any]  # the place of a step's left factor, [rows, depth]
    right: Callable[..., Any]  # and of its right factor, [depth, columns]
    out: Callable[..., Any]  # the place of a tile's rows of one warpgroup, from the tile and the warpgroup
    left_turned: bool = False  # the left factor is stored as [depth, rows]
    right_turned: bool = False  # the right factor is stored as [columns, depth]


def grouped_product(
    rows_RI: Array, weight_EIO: Array, group_M: Array, used: Array, dtype: Any, *, turned: bool = False
) -> Array:
    """Each block's rows times the weight of its group, in `dtype`; zeros for blocks from `used` on. `turned`: by the
    transposed weights, [R, I] from [R, O], as float8 numbers must be multiplied."""
    inputs, columns = weight_EIO.shape[1:][:: -1 if turned else 1]
    wide, depth = _width(columns), _depth(rows_RI)

    def work(group_g: Any, used_g: Any) -> TileWork:
        def right(tile: Any, step: Array) -> Any:
            block, column = tile
            inner, outer = pl.ds(step * depth, depth), pl.ds(column * wide, wide)
            return (group_g[block], outer, inner) if turned else (group_g[block], inner, outer)

        return TileWork(
            tiles=(rows_RI.shape[0] // BLOCK, columns // wide),
            steps=lambda tile: jnp.where(tile[0] < used_g[0], inputs // depth, 0),
            left=lambda tile, step: (pl.ds(tile[0] * BLOCK, BLOCK), pl.ds(step * depth, depth)),
            right=right,
            out=lambda tile, worker: (pl.ds(tile[0] * BLOCK + worker * ROWS, ROWS), pl.ds(tile[1] * wide, wide)),
            right_turned=turned,
        )

    out = jax.ShapeDtypeStruct((rows_RI.shape[0], columns), dtype)
    return _multiply(work, [group_M, used.reshape(1)], rows_RI, weight_EIO, out, wide)


def weight_gradient(rows_RI: Array, grad_RO: Array, starts_E: Array, ends_E: Array, dtype: Any) -> Array:
    """The sum over a group's blocks, from `starts` to before `ends`, of rows times gradients, [E, I, O], summed in
    fp32."""
    groups, inputs, outputs = starts_E.shape[0], rows_RI.shape[1], grad_RO.shape[1]
    wide, depth = _width(outputs), _depth(rows_RI)

    def work(starts_g: Any, ends_g: Any) -> TileWork:
        def rows(tile: Any, step: Array) -> Any:
            return pl.ds(starts_g[tile[0]] * BLOCK + step * depth, depth)

        return TileWork(
            tiles=(groups, inputs // BLOCK, outputs // wide),
            steps=lambda tile: (ends_g[tile[0]] - starts_g[tile[0]]) * (BLOCK // depth),
            left=lambda tile, step: (rows(tile, step), pl.ds(tile[1] * BLOCK, BLOCK)),
            right=lambda tile, step: (rows(tile, step), pl.ds(tile[2] * wide, wide)),
            out=lambda tile, worker: (
                *(tile[0], pl.ds(tile[1] * BLOCK + worker * ROWS, ROWS)),
                pl.ds(tile[2] * wide, wide),
            ),
            left_turned=True,
        )

    out = jax.ShapeDtypeStruct((groups, inputs, outputs), dtype)
    return _multiply(work, [starts_E, ends_E], rows_RI, grad_RO, out, wide)


def _width(columns: int) -> int:
    return next(width for width in _WIDTHS if columns % width == 0)


def _depth(rows: Array) -> int:
    return _LINE // rows.dtype.itemsize


def _multiply(
    work_of: Callable[..., TileWork],
    known: list[Array],
    left: Array,
    right: Array,
    out: jax.ShapeDtypeStruct,
    wide: int,
) -> Array:
    form = work_of(*known)  # its functions are not called
    depth, kind = _depth(left), dict[str, Any](dtype=left.dtype, swizzle=_LINE)

    def kernel(*refs: Any, slots: _Slots, out_s: Any) -> None:
        *known_g, left_g, right_g, out_g = refs
        work, worker = work_of(*known_g), lax.axis_index("worker")
        pl.when(worker == GROUPS)(lambda: _load(work, left_g, right_g, slots))
        pl.when(worker < GROUPS)(lambda: _compute(work, worker, wide, slots, out_g, out_s))

    slots = _Slots(
        left=tile(_STAGES, *((depth, BLOCK) if form.left_turned else (BLOCK, depth)), **kind),
        right=tile(_STAGES, *((wide, depth) if form.right_turned else (depth, wide)), **kind),
        filled=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        emptied=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=_STAGES),
    )
    out_s = tile(GROUPS, 2, ROWS, _LINE // out.dtype.itemsize, dtype=out.dtype, swizzle=_LINE)
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(_processors(),),
        grid_names=("processor",),
        num_threads=GROUPS + 1,
        thread_name="worker",
        scratch_types={"slots": slots, "out_s": out_s},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*known, left, right)


class _Slots(NamedTuple):
    """The factors of a few steps in shared memory."""

    left: Any
    right: Any
    filled: Any  # a barrier for each
    emptied: Any


def _processors() -> int:
    return 1 if kernels_are_interpreted() else _PROCESSORS  # the interpreter takes as long for each


def _for_tiles(work: TileWork, one: Callable[[Any, Array, Array], None]) -> None:
    """`one(tile, its steps, steps before it)` for every tile of this thread block."""
    first, processors = lax.axis_index("processor"), _processors()

    def turn(number: Array, before: Array) -> Array:
        tile = _tile_indices(first + number * processors, work.tiles)
        steps = work.steps(tile)
        one(tile, steps, before)
        return before + steps

    own = lax.div(prod(work.tiles) - first + (processors - 1), processors)
    lax.fori_loop(0, own, turn, jnp.int32(0))


def _load(work: TileWork, left_g: Any, right_g: Any, slots: _Slots) -> None:
    """Load the factors of all steps, each as soon as a slot is empty."""
    _use_registers(_LOADING, "decrease")

    def load(tile: Any, steps: Array, before: Array) -> None:
        def step(index: Array, _: None) -> None:
            slot = lax.rem(before + index, _STAGES)
            pl.when(before + index >= _STAGES)(lambda: plgpu.barrier_wait(slots.emptied.at[slot]))
            plgpu.copy_gmem_to_smem(left_g.at[work.left(tile, index)], slots.left.at[slot], slots.filled.at[slot])
            plgpu.copy_gmem_to_smem(right_g.at[work.right(tile, index)], slots.right.at[slot], slots.filled.at[slot])

        lax.fori_loop(0, steps, step, None)

    _for_tiles(work, load)


def _compute(work: TileWork, worker: Array, wide: int, slots: _Slots, out_g: Any, out_s: Any) -> None:
    """Multiply this warpgroup's rows of all tiles, and store them in pieces, of which one is on its way while the next
    one is written."""
    _use_registers(_MULTIPLYING, "increase")
    rows, piece = pl.ds(worker * ROWS, ROWS), out_s.shape[-1]

    def factors(slot: Array) -> tuple[Any, Any]:
        left_s = slots.left.at[slot, :, rows].transpose((1, 0)) if work.left_turned else slots.left.at[slot, rows]
        return left_s, slots.right.at[slot].transpose((1, 0)) if work.right_turned else slots.right.at[slot]

    def compute(tile: Any, steps: Array, before: Array) -> None:
        def empty(index: Array) -> None:
            plgpu.barrier_arrive(slots.emptied.at[lax.rem(before + index, _STAGES)])

        def products(total: Any) -> Array:
            def step(index: Array, _: None) -> None:
                slot = lax.rem(before + index, _STAGES)
                plgpu.barrier_wait(slots.filled.at[slot])
                plgpu.wgmma(total, *factors(slot))
                plgpu.wgmma_wait(1)  # for the step before
                pl.when(index > 0)(lambda: empty(index - 1))

            lax.fori_loop(0, steps, step, None)
            plgpu.wgmma_wait(0)
            pl.when(steps > 0)(lambda: empty(steps - 1))
            return total[...]

        total = pl.run_scoped(products, plgpu.ACC((ROWS, wide), jnp.float32))
        tile_g = out_g.at[work.out(tile, worker)]
        for index in range(wide // piece):
            columns, slot = slice(index * piece, (index + 1) * piece), index % 2
            plgpu.wait_smem_to_gmem(min(index, 1), wait_read_only=True)  # of an odd number the last one has slot 0, too
            out_s[worker, slot] = total[:, columns].astype(out_s.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[worker, slot], tile_g.at[:, columns])

    _for_tiles(work, compute)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _use_registers(registers: int, action: Any) -> None:
    """As many for each thread of this warpgroup; ptxas of CUDA 13 ignores it (C7504), to no harm."""
    if not kernels_are_interpreted():
        plgpu.set_max_registers(registers, action=action)


def _tile_indices(tile: Array, sizes: tuple[int, ...]) -> tuple[Array, ...]:
    """The indices of a tile; the last ones change fastest."""
    indices: list[Array] = []
    for size in reversed(sizes):
        indices.insert(0, lax.rem(tile, size))
        tile = lax.div(tile, size)
    return tuple(indices)
