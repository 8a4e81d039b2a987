"""All names of JAX that we use although they are not public, each with the public alternative that we hope for; and
what differs between the versions of JAX that we support."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

# The prefix of cuDNN's attention operations in a jaxpr; selective recomputation saves their results. Hoped for:
# `checkpoint_name` on the statistics in `jax.nn.dot_product_attention`, which its forward pass does not return.
FUSED_FORWARD = "dot_product_attention_fwd"

_interpreting = False
_CUDNN_ATTENTION = "jax._src.cudnn.fused_attention_stablehlo"


def backends_are_initialized() -> bool:
    """Whether this process has used JAX's devices, so that its flags are fixed; imports nothing. Hoped for: a function
    in `jax.extend.backend`."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@contextlib.contextmanager
def imagined_cudnn(version: int, capability: float) -> Iterator[None]:
    """A context in which `jax.nn.dot_product_attention` is traced for a GPU with this compute capability, for example
    9.0, and this version of cuDNN, instead of this machine's. Hoped for: that JAX asks the compilation target."""
    attention = importlib.import_module(_CUDNN_ATTENTION)
    answers = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda least: float(least) <= capability,
        "is_cuda_compute_capability_equal": lambda other: float(other) == capability,
    }
    before = {name: getattr(attention, name) for name in answers if hasattr(attention, name)}
    for name in before:
        setattr(attention, name, answers[name])
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(attention, name, function)


def has_gpu_kernels() -> bool:
    """Whether Pallas has what our kernels for GPUs need."""
    return _version() >= (0, 11)


def has_fusion_emitters() -> bool:
    """Whether XLA has the flag `xla_cpu_use_fusion_emitters`."""
    return _version() < (0, 11)


def whole_reference() -> tuple[Any, ...]:
    """The indices with which a kernel loads all of a reference: none, which 0.11.0 and 0.11.1 do not take."""
    return () if _version() >= (0, 11, 2) else ((),)


def _version() -> tuple[int, ...]:
    import jax  # here, since who only asks for other things need not wait for it

    return jax.__version_info__


def kernels_are_interpreted() -> bool:
    """Whether this is inside `interpreted_kernels`."""
    return _interpreting


@contextlib.contextmanager
def interpreted_kernels(*, detect_races: bool = False) -> Iterator[Callable[[], bool]]:
    """Inside, kernels for GPUs that are traced are interpreted on the CPU; yields a function that says whether a race
    was found. Hoped for: `InterpretGPUParams` and all of this in `jax.experimental.pallas.mosaic_gpu`."""
    global _interpreting
    interpret = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    params = interpret.InterpretGPUParams(detect_races=detect_races)
    with interpret.force_gpu_interpret_mode(params):
        _interpreting = True
        try:
            yield lambda: callbacks.get_races().races_found
        finally:
            _interpreting = False
            callbacks.reset_gpu_interpret_mode_state()


def tied(tree: Any) -> Any:
    """The tree, of which XLA uses nothing before all of it is computed. Before JAX 0.11.2 a barrier takes only arrays
    that vary over the same mesh axes; there every array has its own, which orders nothing."""
    import jax

    barrier = jax.lax.optimization_barrier
    return barrier(tree) if _version() >= (0, 11, 2) else jax.tree.map(barrier, tree)
