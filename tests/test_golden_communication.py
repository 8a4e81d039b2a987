"""How often and how much the traced steps of twelve small meshes communicate. The plan traces the same layers and ends,
so of what is wrong in one it would say the same; these figures are those of an arithmetic of its own, which was removed
when they were written down."""

from collections import Counter
from typing import Any

import pytest
from tiny import LATENT, LLAMA, MIXTURE, QWEN3, full, tiny_config

from megajax.core.axes import AXES
from megajax.core.backend import CPU
from megajax.core.models.lora_config import LoraConfig
from megajax.core.program.communication import collectives_of
from megajax.core.program.program import Program
from megajax.core.program.train_step import train_step

SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "sequence_length": 8, "vocab_size": 21, "dropout": 0.0}
SMALL |= {"vocab_multiple": 8, "global_batch": 4, "microbatch": 1}
EXPERTS = MIXTURE | {"num_experts": 4, "expert": 2}
DEFERRED = {"weight_gradients": "deferred"}
AT_ONCE = {"name": "muon", "overlap_reductions": "true", "overlap_gathers": "true"}
CHUNKS = {"schedule": "interleaved", "chunks": 2, "num_layers": 4}
# Kind, axes that have several devices, how often, and the bytes of all operands.
STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "fp8, tensor": (
        {"mesh": (1, 1, 2), "precision": "fp8"},
        "all-reduce tensor 92 12872",
    ),
    "fp8, experts that drop nothing, sequence": (
        EXPERTS | {"mesh": (1, 1, 2), "precision": "fp8", "expert_capacity": 0.0, "sequence_parallel": True},
        "all-gather expert 29 4560, all-gather tensor 44 4864, all-reduce expert 5 20, all-reduce expert tensor 7 "
        "56, all-reduce tensor 48 12416, reduce-scatter expert 25 12608, reduce-scatter tensor 32 7424",
    ),
    "heads of keys held several times, deferred": (
        QWEN3 | DEFERRED | {"mesh": (1, 2, 4), "num_kv_heads": 2},
        "all-reduce pipe 4 456, all-reduce pipe tensor 1 4, all-reduce tensor 59 20596, permute pipe 12 6144",
    ),
    "ZeRO-1, chunks": (
        CHUNKS | {"mesh": (2, 2, 2), "zero": 1},
        "all-gather data 20 7456, all-reduce data 2 8, all-reduce data pipe 2 8, all-reduce data pipe tensor 1 4, "
        "all-reduce data tensor 1 4, all-reduce pipe 4 704, all-reduce tensor 72 25344, permute pipe 16 8192, "
        "reduce-scatter data 20 14912",
    ),
    "ZeRO-3, sequence": (
        LLAMA | {"mesh": (2, 1, 2), "zero": 3, "sequence_parallel": True, "remat": "layer"},
        "all-gather data 84 36480, all-gather tensor 28 7168, all-reduce data 4 16, all-reduce data tensor 2 8, "
        "all-reduce tensor 9 352, reduce-scatter data 48 39680, reduce-scatter tensor 24 12288",
    ),
    "split vocabulary, BERT": (
        {"mesh": (1, 2, 2), "family": "bert", "vocabulary": "split", "layer_order": "post"},
        "all-reduce pipe 13 6148, all-reduce pipe tensor 37 9796, all-reduce tensor 24 12288, permute pipe 12 6144",
    ),
    "adapters, sequence": (
        {"mesh": (2, 1, 2), "lora": LoraConfig(rank=2), "sequence_parallel": True},
        "all-gather data 12 1536, all-gather tensor 26 6656, all-reduce data 3 12, all-reduce data tensor 1 4, "
        "all-reduce tensor 12 960, reduce-scatter data 12 3072, reduce-scatter tensor 20 10240",
    ),
    "experts by capacity, context": (
        EXPERTS | {"mesh": (1, 1, 2, 1), "expert_capacity": 1.0, "remat": "selective"},
        "all-gather context 15 12288, all-gather expert context 13 3792, all-reduce context 16 640, all-reduce "
        "expert 2 8, all-reduce expert context 9 64, all-to-all context 36 9216, all-to-all expert 20 10240, "
        "reduce-scatter context 11 20480, reduce-scatter expert context 13 15168",
    ),
    "gathered latents": (
        LATENT | {"mesh": (1, 1, 2, 2), "context_attention": "gather", "precision": "bf16"},
        "all-gather context 23 5308, all-reduce context 3 12, all-reduce context tensor 2 8, all-reduce tensor 52 "
        "5152, reduce-scatter context 23 20336",
    ),
    "heads of a context group": (
        {"mesh": (1, 1, 2, 2), "context_attention": "heads", "remat": "selective"},
        "all-gather context 20 7456, all-reduce context 3 12, all-reduce context tensor 2 8, all-reduce tensor 52 "
        "10432, all-to-all context 72 9216, reduce-scatter context 20 14912",
    ),
    "window, stages": (
        LLAMA | DEFERRED | {"mesh": (1, 2, 2, 1), "sliding_window": 3, "sequence_length": 16},
        "all-gather context 24 11360, all-reduce context 2 8, all-reduce pipe 3 1568, all-reduce pipe context 3 12, "
        "permute pipe 12 6144, reduce-scatter context 24 22720",
    ),
    "Muon, beside the passes": (
        {"mesh": (2, 2, 1), "optimizer": AT_ONCE},
        "all-gather data 38 14272, all-reduce data 3 12, all-reduce data pipe 3 12, all-reduce pipe 4 1088, "
        "all-to-all data 8 22528, permute pipe 7 3584, reduce-scatter data 38 28544",
    ),
}


@pytest.mark.parametrize("name", [name if name in [*STEPS][:6] else full(name) for name in STEPS])
def test_counts_and_bytes(name: str) -> None:
    options, expected = STEPS[name]
    config, sent = tiny_config(**SMALL | options), Counter[str]()
    program, counts = Program.abstract(config, CPU), Counter[str]()
    for each in collectives_of(train_step(program).trace(program.layout.shapes, program.batch_types).jaxpr):
        axes = [axis for axis in AXES if axis in each.axes and config.mesh.size_of((axis,)) > 1]
        if axes:
            key = " ".join([each.kind, *axes])
            counts[key] += each.count
            sent[key] += each.count * each.num_bytes
    assert {f"{key} {counts[key]} {sent[key]}" for key in counts} == {*expected.split(", ")}
