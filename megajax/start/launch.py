"""The start of a process: its devices and its connection to other processes."""

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.core.config import AUTO, MeshConfig
from megajax.core.errors import UserError
from megajax.core.private import backends_are_initialized
from megajax.settings.config import Config
from megajax.settings.validation import check_devices
from megajax.start.compilation_cache import keep_compiled
from megajax.start.joining import find_others

# Simulated devices that share few cores reach a step's collectives late; XLA's default timeout is 40 seconds.
_PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 600,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 3600,
}

# These versions of jaxlib compute reductions on CPUs with YNNPACK, with wrong results (jax#39103), hangs (#39257) and
# crashes (#40412). Other versions may not know the flag, and exit if it is set.
_FAULTY_REDUCTIONS = (0, 10, 2), (0, 11, 2)  # first faulty version, first fixed version
_OFFLOADED = "--xla_cpu_experimental_ynn_fusion_type"
_EMITTERS = "--xla_cpu_use_fusion_emitters"

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # <malloc.h>

# Compiler options for GPUs that are not the default, or not in every version (docs/gpu.md explains them).
GPU_FLAGS = {
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
    "--xla_gpu_experimental_parallel_collective_overlap_limit": "4",
    "--xla_gpu_enable_triton_gemm": "false",  # gpt2-1.2b compiles in a third of the time, and is no slower
    # The first collective waits for every process to compile or load its program, by default for 40 seconds.
    "--xla_gpu_first_collective_call_warn_stuck_timeout_seconds": "600",
    "--xla_gpu_first_collective_call_terminate_timeout_seconds": "3600",
}
# Otherwise XLA has the GPU run kernels as one graph, in which a profile cannot tell whose they are.
PROFILE_FLAGS = {"--xla_gpu_enable_command_buffer": ""}
DETERMINISTIC_FLAGS = {"--xla_gpu_deterministic_ops": "true", "--xla_gpu_autotune_level": "0"}
# Share of GPU memory, 0.75 by default; the rest is for NCCL, cuBLAS and CUDA itself. Unmeasured with several GPUs; one
# H200 trained with 0.92.
GPU_MEMORY = "XLA_CLIENT_MEM_FRACTION", "0.88"


def start(config: Config) -> None:
    """Set up JAX for `config` before any other use of JAX: XLA's flags, precision, simulated devices, other processes,
    and the compilation cache. Flags set by the user stay."""
    runs = backends_are_initialized()  # then JAX has already read its flags
    if not runs:
        avoid_known_faults()
    if config.bitwise and _flags().get(_EMITTERS, "").endswith("=false"):  # without fusions they compute wrong sums
        raise UserError(f"XLA_FLAGS={_EMITTERS}=false with --bitwise {config.bitwise}; valid: without this flag")
    if config.distributed.process_id <= 0 and reductions_are_faulty():
        why = "JAX was used before megajax could set" if runs else "XLA_FLAGS overrides what avoids it:"
        _warn_of_reductions(why, os.environ.get("XLA_FLAGS", ""))
    _set_flags({} if runs else _PATIENCE)
    if not config.simulate_devices and may_use_gpus(os.environ):
        _set_gpu_flags(config)
        if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the old name; JAX refuses both together
            os.environ.setdefault(*GPU_MEMORY)
    else:
        _keep_freed_memory()
    import jax

    if runs_at_once(config):
        # Otherwise a step allocates its temporaries, hundreds of megabytes, before the previous step's are free.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    _set_precision(config)
    if config.distributed.process_id <= 0 and (level := getattr(jax.config, "jax_optimization_level", "O0")) not in (
        "UNKNOWN",
        "O0",
    ):
        _warn_of_optimization(level)
    if config.simulate_devices:
        _simulate(config.simulate_devices)
    if _is_multiprocess(config):
        find_others(config)
    keep_compiled(config)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter for a missing plugin, without a message
        found = next(iter(str(error).splitlines()), "no such plugin")
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(f"JAX_PLATFORMS={asked}: JAX finds no devices: {found}; valid: cpu, or without it") from error


@functools.cache
def _warn_of_reductions(why: str, _flags: str) -> None:
    """Print a warning, once per set of flags."""
    print(
        f"warning: jaxlib {importlib.metadata.version('jaxlib')} can compute wrong sums on CPUs (jax#39103), and {why} "
        f"{_OFFLOADED}=-reduce",
        file=sys.stderr,
    )


@functools.cache
def _warn_of_optimization(level: str) -> None:
    """Print a warning, once per level."""
    print(
        f"warning: JAX_OPTIMIZATION_LEVEL={level}: on GPUs steps may be slower: with O1 XLA repeats the forward pass "
        "(docs/gpu.md); valid: without it, or O0",
        file=sys.stderr,
    )


def _simulate(count: int) -> None:
    import jax

    if backends_are_initialized():
        present = jax.device_count() if jax.default_backend() == "cpu" else 0
        if present != count:
            raise UserError(
                f"--simulate-devices {count}: JAX was used before in this process, with {present} CPU "
                "devices; valid: request them before anything else uses JAX (in a notebook, after a "
                "restart)"
            )
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def check_mesh_of_flags(overrides: Mapping[str, Any]) -> None:
    """Refuse the mesh that flags name if it is known, without importing JAX, that there are other devices."""
    sizes = {key.removeprefix("mesh."): size for key, size in overrides.items() if key.startswith("mesh.")}
    alone = sizes and "distributed.coordinator" not in overrides and sizes.get("data") != AUTO
    if alone and (count := known_devices(overrides.get("simulate_devices", 0))):
        check_devices(MeshConfig(**sizes), count)


def known_devices(simulated: int) -> int:
    """How many devices `start` will find, where that is known without importing JAX, for which this process has not
    been set up yet: the `simulated` ones, or one CPU; otherwise 0."""
    if "jax" in sys.modules or in_cluster(os.environ):
        return 0
    if simulated:
        return simulated
    platforms, several = os.environ.get("JAX_PLATFORMS", ""), "device_count" in os.environ.get("XLA_FLAGS", "")
    plugins = any(map(importlib.util.find_spec, ("libtpu", "jax_plugins")))
    plugins |= bool(importlib.metadata.entry_points(group="jax_plugins"))
    only_cpu = platforms == "cpu" or not (platforms or plugins or _has_cuda())
    return int(only_cpu and not several and "JAX_NUM_CPU_DEVICES" not in os.environ)


def imagine_devices(config: Config, count: int | None = None) -> None:
    """Set up JAX, before any other use, to trace and compile for hardware that is not present: simulates `count`
    devices, by default as many as the mesh has, and sets the flags for GPUs."""
    avoid_known_faults()
    if _has_cuda():
        _set_gpu_flags(config)
    _simulate(count or config.mesh.num_devices)
    _set_precision(config)


def _set_precision(config: Config) -> None:
    import jax

    jax.config.update("jax_enable_x64", config.precision == "fp64")
    if config.precision == "fp32":
        jax.config.update("jax_default_matmul_precision", "float32")  # GPUs would use TF32


def _is_multiprocess(config: Config) -> bool:
    """Whether this is one of several processes."""
    return bool(config.distributed.coordinator) or in_cluster(os.environ)


def runs_at_once(config: Config) -> bool:
    """Whether a compiled program has finished when its call returns: with one CPU device in one process."""
    return config.simulate_devices <= 1 and not may_use_gpus(os.environ) and not _is_multiprocess(config)


def avoid_known_faults() -> None:
    """Before JAX is used, set the flags without which the installed jaxlib computes wrong results; the user's own
    flags stay."""
    if _has_faulty_reductions():
        _set_flags({_OFFLOADED: "-reduce"})


def reductions_are_faulty() -> bool:
    """Whether the installed jaxlib has the fault, given the flags that it will read."""
    kinds = _flags().get(_OFFLOADED, "=+reduce").partition("=")[2].split(",")  # `+reduce` is XLA's default
    changed = kinds[0].startswith(("+", "-"))  # relative to XLA's own list, instead of replacing it
    return _has_faulty_reductions() and ("-reduce" not in kinds if changed else "reduce" in kinds)


def _has_faulty_reductions() -> bool:
    first, fixed = _FAULTY_REDUCTIONS
    numbers = re.findall(r"\d+", importlib.metadata.version("jaxlib"))[:3]
    return first <= tuple(map(int, numbers)) < fixed


def _flags() -> dict[str, str]:
    """XLA's flags, as name -> "name=value"."""
    return {flag.partition("=")[0]: flag for flag in os.environ.get("XLA_FLAGS", "").split()}


def _set_flags(defaults: Mapping[str, object]) -> None:
    flags = {name: f"{name}={value}" for name, value in defaults.items()} | _flags()
    os.environ["XLA_FLAGS"] = " ".join(flags.values())


def _set_gpu_flags(config: Config) -> None:
    flags = GPU_FLAGS | (DETERMINISTIC_FLAGS if config.deterministic else {})
    _set_flags(flags | (PROFILE_FLAGS if config.profile else {}))


def _has_cuda() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def _keep_freed_memory() -> None:
    """Keep freed memory for the next allocation (glibc only). On CPUs XLA allocates a step's temporaries anew in every
    step, and clearing their pages each time would take about a tenth of a step (docs/benchmarks/cpu.md)."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
            mallopt(parameter, value)


def give_back_freed_memory() -> None:
    """Return free memory to the system once, for example after compiling."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_resident_bytes() -> int:
    """The peak memory use of this process, in bytes."""
    with contextlib.suppress(OSError):  # `getrusage` includes the process that started this one
        if found := re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def may_use_gpus(environment: Mapping[str, str]) -> bool:
    """Whether JAX will look for NVIDIA GPUs: its CUDA plugin is installed, and JAX_PLATFORMS does not exclude it."""
    platforms = environment.get("JAX_PLATFORMS", "").split(",")
    wanted = platforms == [""] or any(platform in ("cuda", "gpu") for platform in platforms)
    return wanted and _has_cuda()


def gpu_flags() -> list[str]:
    """XLA's GPU compiler flags in this process, for the log."""
    return [flag for name, flag in _flags().items() if name.startswith("--xla_gpu")]


def in_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a launcher (SLURM, Open MPI, Kubernetes) started several processes, which JAX then detects itself."""
    for processes, rank in (("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")):
        number = environment.get(processes, "1")
        if number.isdecimal() and int(number) > 1 and rank in environment:
            return True
    return "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
