"""The real train step of a mesh, traced and compiled without its devices: for simulated CPU devices, or for H200s if
JAX's CUDA packages are installed. Nothing is allocated and nothing runs.

XLA's CPU compiler does not optimize the machine code here, which changes no buffers and saves most of the time. And it
leaves in loops what does not change there: older versions would hold all weights and activations of a stage once more,
converted to fp32, in which CPUs compute; a GPU holds nothing twice.
"""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import jax
from jax.stages import Compiled, Traced

from megajax.core.mesh import shardings
from megajax.core.program.communication import Collective, collectives_of
from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step
from megajax.host.phases import phase
from megajax.plan import h200
from megajax.settings.config import Config

_AS_ON_GPUS = {"xla_backend_optimization_level": 0, "xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


@dataclass(frozen=True)
class CompiledStep:
    """What a compiler reports about a train step."""

    compiler: str  # the compiler and its target, in words
    state: int  # bytes of its arguments on a device: weights, optimizer state and batch
    temporaries: int  # bytes of everything else that a device needs to run it
    collectives: tuple[Collective, ...]  # its communication, as traced; includes what conditionals skip
    seconds: float  # time to trace and compile


def scanned(config: Config) -> Config:
    """`config` with its layers as one scan, and one microbatch an iteration, for two help unrolled layers alone: the
    same step, in a program whose size does not grow with their number."""
    pipeline = replace(config.pipeline, paired_microbatches=False)
    return replace(config, model=replace(config.model, scan_layers="true"), pipeline=pipeline)


def traced_step(config: Config, devices: list[jax.Device]) -> Traced:
    """The train step of `config`, traced with the types of its state and batch."""
    program = Program.on(config, devices)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        program.layout.shapes,
        shardings(program.mesh, program.layout.specs),
    )
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=program.batch_shardings[name])
        for name, leaf in program.batch_types.items()
    }
    return train_step(program).trace(state, batch)


def for_h200s(config: Config) -> Compiled:
    """The train step of `config`, compiled for as many H200s as its mesh has devices."""
    with h200.attention():
        return traced_step(config, h200.devices(config.mesh.num_devices)).lower().compile()


class Compilation:
    """The train step of `config`, traced at once and compiled in the background until the `result` is needed: for
    H200s, or for the first simulated devices of this process, of which there must be enough
    (`launch.imagine_devices`)."""

    def __init__(self, config: Config, *, gpus: bool = False):
        began, count = time.perf_counter(), config.mesh.num_devices
        with h200.attention() if gpus else contextlib.nullcontext():
            traced = traced_step(config, h200.devices(count) if gpus else jax.devices("cpu")[:count])
            lowered = traced.lower()
        kind = f"H200{'s' if count > 1 else ''}" if gpus else f"simulated CPU device{'s' if count > 1 else ''}"
        kind += " (which compute in fp32)" * (not gpus and config.precision in ("bf16", "fp16", "fp8"))

        def compiled() -> CompiledStep:
            memory = lowered.compile(None if gpus else _AS_ON_GPUS).memory_analysis()
            return CompiledStep(
                f"XLA of jaxlib {jax.lib.__version__} for {count} {kind}",
                memory.argument_size_in_bytes,
                memory.temp_size_in_bytes,
                tuple(collectives_of(traced.jaxpr)),
                time.perf_counter() - began,
            )

        self.gpus, compiler = gpus, ThreadPoolExecutor(1)  # XLA releases the interpreter lock
        self._made = compiler.submit(compiled)
        compiler.shutdown(wait=False)

    def result(self) -> CompiledStep:
        """Wait for the compiler, and return its result."""
        with phase("compiling the step"):
            return self._made.result()
