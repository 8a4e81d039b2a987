"""The lines that a run prints before it starts: model, mesh, pipeline, state, optimizer, data."""

import dataclasses
from collections.abc import Mapping

import jax

from megajax.config import Config
from megajax.models.family import count_parameters
from megajax.models.lora import LORA
from megajax.optim.adam import parameter_groups
from megajax.pipeline.timing import StageTimes, pending_weights, step_time
from megajax.plan.memory import memory
from megajax.program.memory import factor_bytes, state_bytes
from megajax.program.program import Program
from megajax.runs.data import RunData
from megajax.runs.task_data import TaskData
from megajax.settings.launch import gpu_flags


def describe(program: Program, data: RunData | TaskData) -> str:
    """A run in a few lines of text."""
    config, state = program.config, state_bytes(program)
    platform, sequence = jax.devices()[0].platform, ", sequence split over tensor" if config.sequence_parallel else ""
    lines = [
        f"model: {count_parameters(config.model):,} parameters, {config.model.num_layers} layers of "
        f"{config.model.hidden_size}, {config.precision}",
        *_adapters(program),
        f"mesh: {config.mesh} on {jax.device_count()} {platform} devices, {jax.process_count()} processes{sequence}",
        *pipeline_lines(program),
        f"state: {sum(state.values()) / 2**20:,.1f} MiB a device ({_mebibytes(state)}), --optimizer.zero "
        f"{config.optimizer.zero}",
        _step_memory(program),
        _optimizer(program),
        *_ramp(config),
        *data.lines(config),
    ]
    if platform == "gpu":
        lines.append(f"XLA: {' '.join(gpu_flags())}")
    return "\n".join(filter(None, [*lines, past_decay(config)]))


def pipeline_lines(program: Program) -> list[str]:
    """The schedule, and what deferring the weight gradients saves and costs."""
    pipeline, pipe, table = program.config.pipeline, program.config.mesh.pipe, program.schedule
    deferring = pipeline.deferring()
    if pipe == 1:
        nothing = "pipeline: of one stage, --pipeline.weight-gradients deferred does nothing"
        return [] if deferring is None else [nothing]
    without = dataclasses.replace(table, deferral=None)
    together = step_time(without, StageTimes.equal(without))
    bubble = f"{step_time(table).bubble:.4f}" + ("" if deferring is None else f" instead of {together.bubble:.4f}")
    lines = [
        f"pipeline: {pipeline.schedule}, {table.size}; bubble over "
        f"ideal {bubble} where forward, input gradient and weight gradient take the same time"
    ]
    if deferring is None:
        return lines
    saved = deferring.times.weight_gradient / table.num_chunks / together.wall
    factors = factor_bytes(program) / 2**20
    lines.append(
        f"weight gradients: deferred, up to {max(pending_weights(table))} chunks of a stage wait "
        f"(--pipeline.max-deferred); each saves up to {saved:.2%} of the step and costs {factors:,.1f} MiB, their "
        f"buffer {table.num_factor_slots * factors:,.1f} MiB"
    )
    return lines


def _step_memory(program: Program) -> str:
    plan = memory(program.config, program.backend)
    parts = {
        "kept activations": plan.kept,
        "factors": plan.factors,
        "hand-overs": plan.hand_overs,
        "temporaries about": plan.temporaries,
    }
    return f"memory: {plan.total / 2**20:,.1f} MiB a device planned, state and batch included ({_mebibytes(parts)})"


def _mebibytes(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items() if size)


def _ramp(config: Config) -> list[str]:
    train = config.train
    stages = train.batch_sizes.stages
    if len(stages) == 1:
        return []
    return [
        f"global batch: {stages[0].size} sequences, growing by {train.ramp_increment} to {train.global_batch}, which "
        f"step {stages[-1].first_step + 1:,} has first; {len(stages)} sizes, each compiled when it is reached"
    ]


def _optimizer(program: Program) -> str:
    config = program.config.optimizer
    falling = ""
    if config.schedule == "wsd":
        first, last = config.decay_steps - config.cooldown_steps, config.decay_steps
        falling = f" until step {first:,} and down ({config.cooldown_shape}) to step {last:,}"
    weights = program.layout.canonical_shapes.params
    decayed, others = parameter_groups(weights.get(LORA, weights))
    return (
        f"optimizer: AdamW, {config.schedule} learning rate up to {config.learning_rate:g}{falling}, weight decay "
        f"{config.weight_decay:g} on {decayed:,} parameters, none on {others:,} (biases, LayerNorm)"
    )


def _adapters(program: Program) -> list[str]:
    """A line about LoRA, if it is used."""
    lora, model = program.config.lora, program.config.model
    if not lora.rank:
        return []
    trained, frozen = sum(parameter_groups(program.layout.canonical_shapes.params[LORA])), count_parameters(model)
    return [
        f"LoRA: {trained:,} parameters are trained, {trained / frozen:.2%} of the model's, which are frozen; rank "
        f"{lora.rank}, alpha {lora.alpha:g}, of {', '.join(lora.products(model))}"
    ]


def past_decay(config: Config) -> str:
    """A warning if training goes on after the learning rate has reached its floor; else empty."""
    optimizer, steps = config.optimizer, config.train.steps
    if not optimizer.ends_decay or steps <= optimizer.decay_steps:
        return ""
    nothing = ", and nothing is learned" if optimizer.min_learning_rate == 0 else ""
    return (
        f"warning: --train.steps {steps} is past --optimizer.decay-steps {optimizer.decay_steps}: from there on the "
        f"learning rate stays at its floor, --optimizer.min-learning-rate {optimizer.min_learning_rate:g}{nothing}"
    )
