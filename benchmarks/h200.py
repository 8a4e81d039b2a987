"""Train steps compiled for H200s on a machine without one: it needs JAX's CUDA packages (`pip install 'jax[cuda13]'`).

Structure, bytes and schedules are those of the real program; nothing is timed. Import it before JAX is used.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

from megajax.launch import GPU_FLAGS

os.environ.setdefault("XLA_FLAGS", " ".join(f"{name}={value}" for name, value in GPU_FLAGS.items()))

import jax
from jax._src.cudnn import fused_attention_stablehlo  # which asks this machine's GPU what it can: see below
from jax.experimental import topologies

from megajax.config import Config
from megajax.mesh import shardings
from megajax.program.program import Program
from megajax.program.train_step import train_step

CUDNN = 91900
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


def compiled_step(config: Config) -> jax.stages.Compiled:
    """The train step of `config`, compiled for as many H200s as its mesh has."""
    fused_attention_stablehlo.check_cudnn_version = lambda: CUDNN
    fused_attention_stablehlo.check_compute_capability = lambda capability: float(capability) <= 9.0
    fused_attention_stablehlo.is_cuda_compute_capability_equal = lambda capability: capability == "9.0"
    mesh = config.mesh
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology=f"1x1x{mesh.num_devices}")
    program = Program.on(config, topology.devices)
    state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        program.layout.shapes,
        shardings(program.mesh, program.layout.specs),
    )
    place = program.batch_sharding
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for name, leaf in program.batch_types.items()
    }
    return train_step(program).lower(state, batch).compile()
