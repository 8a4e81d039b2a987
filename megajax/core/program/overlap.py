"""Whether a step's communication of weights and gradients overlaps with its passes, and whether its layers are
unrolled: forms that change speed and memory, but no number."""

from collections.abc import Iterable

from megajax.core.backend import Backend
from megajax.core.config import StepConfig
from megajax.core.parallel.shards import NOT_SHARDED
from megajax.core.program.weight import Weight, stacks_of


def reduces_per_step(config: StepConfig) -> bool:
    """Whether gradients are reduced once a step. ZeRO-3 has reduced them already, but for its replicas."""
    return (config.mesh.replica if config.optimizer.zero == 3 else config.mesh.batch_shards) > 1


def overlaps_reductions(config: StepConfig, backend: Backend, of_layers: int) -> bool:
    """Whether gradients are reduced during the last backward pass, given the `size_of_layers`."""
    if not reduces_per_step(config):
        return False
    if config.optimizer.overlap_reductions == "auto":
        return of_layers >= backend.overlapped_sums
    return config.optimizer.overlap_reductions == "true"


def overlaps_gathers(config: StepConfig, backend: Backend, of_layers: int, *, copied: bool) -> bool:
    """Whether ZeRO-1's updated weights of layers are gathered during the next step's first forward pass, and not at the
    end of the step, given the `size_of_layers` and whether layers multiply with `copied` ones, in float8: those are
    made of all layers' before the first pass. Nor are adapters, which are small. `auto`: not for a scan, which would
    wait for all layers, nor for several chunks, for which XLA would copy all of them."""
    if config.mesh.zero_shards == 1 or config.optimizer.zero != 1:
        return False
    if config.lora.rank or copied:
        return False
    if config.optimizer.overlap_gathers == "auto":
        one_by_one = not scans_layers(config, backend) and config.pipeline.chunks == 1
        return one_by_one and of_layers >= backend.overlapped_sums
    return config.optimizer.overlap_gathers == "true"


def size_of_layers(trained: Iterable[Weight]) -> int:
    """How many numbers a device computes the layers with, given the trained weights."""
    return sum(each.size(NOT_SHARDED) for each in trained if each.stack)


def scans_layers(config: StepConfig, backend: Backend) -> bool:
    """Whether the layers run as one scan (compile time flat in their number) or unrolled.

    `auto`: unrolled up to the backend's number of layers, because steps are then faster but compile for longer
    (docs/benchmarks). With ZeRO-3 always scanned: if layers are unrolled, XLA gathers the weights once for forward and
    backward, and keeps them in between.
    """
    if config.model.scan_layers == "auto":
        slots = sum(stack.layers_per_chunk for stack in stacks_of(config).values())
        return slots > backend.unroll_layers or config.optimizer.zero == 3
    return config.model.scan_layers == "true"
