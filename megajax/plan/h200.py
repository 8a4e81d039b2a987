"""Compile train steps for H200s on a machine without one; needs JAX's CUDA packages (`pip install 'jax[cuda13]'`).

Structure, bytes and schedules are those of the real program; nothing is timed.
"""

import importlib.util
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from megajax.core.private import imagined_cudnn

if TYPE_CHECKING:
    import jax

# What XLA needs to know about a device (`stream_executor/device_description.proto`). The wheels include no other GPU.
TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  core_count: 132  fpus_per_core: 128  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


def compiles_for(gpu: str) -> bool:
    """Whether a step can be compiled for this GPU here: JAX's CUDA packages are installed, and it is an H200, or an
    H100, which is the same chip with less memory."""
    return gpu in ("h100", "h200") and any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)
    )


def attention() -> AbstractContextManager[None]:
    """A context in which attention is traced as on an H200, whatever GPU this machine has."""
    return imagined_cudnn(version=91900, capability=9.0)


def devices(count: int) -> "list[jax.Device]":
    """This many H200s to compile for."""
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology=f"1x1x{count}").devices)
