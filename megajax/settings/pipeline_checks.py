"""Check that a schedule fits the stages and layers, and that its table can be made. No JAX here."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.pipeline.config import PipelineConfig
from megajax.core.pipeline.schedule import SCHEDULES, schedule_names

_MOST_CELLS = 250_000  # in a schedule's table; making one this large takes some seconds


def check_schedule(pipeline: PipelineConfig, pipe: int, model: ModelConfig | None = None) -> None:
    """Check a schedule's chunks against the stages and, if there is a model, against its layers, or periods of layers
    of two kinds, except the first dense ones, which are computed with the embedding."""
    layers, num_layers, unit = "", None, "layer"
    if model is not None:
        layers = f"--model.num-layers {model.num_layers}"
        layers += f" less --model.dense-layers {model.dense_layers}" if model.dense_layers else ""
        sizes = model.layers_of_periods
        num_layers = len(sizes)
        if num_layers < model.num_blocks:
            unit = "period"
            layers += f" in {num_layers} periods of --model.linear-layers {model.linear_layers}"
    if pipeline.counts and model is not None:
        _check_counts(pipeline, pipe, model.layers_of_periods, layers)
        num_layers = None  # any such numbers are valid
    chunks, schedule = pipeline.chunks, f"--pipeline.schedule {pipeline.schedule}"
    others = f"--pipeline.schedule {' or '.join(schedule_names(chunked=False))}"
    if num_layers is not None and pipe > num_layers:
        raise UserError(
            f"--mesh.pipe {pipe} with {layers}, which leaves a stage without a {unit}; "
            f"valid: 1{f' to {num_layers}' if num_layers > 1 else ''}"
        )
    if not SCHEDULES[pipeline.schedule].chunked:
        if chunks != 1:
            valid = f"1, or --pipeline.schedule {' or '.join(schedule_names(chunked=True))}"
            raise UserError(f"--pipeline.chunks {chunks} with {schedule}; valid: {valid}")
        return
    if pipe == 1:
        raise UserError(f"{schedule} with --mesh.pipe 1; valid: --mesh.pipe 2 or more, or {others}")
    most = None if num_layers is None else num_layers // pipe
    if most is not None and most < 2:
        raise UserError(
            f"{schedule}: {layers} are too few for 2 chunks on each of "
            f"--mesh.pipe {pipe} stages; valid: {others}, or {2 * pipe} {unit}s or more"
        )
    if chunks < 2 or (most is not None and chunks > most):
        why = f", which leaves a stage without a {unit}" if chunks >= 2 else ""
        raise UserError(
            f"--pipeline.chunks {chunks} with {schedule}{why}; "
            f"valid: {'2 or more' if most is None else f'2 to {most}' if most > 2 else '2'}"
        )


def _check_counts(pipeline: PipelineConfig, pipe: int, periods: Sequence[int], layers: str) -> None:
    """Check that there is a number of layers for every virtual stage, that they are all layers of the model, and that
    stages have whole periods, given the layers of each."""
    num_layers = sum(periods)
    needed, chunks = pipe * pipeline.chunks, f" x --pipeline.chunks {pipeline.chunks}" * (pipeline.chunks > 1)
    if (len(pipeline.counts), sum(pipeline.counts)) != (needed, num_layers):
        raise UserError(
            f"--pipeline.layers {pipeline.layers}: {len(pipeline.counts)} numbers with the sum {sum(pipeline.counts)}, "
            f"with --mesh.pipe {pipe}{chunks} and {layers}; valid: even, auto, or {needed} with the sum {num_layers}"
        )
    possible = [0, *accumulate(periods)]
    ends = [min((abs(end - wanted), end) for end in possible)[1] for wanted in accumulate(pipeline.counts)]
    near = ",".join(str(end - begin) for begin, end in pairwise([0, *ends]))
    if near != ",".join(map(str, pipeline.counts)):
        raise UserError(f"--pipeline.layers {pipeline.layers} with {layers}, which it divides; valid: even, or {near}")


def has_table(pipeline: PipelineConfig, pipe: int, microbatches: int) -> bool:
    """Whether a schedule's table is small enough to make."""
    return pipe * pipeline.chunks * microbatches <= _MOST_CELLS and pipe**2 <= _MOST_CELLS


def check_table(pipeline: PipelineConfig, pipe: int, microbatches: int, name: str) -> None:
    """Check that a schedule's table is small enough to make; `name` is what the message calls the microbatches."""
    if not has_table(pipeline, pipe, microbatches):
        size = pipe * pipeline.chunks * microbatches
        raise UserError(
            f"--mesh.pipe {pipe} x --pipeline.chunks {pipeline.chunks} x {name} {microbatches} is a table of {size} "
            f"forwards; valid: at most {_MOST_CELLS}, and {int(_MOST_CELLS**0.5)} stages"
        )
