"""What the three kernels of attention are made of: tiles in shared memory, products by warpgroups, what queries see and
what dropout keeps.

Two warpgroups compute 64 rows each. Blocks are loaded while the one before is multiplied (`Ring`).

Letters: R rows of a tile, which are queries, C its columns, which are keys, K head size.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.kernels.spans import Turns
from megajax.parallel.random import RandomBits

ROWS = 64  # of a warpgroup's products
GROUPS = 2  # warpgroups, which share what is loaded
STAGES = 2  # blocks in shared memory: one is loaded while another is multiplied
LAYOUT = plgpu.Layout.WGMMA
BY_ROW = LAYOUT.reduce(1)
_WHOLE: tuple[Any, ...] = () if jax.__version_info__ >= (0, 12) else ((),)  # an index that older versions ask for
LOG2_E = math.log2(math.e)


class Form(NamedTuple):
    """How attention is computed, known while compiling."""

    dtype: Any  # of queries, keys and values
    rate: float  # of dropout of the probabilities
    pieces: int  # of the queries, each of queries that follow one another
    # The interpreter knows no left factor of a product in registers, and no accumulator that goes from one product to
    # the next: then factors go through shared memory, and sums are added to one another.
    interpreted: bool = False

    @property
    def keep_from(self) -> int:
        """The smallest random word that keeps a probability, as in `Dropout.apply`."""
        return min(round(self.rate * 2**32), 2**32 - 1)


def swizzle_of(*widths: int) -> int:
    """The bytes within which tiles of these widths, that are multiplied with one another, are permuted."""
    return 128 if all(width % 64 == 0 for width in widths) else 64


def tile(*shape: int, dtype: Any, swizzle: int) -> Any:
    """Tiles in shared memory, that warpgroups multiply."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def products(*pairs: tuple[Any, Any], rows: int, columns: int) -> tuple[Array, ...]:
    """Products of tiles in shared memory, all of one size, in fp32; of lists of tiles the sum of theirs."""

    def run(*sums: Any) -> tuple[Array, ...]:
        for each, (left, right) in zip(sums, pairs, strict=True):
            for one, other in zip(left, right, strict=True):
                plgpu.wgmma(each, one, other)
        return tuple(each[...] for each in sums)

    return pl.run_scoped(run, *[plgpu.ACC((rows, columns), jnp.float32)] * len(pairs))


def added(total: Array, left: Any, right: Any, form: Form) -> Array:
    """`total` and the product of tiles in shared memory, or of a left one in registers."""
    if form.interpreted:
        rows, columns = total.shape
        return total + products(([left], [right]), rows=rows, columns=columns)[0]
    return pl.run_state(lambda sums: plgpu.wgmma(sums, left, right))(plgpu.ACC.init(total))


def as_factor(values: Array, scratch: Any, worker: Array, form: Form) -> Any:
    """Values in registers as the left factor of a product; `scratch` has a tile for each warpgroup's, if need be."""
    return stored(values, scratch.at[worker]) if form.interpreted else values.astype(form.dtype)


def stored(values: Array, scratch: Any) -> Any:
    """A tile with these values."""
    scratch[...] = values.astype(scratch.dtype)
    plgpu.commit_smem()
    return scratch


def zeros(rows: int, columns: int) -> Array:
    return plgpu.layout_cast(jnp.full((rows, columns), 0, jnp.float32), LAYOUT)


def row_values(value: float) -> Array:
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), BY_ROW)


def of_rows(values_R: Any) -> Array:
    """A value of every row, of shared memory."""
    return plgpu.load(values_R, *_WHOLE, layout=BY_ROW, optimized=False)


def wide(values_R: Array, columns: int) -> Array:
    """A value of every row, for all columns."""
    return lax.broadcast_in_dim(values_R, (values_R.shape[0], columns), [0])


def rows_types(number: int, *, statistics: bool, dropout: bool) -> list[Any]:
    """Shared memory for what is known of the queries of so many tiles: the first and last key that they see, the two
    random words of dropout, and the two statistics of the backward pass."""
    dtypes = [jnp.int32] + [jnp.uint32] * dropout + [jnp.float32] * statistics
    return [plgpu.SMEM((number, 2, ROWS), dtype) for dtype in dtypes]


def load_rows(rows_g: list[Any], rows_s: list[Any], place: Any, number: Array, barrier: Any) -> None:
    """Copy it for the queries at `place`, (sample, head, queries); limits are the same for all heads."""
    sample, head, own = place
    plgpu.copy_gmem_to_smem(rows_g[0].at[sample, :, own], rows_s[0].at[number], barrier)
    for there, here in zip(rows_g[1:], rows_s[1:], strict=True):
        plgpu.copy_gmem_to_smem(there.at[sample, head, :, own], here.at[number], barrier)


class Rows:
    """What the queries of a tile see, what dropout keeps of their probabilities, and their statistics."""

    def __init__(self, rows_s: list[Any], number: Array, form: Form):
        (self.first_R, self.last_R), *others = ([of_rows(x.at[number, n]) for n in range(2)] for x in rows_s)
        self.words = RandomBits(*others.pop(0)) if form.rate else None
        self.sums_R, self.inner_R = others[0] if others else (None, None)  # type: Any, Any
        self.form = form

    def seen(self, key_RC: Array) -> Array:
        """Whether a query sees a key."""
        columns = key_RC.shape[1]
        return (key_RC >= wide(self.first_R, columns)) & (key_RC < wide(self.last_R, columns))

    def kept(self, p_RC: Array, key_RC: Array) -> Array:
        """The probabilities that dropout keeps, not yet scaled by 1/(1-rate); the others 0."""
        return p_RC if self.words is None else jnp.where(self._keep(key_RC), p_RC, 0.0)

    def _keep(self, key_RC: Array) -> Array:
        assert self.words is not None
        columns = key_RC.shape[1]
        bits = RandomBits(wide(self.words.a, columns), wide(self.words.b, columns)).last(key_RC)
        return bits >= jnp.uint32(self.form.keep_from)

    def probabilities(self, scores_RC: Array, key_RC: Array, scale: float, masked: bool) -> Array:
        """Those of the forward pass again, of products of queries and keys; negative where dropout drops them, which
        takes half of the registers of both."""
        if masked:
            scores_RC = jnp.where(self.seen(key_RC), scores_RC, -jnp.inf)
        p_RC = jnp.exp2(scores_RC * (scale * LOG2_E) - wide(self.sums_R, key_RC.shape[1]))
        return p_RC if self.words is None else jnp.where(self._keep(key_RC), p_RC, -p_RC)

    def score_gradients(self, p_RC: Array, dp_RC: Array) -> Array:
        """Of these probabilities, and the gradients of what dropout made of them."""
        inner_RC = wide(self.inner_R, p_RC.shape[1])
        if self.words is None:
            return p_RC * (dp_RC - inner_RC)
        return positive(p_RC) * (dp_RC * (1 / (1 - self.form.rate))) - jnp.abs(p_RC) * inner_RC


def positive(p_RC: Array) -> Array:
    """The probabilities that dropout keeps."""
    return jnp.maximum(p_RC, 0.0)


def columns_from(first: Array, columns: int) -> Array:
    """The numbers of a tile's keys, in every row."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 1, layout=LAYOUT) + first


class Ring(NamedTuple):
    """Buffers in shared memory, filled in turns: while one is read by all warpgroups, the first warpgroup has the next
    one filled."""

    filled: Any  # a barrier for each buffer
    emptied: Any

    @staticmethod
    def barriers(copies: int) -> "Ring":
        """Their types: so many copies fill a buffer."""
        return Ring(
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        )

    def fill(self, turn: Array, exists: Array, copy: Callable[[Array, Any], None]) -> None:
        """Start the copies of a turn, `copy(buffer, barrier)`, if there is such a turn, once its buffer is empty."""
        slot = lax.rem(turn, STAGES)

        @pl.when((lax.axis_index("worker") == 0) & exists)
        def _() -> None:
            @pl.when(turn >= STAGES)
            def _() -> None:
                plgpu.barrier_wait(self.emptied.at[slot])

            copy(slot, self.filled.at[slot])

    def wait(self, turn: Array) -> Array:
        """The buffer of a turn, once it is filled."""
        slot = lax.rem(turn, STAGES)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def done(self, slot: Array) -> None:
        """The buffer is not needed any more by this warpgroup."""
        plgpu.barrier_arrive(self.emptied.at[slot])


def over_blocks(turns: Turns, step: Callable[..., Any], carry: Any) -> Any:
    """`step(turn, masked, carry)` for all turns."""
    carry = lax.fori_loop(0, turns.full_count, lambda turn, carry: step(turn, False, carry), carry)
    return lax.fori_loop(turns.full_count, turns.count, lambda turn, carry: step(turn, True, carry), carry)


def call(kernel: Callable[..., None], *, grid: dict[str, int], **types: Any) -> Callable[..., Any]:
    """The kernel, for every place in a grid; its two warpgroups are the axis `worker`."""
    return plgpu.kernel(
        kernel,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=GROUPS,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **types,
    )
