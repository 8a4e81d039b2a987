"""The forward pass of attention: an online softmax over the blocks of keys that a block of queries sees.

Letters: B batch, T queries, S keys, H heads, N heads of keys, K head size; R a tile's rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.core.kernels import tiles
from megajax.core.kernels.queries import Queries
from megajax.core.kernels.spans import spans_of_queries
from megajax.core.kernels.tiles import GROUPS, ROWS, STAGES, Form, QueryRows, Ring, tile, wide

LOWEST = -3e38  # the highest score of a query that has seen no key


def keys_at_once(head_size: int) -> int:
    """Keys in a block, chosen so that sums and scores fit in registers."""
    return 64 if head_size > 128 else 128


def forward(q_BTHK: Array, k_BSNK: Array, v_BSNK: Array, rows: list[Array], form: Form) -> tuple[Array, Array]:
    """Attention, and each query's log-sum-exp in base 2, fp32 [B, H, T]. `rows` are what `tiles.load_rows` copies."""
    (batch, length, heads, size), dtype = q_BTHK.shape, q_BTHK.dtype
    columns, scale = keys_at_once(size), size**-0.5 * tiles.LOG2_E
    spans = spans_of_queries(rows[0], GROUPS * ROWS, columns, k_BSNK.shape[1])
    operands = [q_BTHK, k_BSNK, v_BSNK, spans, *rows]

    def kernel(*refs: Any, q_s: Any, k_s: Any, v_s: Any, p_s: Any, rows_s: Any, sums_s: Any, ready: Any, ring: Any):
        q_g, k_g, v_g, *known_g, out_g, sums_g = refs
        queries = Queries([(q_g, q_s)], [(k_g, k_s), (v_g, v_s)], known_g, rows_s, ready, ring)
        worker, known = queries.worker, QueryRows(rows_s, queries.worker, form)

        def step(turn: Array, masked: bool, carry: Any) -> Any:
            out, highest_R, total_R = carry
            slot = ring.wait(turn)
            factors = [q_s.at[worker]], [k_s.at[slot].transpose((1, 0))]
            (scores,) = tiles.products(factors, rows=ROWS, columns=columns)
            key = queries.key_numbers(turn)
            if masked:
                scores = jnp.where(known.seen(key), scores, -jnp.inf)
            higher_R = jnp.maximum(highest_R, scores.max(axis=1) * scale)
            smaller_R = jnp.exp2(highest_R - higher_R)
            p = jnp.exp2(scores * scale - wide(higher_R, columns))
            total_R = total_R * smaller_R + p.sum(axis=1)
            factor = tiles.as_factor(known.kept(p, key), p_s, worker, form)
            queries.load(turn + 1)
            out = tiles.added(out * wide(smaller_R, size), factor, v_s.at[slot], form)
            ring.done(slot)
            return out, higher_R, total_R

        start = tiles.zeros(ROWS, size), tiles.row_values(LOWEST), tiles.row_values(0)
        out, highest_R, total_R = tiles.over_blocks(queries.turns, step, start)
        ring.drain(queries.turns.count)
        total_R = jnp.maximum(total_R, 1e-30)  # of a query that sees nothing
        sums_s[worker] = highest_R + jnp.log2(total_R)
        q_s[worker] = (out * wide(1 / ((1 - form.rate) * total_R), size)).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s.at[worker], out_g.at[queries.own])
        plgpu.copy_smem_to_gmem(sums_s.at[worker], sums_g.at[queries.place])
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
        grid={"head": heads, "block": length // (GROUPS * ROWS), "sample": batch},
        scratch_types=scratch,
    )(*operands)
