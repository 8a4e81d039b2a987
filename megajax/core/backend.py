"""Everything that differs between CPUs and GPUs; docs/benchmarks has the measurements. Before a training, GPUs compare
what is fused with plain code, and do without what is wrong (`program/fused_forms.py`)."""

import math
from dataclasses import dataclass, replace

from jax.sharding import Mesh

BLOCKS = ("blocks",)  # the implementation of attention that every device has
_MOST_BLOCKS = 32


@dataclass(frozen=True)
class Backend:
    """The forms that suit a kind of device. They change speed and memory, never the result beyond rounding."""

    unroll_layers: float  # `--model.scan-layers auto` unrolls up to this many layers of a chunk; more are one scan
    attention: tuple[str, ...]  # its implementations (`models/attend.py`), of which the first that fits is used
    query_block: int  # our own attention processes queries in blocks of this many (`block_of`)
    scores_bytes: int | None  # and as many heads at once as keep a block's scores within this; None: all heads
    transposed_copies: bool  # the input of a weight gradient's product is transposed by a copy, not by the product
    # `--optimizer.overlap-reductions auto` overlaps the sums of at least so many gradients: the last backward pass is
    # compiled apart from the others.
    overlapped_sums: float = math.inf
    # Compiler options to be zero with `--pipeline.paired-microbatches`: XLA would combine the last collective of one
    # microbatch with the first of the next, which then wait for each other.
    apart: tuple[str, ...] = ()
    # Always: XLA would merge two of the products of queries, keys and values, whose biases it then adds in a pass; and
    # to Triton's products it joins no GeLU.
    always: tuple[tuple[str, int | bool], ...] = ()
    # To be true with unrolled layers: XLA fails on norms of recomputed scans and stages (JAX 0.11.2, 0.12.0.1).
    unrolled: tuple[str, ...] = ()
    # With `--bitwise`: no fused multiply-adds, no half precision that is not rounded, no sums in another order.
    same_bits: tuple[tuple[str, bool | str], ...] = (("xla_allow_excess_precision", False),)
    # Activations (`models/mlp.py`) and gradients of biases in forms of which XLA for GPUs makes fewer kernels, and that
    # take CPUs more time. Sums widen bf16 by its bits: what is rounded for others, too, XLA would write in fp32 for a
    # conversion.
    forms_of_gpus: bool = False
    expert_block: int = 128  # dropless experts multiply blocks of so many rows (`models/grouped.py`),
    expert_kernel: bool = False  # by our own kernels what these can; else in a loop,
    expert_bytes: int = 0  # as many at once as have weights of this size; 0: one

    def blocks_at_once(self, weight_bytes: int) -> int:
        """How many blocks of rows dropless experts multiply at once, whose weights have so many bytes each."""
        return max(1, self.expert_bytes // weight_bytes)

    @property
    def fused_attention(self) -> bool:
        """Whether an implementation may be used whose scores never reach memory."""
        return self.attention != BLOCKS

    def asked(self, attention: str) -> "Backend":
        """The backend with the implementation of `--model.attention`. Our own blocks compute any attention that it does
        not support, as in an evaluation elsewhere, and everything on devices without another implementation."""
        if attention == "auto" or not self.fused_attention:
            return self
        return replace(self, attention=tuple(dict.fromkeys((attention, *BLOCKS))))

    def without(self, implementation: str) -> "Backend":
        """The backend without an implementation of attention."""
        return replace(self, attention=tuple(name for name in self.attention if name != implementation))

    @property
    def deterministic(self) -> "Backend":
        """The backend for `--deterministic`: without cuDNN's attention, whose deterministic form ends the run with an
        IndexError of XLA (JAX 0.11.2, cuDNN 9.19); and one block of experts at a time, since the gradients of several
        are added in any order."""
        return replace(self.without("cudnn"), expert_bytes=0)

    def block_of(self, length: int) -> int:
        """Queries per block of our own attention: half of the sequence, since keys after a block are skipped; between
        128 and `query_block`, but with at most 32 blocks, each of which is compiled."""
        return max(min(self.query_block, max(128, length // 2)), -(-length // _MOST_BLOCKS))


# Scores of 16 MiB stay in the cache. XLA's fast products (YNNPACK) do not take a transposed left operand.
CPU = Backend(
    unroll_layers=8,
    attention=BLOCKS,
    query_block=256,
    scores_bytes=2**24,
    transposed_copies=True,
    expert_block=64,
    same_bits=(
        ("xla_allow_excess_precision", False),
        ("xla_cpu_enable_platform_dependent_math", False),
        ("xla_disable_hlo_passes", "fusion"),
        ("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"),
    ),
)
GPU = Backend(
    unroll_layers=math.inf,
    attention=("cudnn", *BLOCKS),
    query_block=128,
    scores_bytes=None,
    transposed_copies=False,
    overlapped_sums=2**26,  # an H200 reduces their 2^28 bytes in 0.7 ms
    always=(("xla_gpu_dot_merger_threshold_mb", 0), ("xla_gpu_enable_triton_gemm", False)),
    apart=("xla_gpu_reduce_scatter_combine_threshold_bytes", "xla_gpu_all_gather_combine_threshold_bytes"),
    forms_of_gpus=True,
    unrolled=("xla_gpu_enable_cudnn_layer_norm",),  # an H200 takes 1.5% less time for a step of gpt2-1.2b
    expert_bytes=2**28,  # a turn of a loop costs an H200 27 us: one block in each made a step ten times as long
)
# The GPUs that our own kernels are for.
HOPPER = replace(GPU, attention=("cudnn", "kernel", *BLOCKS), expert_kernel=True)


def backend_of(mesh: Mesh) -> Backend:
    """The backend of a mesh's devices."""
    if mesh.devices.flat[0].platform == "cpu":
        return CPU
    return HOPPER if getattr(mesh.devices.flat[0], "compute_capability", "") == "9.0" else GPU
