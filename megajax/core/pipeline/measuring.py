"""Run the parts of a pipeline step separately, to measure them."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.axes import BATCH_AXES
from megajax.core.parallel.collectives import PIPE, send_down, send_up, vary, zeros_like_type
from megajax.core.pipeline.executor import Pipeline
from megajax.core.pipeline.rows import End, Row, Work
from megajax.core.pipeline.stages import when

Tree = Any
OfStage = Literal["forward", "both", "all"]
Part = OfStage | Literal["embed", "head", "embed_backward", "p2p_transfer"]


def repeat_part(
    pipeline: Pipeline, part: Part, k: Array, repeats: Array, grad_dtype: Any, num_slots: int, num_factor_slots: int
) -> Array:
    """Run one part of a step repeatedly; returns a number that depends on the results.

    Buffers have as many slots as in the schedule's table and use them in turn, since a pass takes longer if its data is
    not in a cache. `part` is `forward`, `both` (with the backward) or `all` (with deferred weight gradients) for one
    microbatch through virtual stage `k`, run by its stage and skipped by the others (by all if `k` is negative);
    `embed`, `head` or `embed_backward` for ends that all stages run together; or `p2p_transfer`, up and down.
    """
    ends, alone, stages = pipeline.ends, not pipeline.ends.vocabulary_split, pipeline.num_stages
    first, last = alone & (k == 0), alone & (k == pipeline.num_chunks * stages - 1)
    one_stage = part in get_args(OfStage)

    num_slots, num_factor_slots = max(num_slots, 1), max(num_factor_slots, 1)
    in_flight = jnp.minimum(2 * (stages - 1 - k % stages), num_slots - 1)  # in eager 1F1B, besides the newest

    def work_of(repeat: Array, slot: Array) -> Work:
        microbatch, factor_slot = repeat % pipeline.num_microbatches, repeat % num_factor_slots
        return Work(True, microbatch, chunk=k // stages, slot=slot, arrival=0, source=0, factor_slot=factor_slot)

    def once(repeat: Array, carry: Tree) -> Tree:
        x, buffer, total, blocks = carry
        work = work_of(repeat, repeat % num_slots)
        microbatch, oldest = work.microbatch, work_of(repeat, (repeat - in_flight) % num_slots)
        at_first, at_last = (End(here=here, anywhere=True, microbatch=microbatch) for here in (first, last))
        row = Row(work, oldest, embed=at_first, finish=at_last, head=at_last, embed_backward=at_first)
        end = at_first._replace(here=pipeline.stage == 0)
        on_first = Row(work, work, embed=end, finish=end, head=end, embed_backward=end)
        if part == "p2p_transfer":
            x = pipeline.send(send_down, pipeline.send(send_up, x))
        elif part == "embed":
            x = ends.input(on_first, x)
        elif part == "head":
            x, total = ends.head(on_first, lambda: x, x, total)
        elif part == "embed_backward":
            total = ends.embed_backward(on_first, x, total)
        else:
            y, buffer, _ = pipeline.forward_chunk(row, ends.input(row, x) if alone else x, buffer)
            grad = y
            if part != "forward":
                grad, total = ends.head(row, lambda: y, y, total) if alone else (y, total)
                grad, blocks = pipeline.backward_chunk(row, buffer, grad, blocks)
                total = ends.embed_backward(row, grad, total) if alone else total
            if part == "all":
                longest = (repeat + 1) % num_factor_slots
                blocks = pipeline.layers.add_weight_gradients(k // stages, blocks, longest)
            x = y + grad
        return x * lax.rsqrt(jnp.mean(jnp.square(x)) + jnp.asarray(1e-6, x.dtype)), buffer, total, blocks

    def fill(x: Array, buffer: Tree) -> Tree:
        """Fill every slot with the residuals of one forward."""
        work = work_of(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
        nowhere = End(here=False, anywhere=False, microbatch=work.microbatch)
        filled = pipeline.forward_chunk(Row(work, work, nowhere, nowhere, nowhere, nowhere), x, buffer)[1]
        return jax.tree.map(lambda slots: jnp.broadcast_to(slots[:1], slots.shape), filled)

    def run(x: Array) -> Array:
        total, blocks = pipeline.sums(grad_dtype, num_factor_slots if pipeline.layers.deferred else 0)
        # Zeros would take less time on some devices.
        blocks = blocks._replace(factors=jax.tree.map(_filled, blocks.factors))
        buffer = pipeline.buffer(num_slots, with_output=False)
        if one_stage:
            buffer = fill(x, buffer)
            total = total if alone else {}  # the ends' sums involve all stages, so one stage alone cannot change them
        carry = x, buffer, total, blocks
        results = jax.tree.leaves(lax.fori_loop(0, repeats, once, carry))
        return sum(vary(jnp.sum(leaf).astype(jnp.float32), (*BATCH_AXES, PIPE)) for leaf in results)

    x = ends.embedded(0)
    if not one_stage:
        return run(x)
    mine = (k >= 0) & (k % stages == pipeline.stage)
    return when(mine, run, lambda x: zeros_like_type(jax.eval_shape(run, x)), x)


def _filled(slots: Array) -> Array:
    """Fill every slot with the same random numbers."""
    return slots + jax.random.normal(jax.random.key(0), (1, *slots.shape[1:]), slots.dtype)
