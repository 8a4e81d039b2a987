"""What form of the program a configuration asks for."""

from megajax.backend import Backend
from megajax.config import Config
from megajax.parallel.collectives import PIPE, TENSOR, Axes
from megajax.parallel.split import Split


def vocabulary_axes(config: Config) -> Axes:
    """The mesh axes that the vocabulary is split over."""
    return (PIPE, TENSOR) if config.splits_vocabulary else TENSOR


def batch_names(config: Config) -> tuple[str, ...]:
    """The arrays of a batch of text, int32 [rows, T]."""
    return ("tokens", "targets", "positions") if config.data.reset_attention else ("tokens", "targets")


def training_split(config: Config) -> Split:
    """How the model is split over tensor groups in a training step."""
    return Split(vocabulary_axes(config), config.sequence_parallel, regather=config.train.remat != "layer")


def scan_layers(config: Config, backend: Backend) -> bool:
    """Whether the layers run as one scan (compile time flat in their number) or unrolled.

    `auto`: unrolled up to the number of layers that the backend says, since a step is faster then and compiles for
    longer (docs/benchmarks). With ZeRO-3 scanned: of unrolled layers XLA gathers the weights once for forward and
    backward, and keeps them.
    """
    if config.model.scan_layers == "auto":
        layers_per_chunk = -(-config.model.num_layers // (config.mesh.pipe * config.pipeline.chunks))
        return layers_per_chunk > backend.unroll_layers or config.optimizer.zero == 3
    return config.model.scan_layers == "true"
