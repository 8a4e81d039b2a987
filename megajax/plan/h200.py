"""Compile train steps for H200s on a machine without one; needs JAX's CUDA packages (`pip install 'jax[cuda13]'`).

Structure, bytes and schedules are those of the real program; nothing is timed.
"""

import importlib.util
import re
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import distributions
from typing import TYPE_CHECKING

from megajax.core.private import imagined_cudnn

if TYPE_CHECKING:
    import jax

# What XLA needs to know about a device (`stream_executor/device_description.proto`); `_target` adds the versions of
# libraries. JAX 0.12's wheels have such a description, too, but nothing public reads it.
_DEVICE = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""


def compiles_for(gpu: str) -> bool:
    """Whether a step can be compiled for this GPU here: JAX's CUDA packages are installed, and it is an H200, or an
    H100, which is the same chip with less memory."""
    plugins = (importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return gpu in ("h100", "h200") and any(plugins)


def attention() -> AbstractContextManager[None]:
    """A context in which attention is traced as on an H200, whatever GPU this machine has."""
    major, minor, patch = _cudnn()
    return imagined_cudnn(version=10_000 * major + 100 * minor + patch, capability=9.0)


def devices(count: int) -> "list[jax.Device]":
    """This many H200s to compile for."""
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="cuda", target_config=_target(), topology=f"1x1x{count}")
    return list(found.devices)


def _target() -> str:
    """The device with the libraries that are installed here, for which its programs are compiled."""
    fields = (
        f"{name} {{ major: {major} minor: {minor} patch: {patch} }}\n"
        for name, (major, minor, patch) in zip(("dnn_version_info", "runtime_version"), _versions(), strict=True)
    )
    return _DEVICE + "".join(fields)


@cache
def _cudnn() -> tuple[int, int, int]:
    """Its version; every trace asks for it."""
    return _versions()[0]


def _versions() -> tuple[tuple[int, int, int], ...]:
    """The installed versions of cuDNN and of CUDA's runtime; those with JAX 0.11.2 on our H200 where they are not."""
    versions = {"cudnn": (9, 19, 0), "cuda-runtime": (13, 0, 0)}
    for each in distributions():
        if library := re.fullmatch(r"nvidia-(cudnn|cuda-runtime)(-cu\d+)?", each.name or ""):
            major, minor, patch, *_ = [*map(int, re.findall(r"\d+", each.version)), 0, 0]
            versions[library[1]] = major, minor, patch
    return tuple(versions.values())
