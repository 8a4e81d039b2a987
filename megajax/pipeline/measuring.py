"""The parts of a pipeline's step one by one, for measuring them."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.parallel.collectives import DATA, PIPE, send_down, send_up, vary, zeros_like_type
from megajax.pipeline.executor import Pipeline
from megajax.pipeline.rows import End, Row, Work
from megajax.pipeline.stages import when

Tree = Any
Part = Literal["forward", "both", "weight_gradient", "embed", "head", "embed_backward", "hand_over"]


def repeat_part(pipeline: Pipeline, part: Part, k: Array, repeats: Array, grad_dtype: Any) -> Array:
    """Run one part of a step over and over; returns a number that depends on the results.

    Args:
        part: `forward` or `both` (and backward, where weight gradients are deferred without them) of one microbatch
            through virtual stage `k`, or its deferred `weight_gradient`, which its stage runs while all others skip it;
            `embed`, `head` or `embed_backward` of ends that all stages run together; `hand_over` up and down.
        k: virtual stage; none is run where it is negative.
    """
    ends, alone, stages = pipeline.ends, not pipeline.ends.vocabulary_split, pipeline.num_stages
    first, last = alone & (k == 0), alone & (k == pipeline.num_chunks * stages - 1)
    one_stage, deferred = part in ("forward", "both", "weight_gradient"), pipeline.layers.products is not None
    num_factor_slots = 2 if part == "weight_gradient" else int(deferred)

    def once(repeat: Array, carry: Tree) -> Tree:
        x, buffer, total, blocks = carry
        microbatch = repeat % pipeline.num_microbatches
        work = Work(runs=True, microbatch=microbatch, chunk=k // stages, slot=0, arrival=0, source=0)
        at_first, at_last = (End(here=here, anywhere=True, microbatch=microbatch) for here in (first, last))
        row = Row(work, work, embed=at_first, finish=at_last, head=at_last, embed_backward=at_first)
        end = dataclasses.replace(at_first, here=pipeline.stage == 0)
        on_first = Row(work, work, embed=end, finish=end, head=end, embed_backward=end)
        if part == "hand_over":
            x = pipeline.send(send_down, pipeline.send(send_up, x))
        elif part == "embed":
            x = ends.input(on_first, x)
        elif part == "head":
            x, total = ends.head(on_first, lambda: x, x, total)
        elif part == "embed_backward":
            total = ends.embed_backward(on_first, x, total)
        elif part == "weight_gradient":
            # By turns of two slots: of one, the products would be the same in every repeat.
            blocks = pipeline.layers.add_weight_gradients(pipeline.blocks, k // stages, blocks, repeat % 2)
        else:
            y, buffer = pipeline.forward_chunk(row, ends.input(row, x) if alone else x, buffer)
            grad = y
            if part == "both":
                grad, total = ends.head(row, lambda: y, y, total) if alone else (y, total)
                grad, blocks = pipeline.backward_chunk(row, buffer, grad, blocks)
                total = ends.embed_backward(row, grad, total) if alone else total
            x = y + grad
        return x * lax.rsqrt(jnp.mean(jnp.square(x)) + jnp.asarray(1e-6, x.dtype)), buffer, total, blocks

    def run(x: Array) -> Array:
        total, blocks = pipeline.sums(grad_dtype, num_factor_slots)
        if part == "weight_gradient":
            blocks = dataclasses.replace(blocks, factors=jax.tree.map(_filled, blocks.factors))
        if one_stage and not alone:
            total = {}  # the ends' sums are every stage's, which one stage alone cannot change
        carry = x, pipeline.buffer(1, with_output=False), total, blocks
        results = jax.tree.leaves(lax.fori_loop(0, repeats, once, carry))
        return sum(vary(jnp.sum(leaf).astype(jnp.float32), (DATA, PIPE)) for leaf in results)

    x = vary(pipeline.functions.embed(ends.weights(), ends.take(0)), (PIPE,))
    if not one_stage:
        return run(x)
    mine = (k >= 0) & (k % stages == pipeline.stage)
    return when(mine, run, lambda x: zeros_like_type(jax.eval_shape(run, x)), x)


def _filled(slots: Array) -> Array:
    """Random numbers in place of zeros, whose products take less time on some devices."""
    return slots + jax.random.normal(jax.random.key(0), slots.shape, slots.dtype)
