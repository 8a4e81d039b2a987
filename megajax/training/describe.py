"""What a run prints before it starts: model, mesh, pipeline, state, optimizer, data."""

import dataclasses
from collections.abc import Mapping

import jax
from flax.traverse_util import flatten_dict

from megajax.core.models.context_attention import elements_sent
from megajax.core.models.freeze import names_of, untrained_layers
from megajax.core.models.lora import LORA
from megajax.core.models.staged import count_parameters
from megajax.core.optim.config import OptimizerConfig
from megajax.core.options import counted
from megajax.core.pipeline.timing import StageTimes, pending_weights, step_time
from megajax.core.program.memory import factor_bytes, kept_bytes, left_by_zero, state_bytes, whole_bytes
from megajax.core.program.program import Program
from megajax.plan.memory import memory, padding
from megajax.plan.sizes import ITEM_SIZE
from megajax.runs.data import RunData
from megajax.runs.order import Order
from megajax.runs.task_data import TaskData
from megajax.settings.config import Config
from megajax.start.launch import gpu_flags
from megajax.training.given import OwnData
from megajax.training.recheck import recheck_line

_OF_RATE = "learning_rate min_learning_rate warmup schedule decay_steps cooldown_steps cooldown_shape"


def describe(
    config: Config,
    program: Program,
    data: RunData | TaskData | OwnData,
    order: Order,
    earlier: OptimizerConfig | None = None,
) -> str:
    """A run in a few lines of text; `earlier` is the optimizer of its last start, None for a new run."""
    state = state_bytes(program)
    platform, sequence = jax.devices()[0].platform, ", sequence parallel" if config.sequence_parallel else ""
    lines = [
        f"model: {count_parameters(config.model):,} parameters, {counted(config.model.num_layers, 'layer')} of "
        f"{config.model.hidden_size}, {config.precision}",
        *_adapters(program),
        _frozen(program),
        f"mesh: {config.mesh} on {counted(jax.device_count(), f'{platform.upper()} device')}, "
        f"{counted(jax.process_count(), 'process')}{sequence}",
        *pipeline_lines(program),
        _layers_line(config, program),
        _context_line(program),
        f"state: {sum(state.values()) / 2**20:,.1f} MiB per device ({_mebibytes(state)}), "
        f"{config.optimizer.zero_flags}",
        _left_by_zero(program),
        _step_memory(config, program),
        _optimizer(program),
        *_rate(program, earlier),
        batch_line(config),
        _average(config),
        *_ramp(config, order),
        recheck_line(config, program),
        *data.lines(config),
    ]
    lines.append(precision_line(config.precision, platform))
    if platform == "gpu":
        lines.append(f"XLA: {' '.join(gpu_flags())}")
    warning = rate_warning(config) if program.layout.has_our_rate else ""
    return "\n".join(filter(None, [*lines, warning]))


def precision_line(precision: str, platform: str) -> str:
    """A line about a precision that is slow on the devices; empty if it is not."""
    if (precision, platform) == ("fp8", "cpu"):
        return "precision: on a CPU fp8 is slower than bf16 and only good for checking"
    if (precision, platform) == ("fp32", "gpu"):
        return "warning: --precision fp32 leaves tensor cores idle (TF32 is off); --precision bf16 uses them"
    return ""


def _context_line(program: Program) -> str:
    """How attention reaches the tokens of the other devices of a context group."""
    config, way = program.config, program.model.boundary.context
    if way == "none":
        return ""
    numbers = elements_sent(config.model, config.mesh.sizes, config.train.remat, config.precision)
    sent = (f"{name} {each * ITEM_SIZE[config.precision] / 2**20:,.1f} MiB" for name, each in numbers.items())
    return (
        f"context: {config.model.sequence_length // config.mesh.context} tokens per device; "
        f"attention by {way}, sent per layer and sequence: {', '.join(sent)}"
    )


def _left_by_zero(program: Program) -> str:
    """What ZeRO cannot save, where something divides a batch."""
    config, (names, whole, padding) = program.config, left_by_zero(program.layout)
    if config.mesh.zero_shards == 1 or not whole + padding:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    stays = f"{shown} cannot be sharded: {whole / 2**10:,.1f} KiB of their state on every device; " if names else ""
    return f"ZeRO: {stays}{padding / 2**10:,.1f} KiB per device are zeros that make dims of weights divisible"


def pipeline_lines(program: Program) -> list[str]:
    """The schedule, and what deferring the weight gradients saves and costs."""
    pipeline, pipe, table = program.config.pipeline, program.config.mesh.pipe, program.schedule
    deferring = pipeline.deferring()
    if pipe == 1:
        return (
            []
            if deferring is None
            else ["pipeline: a single stage, so --pipeline.weight-gradients deferred has no effect"]
        )
    without = dataclasses.replace(table, deferral=None)
    together = step_time(without, StageTimes.equal(without))
    bubble = f"{step_time(table).bubble:.1%}" + ("" if deferring is None else f" instead of {together.bubble:.1%}")
    lines = [
        f"pipeline: {pipeline.schedule}, {table.size}; bubble {bubble} of the ideal time (assuming equal pass times)"
    ]
    if deferring is None:
        return lines
    saved = deferring.weight_gradient / table.num_chunks / together.wall
    factors = factor_bytes(program) / 2**20
    lines.append(
        f"weight gradients: deferred for up to {max(pending_weights(table))} chunks per stage; "
        f"each saves up to {saved:.2%} of the step and takes "
        f"{factors:,.1f} MiB; the buffer takes {table.num_factor_slots * factors:,.1f} MiB"
    )
    return lines


def _layers_line(config: Config, program: Program) -> str:
    """How many layers uneven stages have, and what padding them costs."""
    layout, placement = program.layout, program.layout.placement
    if not any(stack.padded for stack in layout.stacks.values()):
        return ""
    if "" not in layout.stacks:
        slots = sum(stack.run for stack in layout.stacks.values())
        return f"layers: {placement} periods, each with slots for {slots} layers, of which some hold none"
    line = f"layers: {placement}, padded to {placement.layers_per_chunk}"
    size = padding(config, memory(config, program.backend)) / 2**20
    return f"{line}: up to {size:,.1f} MiB per device hold none"


def _step_memory(config: Config, program: Program) -> str:
    plan = memory(config, program.backend)
    parts = {
        "stored activations": plan.kept,
        "factors": plan.factors,
        "p2p transfers": plan.p2p_transfers,
        "temporaries (estimate)": plan.temporaries,
    }
    return f"memory: {plan.total / 2**20:,.1f} MiB per device planned, state and batch included ({_mebibytes(parts)})"


def _mebibytes(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items() if size)


def batch_line(config: Config) -> str:
    """Sequences per step, and the microbatches of each data-parallel rank."""
    train, ranks = config.train, config.mesh.row_shards
    count = train.global_batch // (ranks * train.microbatch)
    parts = f"{count} microbatches of {train.microbatch} with gradient accumulation"
    alone = f"one microbatch of {train.microbatch}, no gradient accumulation"
    each = f"on each of {ranks} data-parallel ranks " if ranks > 1 else ""
    return f"batch: {counted(train.global_batch, 'sequence')} per step; {each}{parts if count > 1 else alone}"


def _ramp(config: Config, order: Order) -> list[str]:
    train = config.train
    stages = [stage for stage in order.sizes.stages if stage.first_step >= order.parts[-1].step]
    if len(stages) == 1:
        return []
    return [
        f"global batch: {counted(stages[0].size, 'sequence')}, growing by {train.ramp_increment} to "
        f"{train.global_batch} at step {stages[-1].first_step + 1:,}; {len(stages)} sizes, each "
        "compiled when it is reached"
    ]


def _optimizer(program: Program) -> str:
    config = program.config.optimizer
    weights = program.layout.canonical_shapes.params
    trained = weights.get(LORA, weights)
    flat, decays = flatten_dict(trained), flatten_dict(program.layout.decays)
    decayed, others = (sum(leaf.size for path, leaf in flat.items() if decays[path] == each) for each in (True, False))
    if program.layout.own is not None:
        return own_optimizer_line(program)
    name = "AdamW"
    if config.name == "muon":
        matrices = sum(flat[path].size for path in program.layout.matrices)
        rate = f" at {config.adamw_learning_rate:g}" if config.adamw_learning_rate else ""
        name = f"Muon ({config.muon_scale}) on {matrices:,} parameters, AdamW{rate} on {decayed + others - matrices:,}"
    return (
        f"optimizer: {name}, weight decay {config.weight_decay:g} on {decayed:,} parameters, none "
        f"on {others:,} (biases and norms)"
    )


def own_optimizer_line(program: Program) -> str:
    """Whether an optimizer of the user's takes ZeRO's shards; if it does not, why, and what that costs."""
    layout, name = program.layout, program.config.optimizer.name
    if not layout.mixing:
        return f"optimizer: {name}, which updates every number by itself, on ZeRO's shards"
    kept, during = kept_bytes(layout)["moments"], sum(whole_bytes(layout).values())
    return (
        f"optimizer: {name}, on whole weights, for it has {layout.mixing}: every device keeps all of its state, "
        f"{kept / 2**20:,.1f} MiB, and computes every update, for which it takes {during / 2**20:,.1f} MiB more"
    )


def _rate(program: Program, earlier: OptimizerConfig | None) -> list[str]:
    """The learning rate, unless an optimizer of the user's has its own."""
    config = program.config
    if not program.layout.has_our_rate:
        return []
    changed = changed_rate(earlier, config.optimizer) if earlier else ""
    return [f"learning rate: {rate_line(config.optimizer)}", changed]


def rate_line(config: OptimizerConfig) -> str:
    """The schedule of the learning rate in words."""
    peak, floor, end = f"{config.learning_rate:g}", f"{config.min_learning_rate:g}", f"{config.decay_steps:,}"
    rising = f"{peak} after {config.warmup:,} steps of warm-up" if config.warmup else peak
    if config.schedule == "constant":
        return f"{rising}, constant"
    if config.schedule == "inverse-square-root":
        return f"{rising}, then 1/sqrt(step) decay, never below {floor}"
    if config.schedule == "wsd":
        begin = config.decay_steps - config.cooldown_steps
        return f"{rising}, from step {begin:,} down to {floor} at step {end} ({config.cooldown_shape})"
    return f"{rising}, down to {floor} at step {end} ({config.schedule})"


def changed_rate(earlier: OptimizerConfig, now: OptimizerConfig) -> str:
    """How a start changes the run's learning rate; empty if it does not."""
    changes = [
        f"{name} {before} -> {after}"
        for name in _OF_RATE.split()
        if (before := getattr(earlier, name)) != (after := getattr(now, name))
    ]
    return f"learning rate changed: {', '.join(changes)}" if changes else ""


def _average(config: Config) -> str:
    """A line about the average of the weights, if there is one."""
    what = "used for validation, evaluation, generation and export"
    return f"weight average: --train.ema {config.train.ema:g}, {what}" if config.train.ema else ""


def _adapters(program: Program) -> list[str]:
    """A line about LoRA, if it is used."""
    lora, model = program.config.lora, program.config.model
    if not lora.rank:
        return []
    adapters = jax.tree.leaves(program.layout.canonical_shapes.params[LORA])
    trained, frozen = sum(leaf.size for leaf in adapters), count_parameters(model)
    return [
        f"LoRA: {trained:,} trainable parameters ({trained / frozen:.2%} of the frozen model's); "
        f"rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.products(model))}"
    ]


def _frozen(program: Program) -> str:
    """A line about frozen weights, if there are any."""
    layout = program.layout
    if not layout.frozen:
        return ""
    flat, names = flatten_dict(layout.canonical_shapes.params), ",".join(names_of(program.config.train.freeze))
    count = sum(round(flat[path].size * mask.mean()) for path, mask in layout.frozen.items())
    left_out = untrained_layers(layout.frozen, program.model.shapes, program.config.model)
    without = f"; the backward pass leaves out {left_out} layers" if left_out else ""
    return f"frozen: {count:,} parameters (--train.freeze {names}){without}"


def rate_warning(config: Config) -> str:
    """A warning if training ends during the warm-up, or before or after the end of the decay; else empty."""
    optimizer, steps = config.optimizer, config.train.steps
    if steps <= optimizer.warmup:
        reached = f"{(steps - 1) / optimizer.warmup:.0%} of --optimizer.learning-rate {optimizer.learning_rate:g}"
        return f"warning: --train.steps {steps} ends during the warm-up of {optimizer.warmup} steps, at {reached}"
    if not optimizer.ends_decay or steps == optimizer.decay_steps:
        return ""
    if steps < optimizer.decay_steps:
        return (
            f"warning: --train.steps {steps} ends before --optimizer.decay-steps "
            f"{optimizer.decay_steps}, where the learning rate would reach its floor, "
            f"--optimizer.min-learning-rate {optimizer.min_learning_rate:g}"
        )
    nothing = ", so the model stops learning" if optimizer.min_learning_rate == 0 else ""
    return (
        f"warning: --train.steps {steps} is past --optimizer.decay-steps {optimizer.decay_steps}: "
        "after that the learning rate stays at its floor, --optimizer.min-learning-rate "
        f"{optimizer.min_learning_rate:g}{nothing}"
    )
