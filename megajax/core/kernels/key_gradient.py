"""The gradients of keys and values, over the blocks of queries that see a block of keys, for all heads that use them.

Each warpgroup has 64 keys. If the sums of both gradients would not fit in registers, both warpgroups have the same 64
keys and half of the head size each; then both compute the scores.

Letters: B batch, T queries, S keys, H heads, N heads of keys, K head size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.core.kernels import tiles
from megajax.core.kernels.spans import BlockTurns, spans_of_keys
from megajax.core.kernels.tiles import GROUPS, ROWS, STAGES, Form, QueryRows, Ring, tile


def parts_of(head_size: int) -> int:
    """The number of parts of the head size, which the warpgroups share."""
    return GROUPS if head_size > 128 else 1


def key_gradients(
    q_BTHK: Array, k_BSNK: Array, v_BSNK: Array, grad_BTHK: Array, rows: list[Array], form: Form
) -> tuple[Array, Array]:
    """The gradients of keys and values, from that of the result. `rows` are what `tiles.load_rows` copies."""
    (batch, num_keys, kv_heads, size), dtype = k_BSNK.shape, k_BSNK.dtype
    parts, group, scale = parts_of(size), q_BTHK.shape[2] // kv_heads, size**-0.5
    width, columns = size // parts, ROWS * GROUPS // parts  # of a warpgroup's sums, and keys of a block
    spans = spans_of_keys(rows[0], ROWS, columns, num_keys, form.pieces)
    operands = [q_BTHK, grad_BTHK, k_BSNK, v_BSNK, spans, *rows]

    def kernel(
        *refs: Any, k_s: Any, v_s: Any, q_s: Any, do_s: Any, p_s: Any, rows_s: Any, ready: Any, ring: Any, finished: Any
    ):
        q_g, do_g, k_g, v_g, spans_g, *rows_g, dk_g, dv_g = refs
        sample, kv_head, block_index, worker = (lax.axis_index(name) for name in ("sample", "head", "block", "worker"))
        turns = BlockTurns([spans_g.at[sample, block_index, piece] for piece in range(form.pieces)], group)
        # This warpgroup's 64 keys of the block, and its part of the head size.
        keys, own_part = (worker, 0) if parts == 1 else (0, worker)
        first = block_index * columns + keys * ROWS
        key_rows = sample, pl.ds(first, ROWS), kv_head, pl.ds(own_part * width, width)

        def load(turn: Array) -> None:
            time, block = turns.place(turn)
            queries, head = pl.ds(block * ROWS, ROWS), kv_head * group + time

            def copy(slot: Array, filled: Any) -> None:
                for source, target in ((q_g, q_s), (do_g, do_s)):
                    for n in range(parts):
                        columns = pl.ds(n * width, width)
                        plgpu.copy_gmem_to_smem(
                            source.at[sample, queries, head, columns], target.at[slot * parts + n], filled
                        )
                tiles.load_rows(rows_g, rows_s, (sample, head, queries), slot, filled)

            ring.fill(turn, turn < turns.count, copy)

        for source, target in ((k_g, k_s), (v_g, v_s)):
            plgpu.copy_gmem_to_smem(source.at[key_rows], target.at[worker], ready.at[worker])
        load(jnp.int32(0))
        for other in range(GROUPS):
            plgpu.barrier_wait(ready.at[other])
        of_parts = [worker] if parts == 1 else list(range(parts))

        def step(turn: Array, masked: bool, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dk, dv = carry
            slot = ring.wait(turn)
            known = QueryRows(rows_s, slot, form)
            # The compiler must not know it: it would compute addresses and indices of the keys before the loop, and
            # spill them.
            zero = lax.shift_right_logical(turn, 30)
            own_keys, own_values = ([x.at[n + zero].transpose((1, 0)) for n in of_parts] for x in (k_s, v_s))
            queries, grads = ([x.at[slot * parts + n] for n in range(parts)] for x in (q_s, do_s))
            (scores,) = tiles.products((queries, own_keys), rows=ROWS, columns=ROWS)
            p = known.probabilities(scores, tiles.columns_from(first + zero, ROWS), scale, masked)
            factor = tiles.stored(tiles.positive(p) if form.rate else p, p_s.at[worker]).transpose((1, 0))
            dv = tiles.added(dv, factor, do_s.at[slot * parts + own_part], form)
            (dp,) = tiles.products((grads, own_values), rows=ROWS, columns=ROWS)
            factor = tiles.stored(known.score_gradients(p, dp), p_s.at[worker]).transpose((1, 0))
            load(turn + 1)
            dk = tiles.added(dk, factor, q_s.at[slot * parts + own_part], form)
            ring.done(slot)
            return dk, dv

        dk, dv = tiles.over_blocks(turns, step, (tiles.zeros(ROWS, width), tiles.zeros(ROWS, width)))
        ring.drain(turns.count)
        plgpu.barrier_arrive(finished)  # keys and values are no longer read
        plgpu.barrier_wait(finished)
        k_s[worker] = (dk * scale).astype(dtype)
        v_s[worker] = (dv * (1 / (1 - form.rate))).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_s.at[worker], dk_g.at[key_rows])
        plgpu.copy_smem_to_gmem(v_s.at[worker], dv_g.at[key_rows])
        plgpu.wait_smem_to_gmem(0)

    rows_s = tiles.rows_types(STAGES, statistics=True, dropout=form.rate > 0)
    kind: dict[str, Any] = {"dtype": dtype, "swizzle": tiles.swizzle_of(width)}
    scratch = {
        "k_s": tile(GROUPS, ROWS, width, **kind),
        "v_s": tile(GROUPS, ROWS, width, **kind),
        "q_s": tile(STAGES * parts, ROWS, width, **kind),
        "do_s": tile(STAGES * parts, ROWS, width, **kind),
        "p_s": tile(GROUPS, ROWS, ROWS, **kind),
        "rows_s": rows_s,
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
        "ring": Ring.barriers(copies=2 * parts + len(rows_s)),
        "finished": plgpu.Barrier(num_arrivals=GROUPS),
    }
    return tiles.call(
        kernel,
        out_type=(jax.ShapeDtypeStruct(k_BSNK.shape, dtype),) * 2,
        grid={"head": kv_heads, "block": num_keys // columns, "sample": batch},
        scratch_types=scratch,
    )(*operands)
