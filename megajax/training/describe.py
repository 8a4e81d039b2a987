"""The lines that a run prints before it starts: model, mesh, state, optimizer, data."""

from collections.abc import Iterator

import jax

from megajax.config import Config
from megajax.data.blend import BlendedSamples
from megajax.launch import gpu_flags
from megajax.models.family import count_parameters
from megajax.optim.adam import parameter_groups
from megajax.program.memory import state_bytes
from megajax.program.program import Program
from megajax.runs.data import RunData


def describe(program: Program, data: RunData) -> str:
    """A run in a few lines of text."""
    config = program.config
    lines = [
        f"model: {count_parameters(config.model):,} parameters, {config.model.num_layers} layers of "
        f"{config.model.hidden_size}, {config.precision}",
        _mesh(config),
        _state(program),
        _optimizer(program),
        *_data(config, data),
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


def _data(config: Config, data: RunData) -> Iterator[str]:
    """A line for every corpus; in an epoch every sample of the corpus is seen once."""
    blended = isinstance(data.train, BlendedSamples)
    parts = data.train.sources if isinstance(data.train, BlendedSamples) else [data.train]
    shares = data.train.blend.shares if isinstance(data.train, BlendedSamples) else [1.0]
    for corpus, samples, share in zip(data.corpora, parts, shares, strict=True):
        report = corpus.report
        skipped = f", {report.skipped_files} files skipped that are not UTF-8" if report.skipped_files else ""
        alone = f", {report.single_sentence_documents:,} of them of one sentence" if report.sentences else ""
        sentences = f"{report.sentences:,} sentences of " if report.sentences else ""
        yield (
            f"data{f' ({share:.4g} of the samples)' if blended else ''}: {report.tokens:,} tokens in {sentences}"
            f"{report.documents:,} documents{alone} of {report.source}{skipped}; "
            f"an epoch is {samples.epoch_size / share / config.train.global_batch:,.4g} steps"
        )
