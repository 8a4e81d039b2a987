"""Parts of the kernels, most of them for attention: tiles in shared memory, products by warpgroups, masks and dropout.

Two warpgroups compute 64 rows each. The next block is loaded while this one is multiplied (`Ring`).

Letters: R rows of a tile, which are queries, C its columns, which are keys, K head size.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.core.kernels.spans import BlockTurns
from megajax.core.parallel.random import RandomBits
from megajax.core.private import whole_reference

ROWS = 64  # of each warpgroup's products
GROUPS = 2  # warpgroups, which share the loaded blocks
STAGES = 2  # buffers for blocks: one is filled while another is multiplied
LAYOUT = plgpu.Layout.WGMMA
BY_ROW = LAYOUT.reduce(1)
LOG2_E = math.log2(math.e)


class Form(NamedTuple):
    """What is known about attention while compiling."""

    dtype: Any  # of queries, keys and values
    rate: float  # of dropout of the probabilities
    pieces: int  # of the queries, each with consecutive positions
    # The interpreter has no products with the left factor in registers, nor accumulators kept from one product to the
    # next. For it, factors go through shared memory and sums are added afterwards.
    interpreted: bool = False

    @property
    def keep_from(self) -> int:
        """The smallest random word for which a probability is kept, as in `Dropout.apply`."""
        return min(round(self.rate * 2**32), 2**32 - 1)


def swizzle_of(*widths: int) -> int:
    """The swizzle, in bytes, for tiles of these widths that are multiplied with one another."""
    return 128 if all(width % 64 == 0 for width in widths) else 64


def tile(*shape: int, dtype: Any, swizzle: int) -> Any:
    """Tiles in shared memory for products of warpgroups."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def products(*pairs: tuple[Any, Any], rows: int, columns: int) -> tuple[Array, ...]:
    """Products of pairs of lists of tiles in shared memory, each summed over the lists, in fp32; all of one size."""

    def run(*sums: Any) -> tuple[Array, ...]:
        for total, (left, right) in zip(sums, pairs, strict=True):
            for one, other in zip(left, right, strict=True):
                plgpu.wgmma(total, one, other)
        return tuple(total[...] for total in sums)

    return pl.run_scoped(run, *[plgpu.ACC((rows, columns), jnp.float32)] * len(pairs))


def added(total: Array, left: Any, right: Any, form: Form) -> Array:
    """`total` plus a product; the left factor is in shared memory or registers, the right one in shared memory."""
    if form.interpreted:
        rows, columns = total.shape
        return total + products(([left], [right]), rows=rows, columns=columns)[0]
    return pl.run_state(lambda sums: plgpu.wgmma(sums, left, right))(plgpu.ACC.init(total))


def as_factor(values: Array, scratch: Any, worker: Array, form: Form) -> Any:
    """Values in registers as the left factor of a product; the interpreter needs `scratch`, a tile per warpgroup."""
    return stored(values, scratch.at[worker]) if form.interpreted else values.astype(form.dtype)


def stored(values: Array, scratch: Any) -> Any:
    """Write values to a tile, and return it."""
    scratch[...] = values.astype(scratch.dtype)
    plgpu.commit_smem()
    return scratch


def zeros(rows: int, columns: int) -> Array:
    return plgpu.layout_cast(jnp.full((rows, columns), 0, jnp.float32), LAYOUT)


def row_values(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), BY_ROW)


def load_by_row(values_R: Any) -> Array:
    """Load a value per row from shared memory."""
    return plgpu.load(values_R, *whole_reference(), layout=BY_ROW, optimized=False)


def wide(values_R: Array, columns: int) -> Array:
    """A value per row, repeated for all columns."""
    return lax.broadcast_in_dim(values_R, (values_R.shape[0], columns), [0])


def rows_types(tiles: int, *, statistics: bool, dropout: bool) -> list[Any]:
    """Shared memory for what is known about the queries of this many tiles: the first and last key they see, the two
    random words of dropout, and the two statistics of the backward pass."""
    dtypes = [jnp.int32] + [jnp.uint32] * dropout + [jnp.float32] * statistics
    return [plgpu.SMEM((tiles, 2, ROWS), dtype) for dtype in dtypes]


def load_rows(rows_g: list[Any], rows_s: list[Any], place: Any, slot: Array, barrier: Any) -> None:
    """Copy it for the queries at `place`, (sample, head, queries); the limits of keys are the same for all heads."""
    sample, head, queries = place
    plgpu.copy_gmem_to_smem(rows_g[0].at[sample, :, queries], rows_s[0].at[slot], barrier)
    for source, target in zip(rows_g[1:], rows_s[1:], strict=True):
        plgpu.copy_gmem_to_smem(source.at[sample, head, :, queries], target.at[slot], barrier)


class QueryRows:
    """Masks, dropout and statistics of a tile's queries. They are read from shared memory where they are used, since
    registers are scarce."""

    def __init__(self, rows_s: list[Any], slot: Array, form: Form):
        self._limits_s, *others = rows_s
        self._words_s = others.pop(0) if form.rate else None
        self._statistics_s = others[0] if others else None
        self._number, self._form = slot, form

    def _pair(self, pairs_s: Any, which: int) -> Array:
        return load_by_row(pairs_s.at[self._number, which])

    def seen(self, key_RC: Array) -> Array:
        """Whether a query sees a key."""
        first_RC, last_RC = (wide(self._pair(self._limits_s, n), key_RC.shape[1]) for n in range(2))
        return (key_RC >= first_RC) & (key_RC < last_RC)

    def kept(self, p_RC: Array, key_RC: Array) -> Array:
        """The probabilities after dropout, not yet scaled by 1/(1-rate)."""
        return p_RC if self._words_s is None else jnp.where(self._keep(key_RC), p_RC, 0.0)

    def _keep(self, key_RC: Array) -> Array:
        words_RC = (wide(self._pair(self._words_s, n), key_RC.shape[1]) for n in range(2))
        bits = RandomBits(*words_RC).last(key_RC)
        return bits >= jnp.uint32(self._form.keep_from)

    def probabilities(self, scores_RC: Array, key_RC: Array, scale: float, masked: bool) -> Array:
        """The forward pass's probabilities, from products of queries and keys; negative where dropout drops them, which
        halves the registers for both."""
        if masked:
            scores_RC = jnp.where(self.seen(key_RC), scores_RC, -jnp.inf)
        p_RC = jnp.exp2(scores_RC * (scale * LOG2_E) - wide(self._pair(self._statistics_s, 0), key_RC.shape[1]))
        return p_RC if self._words_s is None else jnp.where(self._keep(key_RC), p_RC, -p_RC)

    def score_gradients(self, p_RC: Array, dp_RC: Array) -> Array:
        """The gradients of scores, from these probabilities and the gradients of what dropout made of them."""
        inner_RC = wide(self._pair(self._statistics_s, 1), p_RC.shape[1])
        if self._words_s is None:
            return p_RC * (dp_RC - inner_RC)
        return positive(p_RC) * (dp_RC * (1 / (1 - self._form.rate))) - jnp.abs(p_RC) * inner_RC


def positive(p_RC: Array) -> Array:
    """The probabilities that dropout keeps."""
    return jnp.maximum(p_RC, 0.0)


def columns_from(first: Array, columns: int) -> Array:
    """The indices of a tile's keys, in every row."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 1, layout=LAYOUT) + first


class Ring(NamedTuple):
    """Buffers in shared memory, filled in turn: while all warpgroups read one, the first warpgroup has the next one
    filled."""

    filled: Any  # a barrier for each buffer
    emptied: Any

    @staticmethod
    def barriers(copies: int) -> "Ring":
        """Their types; this many copies fill a buffer."""
        return Ring(
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        )

    def fill(self, turn: Array, exists: Array, copy: Callable[[Array, Any], None]) -> None:
        """Start a turn's copies, `copy(buffer, barrier)`, once its buffer is empty; nothing unless it `exists`."""
        slot = lax.rem(turn, STAGES)

        @pl.when((lax.axis_index("worker") == 0) & exists)
        def _() -> None:
            @pl.when(turn >= STAGES)
            def _() -> None:
                plgpu.barrier_wait(self.emptied.at[slot])

            copy(slot, self.filled.at[slot])

    def wait(self, turn: Array) -> Array:
        """Wait until a turn's buffer is filled, and return it."""
        slot = lax.rem(turn, STAGES)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def done(self, slot: Array) -> None:
        """This warpgroup no longer needs the buffer."""
        plgpu.barrier_arrive(self.emptied.at[slot])

    def drain(self, count: Array) -> None:
        """After `count` turns, wait until all buffers are empty, so that no phase of a barrier is left open."""
        for slot in range(STAGES):

            @pl.when((lax.axis_index("worker") == 0) & (count > slot))
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(self.emptied.at[slot])


def over_blocks(turns: BlockTurns, step: Callable[..., Any], carry: Any) -> Any:
    """`step(turn, masked, carry)` for all turns."""
    carry = lax.fori_loop(0, turns.full_count, lambda turn, carry: step(turn, False, carry), carry)
    return lax.fori_loop(turns.full_count, turns.count, lambda turn, carry: step(turn, True, carry), carry)


def call(kernel: Callable[..., None], *, grid: dict[str, int], **types: Any) -> Callable[..., Any]:
    """The kernel over a grid; its two warpgroups are the axis `worker`."""
    return plgpu.kernel(
        kernel,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=GROUPS,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **types,
    )
