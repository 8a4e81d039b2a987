"""The lines that a run prints before it starts: model, mesh, state, optimizer, data."""

import jax

from megajax.config import Config
from megajax.launch import gpu_flags
from megajax.models.family import count_parameters
from megajax.optim.adam import parameter_groups
from megajax.program.memory import state_bytes
from megajax.program.program import Program
from megajax.runs.data import RunData
from megajax.runs.task_data import TaskData


def describe(program: Program, data: RunData | TaskData) -> str:
    """A run in a few lines of text."""
    config = program.config
    lines = [
        f"model: {count_parameters(config.model):,} parameters, {config.model.num_layers} layers of "
        f"{config.model.hidden_size}, {config.precision}",
        _mesh(config),
        _state(program),
        _optimizer(program),
        *data.lines(config),
    ]
    if jax.devices()[0].platform == "gpu":
        lines.append(f"XLA: {' '.join(gpu_flags())}")
    return "\n".join(lines)


def _mesh(config: Config) -> str:
    mesh = config.mesh
    sequence = ", sequence split over tensor" if config.sequence_parallel else ""
    return (
        f"mesh: data {mesh.data} x pipe {mesh.pipe} x tensor {mesh.tensor} on {jax.device_count()} "
        f"{jax.devices()[0].platform} devices, {jax.process_count()} processes{sequence}"
    )


def _state(program: Program) -> str:
    parts = state_bytes(program)
    each = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in parts.items() if size)
    zero = program.config.optimizer.zero
    return f"state: {sum(parts.values()) / 2**20:,.1f} MiB a device ({each}), --optimizer.zero {zero}"


def _optimizer(program: Program) -> str:
    config = program.config.optimizer
    decayed, others = parameter_groups(program.layout.natural_shapes.params)
    return (
        f"optimizer: AdamW, {config.schedule} learning rate up to {config.learning_rate:g}, weight decay "
        f"{config.weight_decay:g} on {decayed:,} parameters, none on {others:,} (biases, LayerNorm)"
    )
