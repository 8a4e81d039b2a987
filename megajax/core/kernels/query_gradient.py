"""The gradient of queries, over the blocks of keys that a block of queries sees.

Letters: B batch, T queries, S keys, H heads, N heads of keys, K head size.
"""

from typing import Any

import jax
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.core.kernels import tiles
from megajax.core.kernels.queries import Queries
from megajax.core.kernels.spans import spans_of_queries
from megajax.core.kernels.tiles import GROUPS, ROWS, STAGES, Form, QueryRows, Ring, tile


def keys_at_once(head_size: int) -> int:
    """Keys in a block, chosen so that tiles fit in shared memory."""
    return 32 if head_size > 128 else 64


def query_gradient(
    q_BTHK: Array, k_BSNK: Array, v_BSNK: Array, grad_BTHK: Array, rows: list[Array], form: Form
) -> Array:
    """The gradient of queries, from that of the result. `rows` are what `tiles.load_rows` copies."""
    (batch, length, heads, size), dtype = q_BTHK.shape, q_BTHK.dtype
    columns, scale = keys_at_once(size), size**-0.5
    spans = spans_of_queries(rows[0], GROUPS * ROWS, columns, k_BSNK.shape[1])
    operands = [q_BTHK, grad_BTHK, k_BSNK, v_BSNK, spans, *rows]

    def kernel(*refs: Any, q_s: Any, do_s: Any, k_s: Any, v_s: Any, p_s: Any, rows_s: Any, ready: Any, ring: Any):
        q_g, do_g, k_g, v_g, *known_g, dq_g = refs
        queries = Queries([(q_g, q_s), (do_g, do_s)], [(k_g, k_s), (v_g, v_s)], known_g, rows_s, ready, ring)
        worker, known = queries.worker, QueryRows(rows_s, queries.worker, form)

        def step(turn: Array, masked: bool, dq: Array) -> Array:
            slot = ring.wait(turn)
            keys, values = ([x.at[slot].transpose((1, 0))] for x in (k_s, v_s))
            pairs = ([q_s.at[worker]], keys), ([do_s.at[worker]], values)
            scores, dp = tiles.products(*pairs, rows=ROWS, columns=columns)
            p = known.probabilities(scores, queries.key_numbers(turn), scale, masked)
            dscores = known.score_gradients(p, dp)
            factor = tiles.as_factor(dscores, p_s, worker, form)
            queries.load(turn + 1)
            dq = tiles.added(dq, factor, k_s.at[slot], form)
            ring.done(slot)
            return dq

        dq = tiles.over_blocks(queries.turns, step, tiles.zeros(ROWS, size))
        ring.drain(queries.turns.count)
        q_s[worker] = (dq * scale).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s.at[worker], dq_g.at[queries.own])
        plgpu.wait_smem_to_gmem(0)

    rows_s = tiles.rows_types(GROUPS, statistics=True, dropout=form.rate > 0)
    kind: dict[str, Any] = {"dtype": dtype, "swizzle": tiles.swizzle_of(size, columns)}
    scratch = {
        "q_s": tile(GROUPS, ROWS, size, **kind),
        "do_s": tile(GROUPS, ROWS, size, **kind),
        "k_s": tile(STAGES, columns, size, **kind),
        "v_s": tile(STAGES, columns, size, **kind),
        "p_s": tile(GROUPS, ROWS, columns, **kind) if form.interpreted else None,
        "rows_s": rows_s,
        "ready": plgpu.Barrier(num_arrivals=2 + len(rows_s), num_barriers=GROUPS),
        "ring": Ring.barriers(copies=2),
    }
    return tiles.call(
        kernel,
        out_type=jax.ShapeDtypeStruct(q_BTHK.shape, dtype),
        grid={"head": heads, "block": length // (GROUPS * ROWS), "sample": batch},
        scratch_types=scratch,
    )(*operands)
