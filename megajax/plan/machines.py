"""GPUs and what connects them: the one table of rates, bandwidths and efficiencies that `plan/time.py` computes with.

Vendor figures are without sparsity; the source stands above each machine. Efficiencies and traffic were calibrated for
H100s, and are assumed for other GPUs. They were not changed after our own measurements on one H200, which they predict
within 5%; only `Efficiency.turn` comes from one of these (docs/benchmarks/gpu.md).
"""

import re
from dataclasses import dataclass, field
from types import MappingProxyType

from megajax.core.errors import UserError
from megajax.start.launch import GPU_MEMORY

GIB = 2**30


@dataclass(frozen=True)
class Efficiency:
    """The shares of its rates that a GPU reaches, and fixed times."""

    # Of the peak, by a large matrix product. Two published runs on H100s, MaxText's of 7B and Megatron-LM's of 16B
    # (docs/benchmarks/planning.md).
    products: float = 0.70
    # Of the peak, by fused attention: the 9 ms that gpu-compiled.md assumes for the 3.6 TFLOP of 8,192 tokens of
    # gpt2-1.2b.
    attention: float = 0.40
    traffic: float = 4.3 / 4.8  # of the memory's bandwidth, by everything except products: assumed in gpu-compiled.md
    all_reduce: float = 370 / 450  # of the links inside a server, by all-reduces (NVIDIA/nccl#1374)
    others: float = 370 / 450  # and by other collectives (nccl#1374)
    network: float = 48.5 / 50  # of the adapters between servers (NVIDIA/nccl-tests#267)
    server_latency: float = 20e-6  # least seconds of a collective, an assumption
    network_latency: float = 46e-6  # the same between servers: a small all-reduce over two (nccl#1244)
    # Seconds of a turn of dropless experts' loop beside its product and its copies, from one measured step: the 619 ms
    # of two layers of olmoe-1b-7b with one block in a turn, on an H200 (docs/benchmarks/gpu.md).
    turn: float = 20e-6
    # Of the rate of a large product, by the kernels of dropless experts, padding counted: measured on an H200.
    grouped: float = 0.9
    fixed: float = 100e-6  # least seconds of a layer, forward and backward: 50 kernels of 2 us, an assumption


@dataclass(frozen=True)
class Kernel:
    """Our own kernels for attention (`megajax/core/kernels/`), by an estimate: without dropout as fast as fused
    attention (on an H200 they reached two thirds of cuDNN's rate, docs/benchmarks/gpu.md)."""

    # For dropout, whose bits each kernel hashes: more cycles of a multiprocessor for 64 x 64 scores of heads of 128
    # features, forward and backward (docs/benchmarks/gpu-compiled.md, JAX 0.12). At the peak, a cycle does 4,096 FLOP
    # of products, one for each score.
    dropped: tuple[float, float] = (980.0 - 275.0, 1731.0 - 820.0)


@dataclass(frozen=True)
class Overlap:
    """The share of a communication that overlaps with computation, at most as long as that takes (gpu-compiled.md,
    "What overlaps": read from programs compiled for H200s)."""

    tensor_forward: float = 0.0  # all-reduces of a layer
    tensor_backward: float = 50 / 65  # those of the backward pass: the share that has products to overlap with
    gathers: float = 87 / 194  # all-gathers of a split sequence
    scatters: float = 44 / 130  # and its reduce-scatters
    exchanges: float = 9 / 12  # all-to-alls of a context group's heads
    dispatch: float = 0.0  # all-to-alls of experts: the experts wait for their inputs, and the layer for their outputs
    keys: float = 0.5  # its gathers of keys and values: those of values overlap with the scores
    pairs: float = 0.55  # of a layer over tensor or expert, with those of another microbatch (llama3-8b, tensor 8)
    p2p_transfers: float = 1.0  # between stages: all of them, with a forward or backward
    shards: float = 0.5  # ZeRO-3's, with some of the same layer's products
    gradients: float = 0.0  # over data, after the loop: none
    reductions: float = 1.0  # of gradients during the last backward pass, but for the first layer's
    weights: float = 1.0  # ZeRO-1's during the first forward pass, but for the first layer's,
    weights_with_tensor: float = 0.36  # and between all-reduces over `tensor`


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step outside of products.

    Passes over an activation, forward and backward together, are fitted to the bytes that programs compiled for H200s
    move outside of products and fused attention (docs/benchmarks/gpu-compiled.md: gpt2-1.2b unrolled, and llama3-8b on
    tensor 8 unrolled with and without sequence parallelism: three figures for three numbers). We assume that the
    paper's programs make as many.
    """

    between: float = 49.0  # passes of a layer over the activations between its regions, [tokens, hidden]
    inside: float = 1.9  # over those inside, sharded over `tensor`: queries, keys, values, heads, the MLP's two
    gathered: float = 22.0  # with sequence parallelism, also over the gathered [tokens, hidden]
    dispatched: float = 12.0  # over the rows of experts: gathered, transposed, returned, weighted, both ways
    scanned: float = 1.5  # factor if layers run as one scan (1.3 to 2.0 in gpu-compiled.md's programs)
    # Bytes per score of attention that is not fused, forward and backward, in half precision, and for its dropout (on
    # H200s, per causal score: 52 together, from 701 against 348 GB in gpu-compiled.md; 27 without dropout, from
    # 42,063 GB there).
    scores: float = 27.0
    dropped: float = 25.0
    all_scores: bool = False  # whether scores of later keys are computed, too
    logits: float = 6.0  # passes over the logits
    accumulated: float = 17.7  # bytes of a weight and microbatch for adding its gradient: 5 ms of gpt2-1.2b
    updated: float = 30.0  # bytes of a weight for the optimizer: 8.4 ms of gpt2-1.2b


@dataclass(frozen=True)
class Machine:
    """A kind of GPU, its servers and the network between them. In bytes, bytes per second in one direction, and
    FLOP/s."""

    name: str  # its name for `--gpu`
    memory: int  # of a GPU
    peak: "MappingProxyType[str, float]"  # of matrix products by precision; others are not supported
    bandwidth: float  # of the memory
    server: int  # GPUs in a server
    link: float  # of a GPU, to others in its server
    network: float  # of a GPU, to other servers
    multiprocessors: int  # of a GPU, which share the tiles of a product
    fused_attention: bool = True  # whether fused attention without dropout exists
    kernel: Kernel | None = None  # whether our own kernel, with dropout and any mask, supports it
    efficiency: Efficiency = field(default_factory=Efficiency)
    overlap: Overlap = field(default_factory=Overlap)
    traffic: Traffic = field(default_factory=Traffic)
    margin: float = 0.0  # of what a program can use, kept free: a share, or from 1 on GiB

    @property
    def largest(self) -> int:
        """Bytes that a program can use: the share that `megajax.start.launch` lets JAX take."""
        return int(float(GPU_MEMORY[1]) * self.memory)

    @property
    def usable(self) -> int:
        """The same less the margin."""
        return self.largest - int(self.margin * (self.largest if self.margin < 1 else GIB))


def _peak(
    half: float, single: float, double: float, *, bf16: bool = True, fp8: float = 0
) -> "MappingProxyType[str, float]":
    others = ({"bf16": half} if bf16 else {}) | ({"fp8": fp8} if fp8 else {})
    return MappingProxyType({"fp16": half, "fp32": single, "fp64": double} | others)


# Switches do the sums: all-reduces at 475 of 450 GB/s on 8 H200s (nccl-tests#272), 480 on H100s (nccl#1374).
_SHARP = Efficiency(all_reduce=475 / 450)
# NVIDIA H100 data sheet, SXM. fp8 is half of what it gives with sparsity (without it 1,978.9 TFLOP/s:
# https://glennklockwood.com/garden/processors/h100).
_HOPPER = _peak(989e12, 67e12, 34e12, fp8=1979e12)

MACHINES = {
    machine.name: machine
    for machine in (
        # NVIDIA H100 data sheet, SXM; DGX H100: 8 GPUs with an adapter of 400 Gbit/s each.
        Machine("h100", 80 * GIB, _HOPPER, 3.35e12, 8, 450e9, 50e9, 132, kernel=Kernel(), efficiency=_SHARP),
        # NVIDIA H200 data sheet, SXM; bytes as XLA's description of the device says.
        Machine("h200", 151_397_597_184, _HOPPER, 4.8e12, 8, 450e9, 50e9, 132, kernel=Kernel(), efficiency=_SHARP),
        # NVIDIA A100 80GB data sheet, SXM; DGX A100: 8 GPUs, 200 Gbit/s each.
        Machine("a100", 80 * GIB, _peak(312e12, 19.5e12, 9.7e12), 2.039e12, 8, 300e9, 25e9, 108),
        # The paper's machine (arXiv 1909.08053, DGX-2H): 39 TFLOP/s are 30% of the peak, 16 GPUs with 8 adapters of 100
        # Gbit/s; NVIDIA V100 data sheet: fp32, memory. Of the efficiencies, products are an assumption, traffic is from
        # the paper's 39 TFLOP/s on one GPU, fixed from its strong scaling on 2, 4 and 8; links are as on a100.
        Machine(
            "v100", 32 * GIB, _peak(130e12, 15.7e12, 7.8e12, bf16=False), 0.9e12, 16, 150e9, 6.25e9, 80,
            fused_attention=False,
            efficiency=Efficiency(products=0.75, traffic=0.421, fixed=4e-3),
            # PyTorch of 2019: one after the other, but for the gradients, which are added over data while the backward
            # pass runs; masking, softmax and dropout go over the scores one by one, counted by hand.
            overlap=Overlap(tensor_backward=0.0, gathers=0.0, scatters=0.0, exchanges=0.0, keys=0.0, pairs=0.0,
            p2p_transfers=0.0, shards=0.0, gradients=1.0),
            traffic=Traffic(scores=36.0, dropped=0.0, all_scores=True, scanned=1.0),
        ),
        # NVIDIA DGX B200 data sheet, an eighth of it.
        Machine("b200", 180 * 10**9, _peak(2250e12, 75e12, 37e12), 8e12, 8, 900e9, 50e9, 148, efficiency=_SHARP),
    )
}  # fmt: skip


def peak_of(machine: Machine, precision: str) -> float:
    """FLOP/s of products in a precision."""
    if precision not in machine.peak:
        valid = ", ".join(sorted(machine.peak))
        raise UserError(f"--precision {precision} with --gpu {machine.name}, which does not support it; valid: {valid}")
    return machine.peak[precision]


def machine_of_device(kind: str, precision: str) -> Machine:
    """The GPU that calls itself `kind` (JAX's `device_kind`). One that is not in the table, or does not support the
    precision, is planned for as an H100."""
    named = (each for each in MACHINES.values() if re.search(rf"\b{each.name}\b", kind, re.IGNORECASE))
    return next((each for each in named if precision in each.peak), MACHINES["h100"])


def peak_of_device(kind: str, precision: str) -> float | None:
    """FLOP/s of products in a precision on the GPU that calls itself `kind` (JAX's `device_kind`); None if the GPU is
    not in the table or does not support the precision."""
    for pattern, peak in _DEVICES:
        if re.fullmatch(f"(NVIDIA )?({pattern})", kind):
            return peak.get(precision)
    return None


# Names that GPUs report, and their peaks: NVIDIA's data sheet of each, a 72nd of GB200 NVL72. GH200's GPU is an H100.
_DEVICES = (
    (r"H100 80GB HBM3|H200|GH200 .*", _HOPPER),
    (r"H100 NVL|H200 NVL", _peak(835e12, 60e12, 30e12)),
    (r"H100 PCIe", _peak(756e12, 51e12, 26e12)),
    (r"A100-SXM4-(40|80)GB|A100-PCIE-40GB|A100 80GB PCIe", MACHINES["a100"].peak),
    (r"Tesla V100-SXM3-32GB(-H)?", MACHINES["v100"].peak),
    (r"Tesla V100-SXM2-(16|32)GB", _peak(125e12, 15.7e12, 7.8e12, bf16=False)),
    (r"Tesla V100S-PCIE-32GB", _peak(130e12, 16.4e12, 8.2e12, bf16=False)),
    (r"Tesla V100-PCIE-(16|32)GB", _peak(112e12, 14e12, 7e12, bf16=False)),
    (r"B200", MACHINES["b200"].peak),
    (r"GB200", _peak(2500e12, 80e12, 40e12)),
)
