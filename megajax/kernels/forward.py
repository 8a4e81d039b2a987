"""The forward pass of attention: an online softmax over the blocks of keys that a block of queries sees.

Letters: B batch, T queries, S keys, H heads, N heads of keys, K head size; R a tile's rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.kernels import tiles
from megajax.kernels.spans import Turns, spans_of_queries
from megajax.kernels.tiles import GROUPS, ROWS, STAGES, Form, Ring, Rows, tile, wide

LOWEST = -3e38  # of a query before it has seen a key


def keys_at_once(head_size: int) -> int:
    """Keys of a block, so that sums and scores fit into a thread's registers."""
    return 64 if head_size > 128 else 128


def forward(q_BTHK: Array, k_BSNK: Array, v_BSNK: Array, rows: list[Array], form: Form) -> tuple[Array, Array]:
    """Attention, and of every query the binary logarithm of the sum of its scores' exponentials, fp32 [B, H, T]; of
    what is known of every query (`load_rows`)."""
    (batch, length, heads, size), dtype = q_BTHK.shape, q_BTHK.dtype
    columns, group = keys_at_once(size), heads // k_BSNK.shape[2]
    scale = size**-0.5 * tiles.LOG2_E
    spans = spans_of_queries(rows[0], GROUPS * ROWS, columns, k_BSNK.shape[1])
    blocks = length // (GROUPS * ROWS)
    operands = [q_BTHK, k_BSNK, v_BSNK, spans, *rows]

    def kernel(*refs: Any, q_s: Any, k_s: Any, v_s: Any, p_s: Any, rows_s: Any, sums_s: Any, ready: Any, ring: Any):
        q_g, k_g, v_g, spans_g, *rows_g, out_g, sums_g = refs
        sample, head, turn_of_block, worker = (lax.axis_index(name) for name in ("sample", "head", "block", "worker"))
        number = blocks - 1 - turn_of_block  # late queries, which see most where attention is causal, come first
        turns = Turns([spans_g.at[sample, number]])
        own = pl.ds((number * GROUPS + worker) * ROWS, ROWS)

        def load(turn: Array) -> None:
            keys = sample, pl.ds(turns.place(turn)[1] * columns, columns), lax.div(head, group)

            def copy(slot: Array, filled: Any) -> None:
                plgpu.copy_gmem_to_smem(k_g.at[keys], k_s.at[slot], filled)
                plgpu.copy_gmem_to_smem(v_g.at[keys], v_s.at[slot], filled)

            ring.fill(turn, turn < turns.count, copy)

        plgpu.copy_gmem_to_smem(q_g.at[sample, own, head], q_s.at[worker], ready.at[worker])
        tiles.load_rows(rows_g, rows_s, (sample, head, own), worker, ready.at[worker])
        load(jnp.int32(0))
        plgpu.barrier_wait(ready.at[worker])
        known = Rows(rows_s, worker, form)

        def step(turn: Array, masked: bool, carry: Any) -> Any:
            out, highest_R, total_R = carry
            slot = ring.wait(turn)
            factors = [q_s.at[worker]], [k_s.at[slot].transpose((1, 0))]
            (scores,) = tiles.products(factors, rows=ROWS, columns=columns)
            key = tiles.columns_from(turns.place(turn)[1] * columns, columns)
            if masked:
                scores = jnp.where(known.seen(key), scores, -jnp.inf)
            higher_R = jnp.maximum(highest_R, scores.max(axis=1) * scale)
            smaller_R = jnp.exp2(highest_R - higher_R)
            p = jnp.exp2(scores * scale - wide(higher_R, columns))
            total_R = total_R * smaller_R + p.sum(axis=1)
            factor = tiles.as_factor(known.kept(p, key), p_s, worker, form)
            load(turn + 1)
            out = tiles.added(out * wide(smaller_R, size), factor, v_s.at[slot], form)
            ring.done(slot)
            return out, higher_R, total_R

        start = tiles.zeros(ROWS, size), tiles.row_values(LOWEST), tiles.row_values(0)
        out, highest_R, total_R = tiles.over_blocks(turns, step, start)
        total_R = jnp.maximum(total_R, 1e-30)  # of a query that sees nothing
        sums_s[worker] = highest_R + jnp.log2(total_R)
        q_s[worker] = (out * wide(1 / ((1 - form.rate) * total_R), size)).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s.at[worker], out_g.at[sample, own, head])
        plgpu.copy_smem_to_gmem(sums_s.at[worker], sums_g.at[sample, head, own])
        plgpu.wait_smem_to_gmem(0)

    rows_s = tiles.rows_types(GROUPS, statistics=False, dropout=form.rate > 0)
    kind: dict[str, Any] = {"dtype": dtype, "swizzle": tiles.swizzle_of(size, columns)}
    scratch = {
        "q_s": tile(GROUPS, ROWS, size, **kind),
        "k_s": tile(STAGES, columns, size, **kind),
        "v_s": tile(STAGES, columns, size, **kind),
        "p_s": tile(GROUPS, ROWS, columns, **kind) if form.interpreted else None,
        "rows_s": rows_s,
        "sums_s": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "ready": plgpu.Barrier(num_arrivals=1 + len(rows_s), num_barriers=GROUPS),
        "ring": Ring.barriers(copies=2),
    }
    sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    return tiles.call(
        kernel,
        out_type=(jax.ShapeDtypeStruct(q_BTHK.shape, dtype), sums),
        grid={"head": heads, "block": blocks, "sample": batch},
        scratch_types=scratch,
    )(*operands)
