"""What form of the program a configuration asks for."""

import jax

from megajax.config import Config
from megajax.parallel.collectives import PIPE, TENSOR, Axes
from megajax.parallel.split import Split


def vocabulary_axes(config: Config) -> Axes:
    """The mesh axes that the vocabulary is split over."""
    return (PIPE, TENSOR) if config.splits_vocabulary else TENSOR


def training_split(config: Config) -> Split:
    """How the model is split over tensor groups in a training step."""
    return Split(vocabulary_axes(config), config.sequence_parallel, regather=config.train.remat != "layer")


def scan_layers(config: Config) -> bool:
    """Whether the layers run as one scan (compile time flat in their number) or unrolled.

    `auto`: on CPU scanned (unrolled was 0-6% faster per step in paired runs, docs/benchmarks/cpu.md, and compiles for
    longer than it gains); on GPU unrolled (compiled ahead of time it moves far fewer bytes; not timed yet). With ZeRO-3
    scanned: of unrolled layers XLA gathers the weights once for forward and backward, and keeps them.
    """
    if config.model.scan_layers == "auto":
        return jax.default_backend() == "cpu" or config.optimizer.zero == 3
    return config.model.scan_layers == "true"
