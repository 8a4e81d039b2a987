"""The train step: losses and gradients for a batch, and the update of the state."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from megajax.core.models.router import COUNTS, LOAD, balances_router, bias_step, expert_metrics
from megajax.core.optim.adam import (
    averaged,
    clip_by_norm,
    global_norm,
    initial_norms,
    is_spike,
    learning_rate,
    remember,
)
from megajax.core.parallel import integer_sums
from megajax.core.parallel.collectives import PIPE, axis_index, complete
from megajax.core.parallel.shards import Shards
from megajax.core.pipeline.executor import Gather
from megajax.core.pipeline.sums import CHECKSUM, Integers
from megajax.core.program.bind import SEQUENCES, UNSCALED, summation_of, training_pipeline
from megajax.core.program.program import BATCH, Batch, Program
from megajax.core.program.recheck import RECHECK, differing, repeated, state_checksums
from megajax.core.program.reduction import GradientReduction, gathered_in_turn
from megajax.core.program.state import TrainState
from megajax.core.program.update import updated
from megajax.core.trees import Tree

SCALAR = PartitionSpec()


def train_step(program: Program, *, recheck: bool = False) -> Wrapped:
    """(state, batch) -> (state, metrics): one optimizer step. The state is donated.

    With `recheck`, (state, batch, checksums of the state after the step before) -> (state, metrics with `RECHECK`):
    other devices compute the passes, too, and the step is skipped if one differs."""
    specs = program.layout.specs
    options = {"donate_argnums": 0, "compiler_options": program.options or None}
    return program.compiled(_train_step, (specs, BATCH, *[SCALAR] * recheck), (specs, SCALAR), recheck, **options)


def checksums_of_state(program: Program) -> Wrapped:
    """state -> checksums of every device's shards."""
    return program.compiled(state_checksums, (program.layout.specs,), SCALAR)


def train_step_with_gradients(program: Program) -> Wrapped:
    """(state, batch) -> (state, metrics, gradients before clipping, for the weights or for LoRA's adapters)."""
    specs, trained = program.layout.specs, program.layout.trained_specs
    options = {"donate_argnums": 0, "compiler_options": program.options or None}
    return program.compiled(_train_step_with_gradients, (specs, BATCH), (specs, SCALAR, trained), **options)


def loss_and_gradients(program: Program) -> Wrapped:
    """(params, batch, step) -> (loss, gradients): what the train step differentiates, with gradients reduced."""
    specs = program.layout.computed_specs, BATCH, SCALAR
    return program.compiled(_loss_and_gradients, specs, (SCALAR, program.layout.trained_specs))


def average_weights(program: Program) -> Wrapped:
    """(params, average) -> params with the averaged weights, in the compute dtype."""
    layout = program.layout
    return program.compiled(_average_weights, (layout.specs.params, layout.specs.average), layout.computed_specs)


def whole_weights(program: Program) -> Wrapped:
    """params as a step leaves them -> params for forward-only programs, of which none are gathered late."""
    layout = program.layout
    return program.compiled(_gathered, (layout.specs.params,), layout.computed_specs)


def computed_weights(program: Program, state: TrainState) -> Tree:
    """The weights that layers compute with, for forward-only programs."""
    return whole_weights(program)(state.params) if program.layout.gathers_late else state.params


def evaluated_weights(program: Program, state: TrainState) -> Tree:
    """The weights to evaluate, for forward-only programs: their average, if there is one."""
    if state.average is None:
        return computed_weights(program, state)
    return average_weights(program)(state.params, state.average)


def _gathered(program: Program, params: Tree) -> Tree:
    return program.layout.at_start.gather(params, invariant=True)


def _train_step(program: Program, _: bool, state: TrainState, batch: Batch, *checksums: Array) -> tuple[Any, Tree]:
    return _train_step_with_gradients(program, state, batch, *checksums)[:2]


def _train_step_with_gradients(
    program: Program, state: TrainState, batch: Batch, checksums: Array | None = None
) -> tuple[TrainState, dict[str, Array], Tree]:
    config, layout, recheck = program.config, program.layout, checksums is not None
    scale, late = state.loss_scale.scale, layout.gathers_late
    gather = partial(gathered_in_turn, program) if late and not recheck else None
    params = _gathered(program, state.params) if late and recheck else state.params
    losses, grads, figures, counts, not_summed, in_passes = _losses_and_gradients(
        program, params, batch, state.step, scale, state.copies, gather, state.recent_norms, recheck
    )
    loss = _total(program, losses)
    norm = integer_sums.norm(jax.tree.leaves(grads)) if config.bitwise else global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    recent_norms = state.recent_norms
    if config.bitwise:
        finite &= jnp.all(not_summed == 0)
        too_large = (not_summed[0] == 0) & (not_summed[1] > 0) & jnp.isfinite(loss)
        recent_norms = jnp.where(too_large, integer_sums.raised(recent_norms, state.step), recent_norms)
    taken = finite & ~is_spike(norm, state.recent_norms, config.optimizer.skip_above)
    rechecked = {}
    if checksums is not None:
        rechecked = {RECHECK: differing(program, in_passes, state_checksums(program, state), checksums)}
        taken &= ~jnp.any(rechecked[RECHECK])
    clipped = clip_by_norm(grads, norm, config.optimizer.clip_norm)
    main = layout.at_end.take(layout.trained(state.params)) if state.main is None else state.main
    new, optimizer = updated(layout, clipped, state.optimizer, main, taken)
    some_target = sum(counts[name] for name in program.form.targets) > 0
    main = layout.with_frozen(_with_moved_biases(program, new, figures, taken & some_target), main)
    computed = layout.at_end.gather(layout.computed(main), invariant=True)
    new_state = TrainState(
        step=state.step + taken.astype(jnp.int32),
        params=layout.with_trained(state.params, computed),
        main=None if state.main is None else main,
        optimizer=optimizer if layout.mixing else layout.with_frozen(optimizer, state.optimizer),
        loss_scale=state.loss_scale.after(finite, layout.loss_scale),
        recent_norms=jnp.where(taken, remember(norm, state.recent_norms, state.step), recent_norms),
        average=None if state.average is None else averaged(state.average, main, config.train.ema, taken),
        copies=state.copies,
    )
    metrics = {"loss": loss, "grad_norm": norm}
    if layout.has_our_rate:
        metrics["learning_rate"] = learning_rate(state.step, config.optimizer)
    parts = {f"loss/{name}" if name in program.form.targets else name: value for name, value in losses.items()}
    parts = parts if len(parts) > 1 else {}
    if LOAD in figures:
        parts |= expert_metrics(figures, config.model, jnp.maximum(counts[SEQUENCES], 1))
    else:
        parts |= {f"layers/{name}": value for name, value in figures.items()}
    return new_state, metrics | parts | rechecked | {"loss_scale": scale, "skipped": ~taken}, grads


def _with_moved_biases(program: Program, main: Tree, figures: dict[str, Array], taken: Array) -> Tree:
    """Main weights whose router biases, if there are any, are adjusted to the experts' loads if the step is `taken`."""
    layout, model, flat = program.layout, program.config.model, flatten_dict(main)
    for path in [path for path in flat if balances_router(path)] if model.biases_routers else ():
        bias, weight = flat[path], flatten_dict(layout.weights)[path]
        load = figures[LOAD][model.num_blocks :]
        if weight.stack:
            numbers = model.kinds.get(path[1], range(model.num_blocks))
            load = weight.stack.to_stages(figures[LOAD][jnp.asarray(numbers)])
            load = lax.dynamic_slice_in_dim(load, axis_index(PIPE), 1, axis=1)
        step = bias_step(load, model.balance_step, bias.dtype)
        new = bias + Shards({"": weight.owned}).take({"": step})[""]
        flat[path] = jnp.where(taken, new, bias)
    return unflatten_dict(flat)


def _average_weights(program: Program, params: Tree, average: Tree) -> Tree:
    layout = program.layout
    computed = layout.per_step.gather(layout.computed(average), invariant=True)
    return layout.with_trained(params, computed)


def _loss_and_gradients(program: Program, params: Tree, batch: Batch, step: Array) -> tuple[Array, Tree]:
    losses, grads, *_ = _losses_and_gradients(program, params, batch, step, UNSCALED, None)
    return _total(program, losses), grads


def _losses_and_gradients(
    program: Program,
    params: Tree,
    batch: Batch,
    step: Array,
    loss_scale: Array | np.float32,
    copies: Tree,
    gather: Gather | None = None,
    recent_norms: Array | None = None,
    recheck: bool = False,
) -> tuple[dict[str, Array], Tree, dict[str, Array], dict[str, Array], Array, Any]:
    """The losses by name; the gradients of their sum for the trained weights, unscaled, in the main dtype, sharded like
    `layout.trained_specs`; the sums of the layers' figures; and what `bind.count_targets` counts. `gather` is for
    weights as a step leaves them. Then, how many numbers integers could not hold (`sums.NOT_SUMMED`), [2]; and in a
    `recheck` which devices differ."""
    layout, dtype = program.layout, program.layout.main_dtype
    summation = summation_of(program, initial_norms() if recent_norms is None else recent_norms, loss_scale)
    if recheck and program.config.optimizer.zero == 3:  # which sums over devices what one of them computed
        summation = summation._replace(checked=True)
    reduction, trained = GradientReduction(program), flatten_dict(layout.trained(params))
    in_last_tick = reduction if program.overlaps_reductions and not recheck else None
    options = program.schedule, in_last_tick, gather, program.ticks_at_once

    def passes(batch: Batch, rank: Array | None = None) -> tuple:
        pipeline = training_pipeline(program, params, batch, step, loss_scale, copies, summation, rank)
        return *pipeline.losses_and_gradients(*options), pipeline.ends.model.counts

    results, in_passes = repeated(program, batch, passes) if recheck else (passes(batch), None)
    losses, local, figures, counts = results
    local = {path: sums for path, sums in local.items() if path[-1] != CHECKSUM}
    grads = {path: _like(local[path], weight, path[0] == "blocks") for path, weight in trained.items()}
    not_summed = {path: local[path].reshape(-1, 2).sum(0) for path in local.keys() - trained.keys()}
    grads = reduction.everywhere(grads | not_summed) if in_last_tick is None else grads | not_summed
    if isinstance(summation, Integers):
        not_summed = complete({path: grads.pop(path) for path in not_summed}, dict.fromkeys(not_summed, SCALAR))
        grads = {path: summation.gradient(path, grad) for path, grad in grads.items()}
    grads = unflatten_dict({path: grad.astype(dtype) / loss_scale.astype(dtype) for path, grad in grads.items()})
    grads = layout.with_frozen(grads, jax.tree.map(jnp.zeros_like, grads))
    losses, figures = (complete(sums, dict.fromkeys(sums, SCALAR)) for sums in (losses, figures))
    if isinstance(summation, Integers):
        losses = {name: summation.total(loss) for name, loss in losses.items()}
        figures = {name: x if name in COUNTS else summation.total(x) for name, x in figures.items()}
    return losses, grads, figures, counts, sum(not_summed.values(), start=jnp.zeros((2,), jnp.int32)), in_passes


def _like(grad: Array, weight: Array, stacked: bool) -> Array:
    """A gradient, which may be a shard; that of layers, [v · n, …], as the weights are, [v, 1, n, …]."""
    return grad.reshape(*weight.shape[:3], *grad.shape[1:]) if stacked else grad


def _total(program: Program, losses: dict[str, Array]) -> Array:
    first, *others = (losses[name] for name in program.form.targets)
    return sum(others, start=first)
