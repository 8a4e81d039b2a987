"""The train step: losses and gradients for a batch, and the update of the state."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.stages import Wrapped

from megajax.core.axes import MESH_AXES
from megajax.core.models.router import LOAD, balances_router, bias_step, expert_metrics
from megajax.core.optim.adam import averaged, clip_by_norm, global_norm, is_spike, learning_rate, remember
from megajax.core.parallel.collectives import (
    PIPE,
    axis_index,
    axis_size,
    complete,
    gather_shards,
    spec_axes,
    varying_axes,
)
from megajax.core.parallel.shards import NOT_SHARDED, Shards
from megajax.core.parallel.sites import checked
from megajax.core.pipeline.executor import Gather, Reduction
from megajax.core.private import tied
from megajax.core.program.bind import SEQUENCES, UNSCALED, training_pipeline
from megajax.core.program.program import BATCH, Batch, Program
from megajax.core.program.state import TrainState
from megajax.core.program.update import updated
from megajax.core.program.weight import Path

Tree = Any
SCALAR = PartitionSpec()
_LARGE = 2**20  # elements that are reduced by themselves


def train_step(program: Program) -> Wrapped:
    """(state, batch) -> (state, metrics): one optimizer step. The state is donated."""
    specs = program.layout.specs
    options = {"donate_argnums": 0, "compiler_options": program.options or None}
    return program.compiled(_train_step, (specs, BATCH), (specs, SCALAR), **options)


def train_step_with_gradients(program: Program) -> Wrapped:
    """(state, batch) -> (state, metrics, gradients before clipping, for the weights or for LoRA's adapters)."""
    specs, trained = program.layout.specs, program.layout.trained_specs
    return program.compiled(_train_step_with_gradients, (specs, BATCH), (specs, SCALAR, trained), donate_argnums=0)


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
    return program.layout.late.gather(params, invariant=True)


def _train_step(program: Program, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
    return _train_step_with_gradients(program, state, batch)[:2]


def _train_step_with_gradients(
    program: Program, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Array], Tree]:
    config, layout = program.config, program.layout
    scale = state.loss_scale.scale
    gather = partial(_gathered_in_turn, program) if layout.gathers_late else None
    losses, grads, figures, counts = _losses_and_gradients(
        program, state.params, batch, state.step, scale, state.copies, gather
    )
    loss = _total(program, losses)
    norm = global_norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    taken = finite & ~is_spike(norm, state.recent_norms, config.optimizer.skip_above)
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
        recent_norms=jnp.where(taken, remember(norm, state.recent_norms, state.step), state.recent_norms),
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
    return new_state, metrics | parts | {"loss_scale": scale, "skipped": ~taken}, grads


def _with_moved_biases(program: Program, main: Tree, figures: dict[str, Array], taken: Array) -> Tree:
    """Main weights whose router biases, if there are any, are adjusted to the experts' loads if the step is `taken`."""
    layout, model, flat = program.layout, program.config.model, flatten_dict(main)
    for path in [path for path in flat if balances_router(path)] if model.biases_routers else ():
        bias, weight = flat[path], flatten_dict(layout.weights)[path]
        load = figures[LOAD][: model.num_blocks] if weight.stack else figures[LOAD][model.num_blocks :]
        if weight.stack:
            load = lax.dynamic_slice_in_dim(layout.placement.to_stages(load), axis_index(PIPE), 1, axis=1)
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
) -> tuple[dict[str, Array], Tree, dict[str, Array], dict[str, Array]]:
    """The losses by name; the gradients of their sum for the trained weights, unscaled, in the main dtype, sharded like
    `layout.trained_specs`; the sums of the layers' figures; and what `bind.count_targets` counts. `gather` is for
    weights as a step leaves them."""
    layout, dtype = program.layout, program.layout.main_dtype
    pipeline = training_pipeline(program, params, batch, step, loss_scale, copies)
    reduction = _reduction(program) if program.overlaps_reductions else None
    losses, grads, figures = pipeline.losses_and_gradients(
        program.schedule, program.gradient_dtype, reduction, gather, program.ticks_at_once
    )
    trained = layout.trained(params)
    grads = {name: grads[name] for name in trained}
    on_stages = lambda grad, weight: grad.reshape(*weight.shape[:3], *grad.shape[1:])  # noqa: E731
    grads["blocks"] = jax.tree.map(on_stages, grads["blocks"], trained["blocks"])
    grads = _reduced(program, grads) if reduction is None else grads
    grads = jax.tree.map(lambda grad: grad.astype(dtype) / loss_scale.astype(dtype), grads)
    grads = layout.with_frozen(grads, jax.tree.map(jnp.zeros_like, grads))
    losses, figures = (complete(found, dict.fromkeys(found, SCALAR)) for found in (losses, figures))
    return losses, grads, figures, pipeline.ends.model.counts


def _reduced(program: Program, grads: Tree, *but: str) -> Tree:
    """Global sums, in the owners' shards, of local ones of some of the trained weights; of layers stacked or not; but
    not over some axes."""
    flat = flatten_dict(grads)
    shardings = flatten_dict(program.layout.per_step.shardings)
    storage = Shards(unflatten_dict({path: shardings[path] for path in flat}))
    return _completed(program, storage.scatter(grads, program.gradient_dtype), *but)


def _reduction(program: Program) -> Reduction:
    """The same of layers and ends, in turn."""

    def on_stage(room: str, grads: Tree) -> Tree:
        reduce = lambda grads: _reduced(program, grads, PIPE)  # noqa: E731
        return unflatten_dict(_in_turn(program, flatten_dict({room: grads}), reduce, {})[0]).get(room, {})

    def of_shared(function: Callable[[Program, Tree], Tree], grads: Tree) -> Tree:
        return function(program, {"shared": grads})["shared"] if grads else grads

    return Reduction(on_stage, partial(of_shared, _completed), partial(of_shared, _reduced))


def _gathered_in_turn(program: Program, shared: Tree, blocks: Tree) -> tuple[Tree, tuple[Tree, ...]]:
    """The weights of the ends and of every layer, from the ends' and the stacked layers' as a step leaves them: in turn
    those of the layers, then those of the head."""
    shardings = flatten_dict(program.layout.late.shardings)

    def gather(shards: Tree) -> Tree:
        return Shards(unflatten_dict({path: shardings[path] for path in flatten_dict(shards)})).gather(shards)

    stacks, layers, before = flatten_dict({"blocks": blocks}), list[Tree](), dict[Path, Array]()
    for place in range(len(jax.tree.leaves(blocks)[0])):
        gathered, before = _in_turn(program, {path: stack[place] for path, stack in stacks.items()}, gather, before)
        layers.append(unflatten_dict(gathered)["blocks"])
    ends = flatten_dict({"shared": shared})
    late = {path: shard for path, shard in ends.items() if shardings[path] != NOT_SHARDED}
    return unflatten_dict(ends | _in_turn(program, late, gather, before)[0])["shared"], tuple(layers)


def _in_turn(
    program: Program, flat: dict[Path, Array], function: Callable[[Tree], Tree], before: dict[Path, Array]
) -> tuple[dict[Path, Array], dict[Path, Array]]:
    """The results of a collective for weights, one large weight after the other and `before`, those of another turn;
    and those of the last one. XLA believes that collectives under way together take as long as one, and so would begin
    all of them too late."""
    records, results = flatten_dict(program.layout.trained(program.layout.weights)), dict[Path, Array]()
    large = [path for path in flat if prod(records[path].whole) >= _LARGE]
    for paths in ([path for path in flat if path not in large], *([path] for path in large)):
        part, before = tied(({path: flat[path] for path in paths}, before))
        before = flatten_dict(function(unflatten_dict(part)))
        results |= before
    return results, before


def _completed(program: Program, grads: Tree, *but: str) -> Tree:
    """Sum gradients of some of the trained weights over all axes but some; while recording, every weight's sum is
    checked."""
    trained = flatten_dict(program.layout.trained_specs)
    specs = unflatten_dict({path: PartitionSpec(*trained[path], *but) for path in flatten_dict(grads)})

    def missing(grad: Array, spec: PartitionSpec) -> tuple[str, ...]:
        return tuple(axis for axis in MESH_AXES if axis_size(axis) > 1 and axis in varying_axes(grad) - spec_axes(spec))

    def by_gather(grad: Array, spec: PartitionSpec) -> Array:
        axes = missing(grad, spec)
        return gather_shards(grad[None], 0, axes).sum(0) if axes else grad

    def name(grad: Array, spec: PartitionSpec) -> str:
        return f"all-reduce over {' and '.join(missing(grad, spec))} of the gradient of"

    expected = lambda: jax.tree.map(by_gather, grads, specs)  # noqa: E731
    return checked(complete(grads, specs), expected, jax.tree.map(name, grads, specs))


def _total(program: Program, losses: dict[str, Array]) -> Array:
    first, *others = (losses[name] for name in program.form.targets)
    return sum(others, start=first)
