"""What is kept of activations, by arithmetic, is what the program keeps, to the byte."""

import jax
import pytest
from tiny import LLAMA, QWEN3, tiny_config, tiny_program

from megajax.backend import CPU
from megajax.plan.activations import LayerSizes, chunk_bytes, factor_bytes
from megajax.plan.sizes import Sizes
from megajax.program import parts

BERT = {"family": "bert", "layer_order": "post"}
FAMILIES = {"gpt2": {}, "llama": LLAMA, "qwen": QWEN3, "bert": BERT}
MODES = {
    "none": {"remat": "none"},
    "none, split, fp64": {"remat": "none", "sequence_parallel": True, "precision": "fp64"},
    "selective, no dropout": {"remat": "selective", "dropout": 0.0},
    "selective, split": {"remat": "selective", "sequence_parallel": True, "precision": "bf16"},
    "layer, split": {"remat": "layer", "sequence_parallel": True},
    "stage": {"remat": "stage", "microbatch": 2},
}
SOME = {("llama", "none"), ("qwen", "selective, split"), ("bert", "none, split, fp64"), ("gpt2", "layer, split")}
CASES = [
    pytest.param(family, mode, marks=() if (family, mode) in SOME else pytest.mark.full)
    for family in FAMILIES
    for mode in MODES
]


@pytest.mark.parametrize(("family", "mode"), CASES)
def test_they_are_those_of_the_program(family, mode) -> None:
    options = FAMILIES[family] | {"num_layers": 5, "weight_gradients": "deferred"} | MODES[mode]
    config = tiny_config((1, 2, 4), **options)
    sizes = LayerSizes.of(Sizes(config))
    with jax.enable_x64(config.precision == "fp64"):
        program = tiny_program(config)
        assert chunk_bytes(config, sizes, CPU) == parts.residual_bytes(program)
        assert factor_bytes(config, sizes) == parts.factor_bytes(program)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.full), "selective"])
def test_of_documents_in_one_row(remat) -> None:
    config = tiny_config((2, 1, 2), remat=remat, reset_attention=True, microbatch=2, **LLAMA)
    sizes = LayerSizes.of(Sizes(config))
    assert chunk_bytes(config, sizes, CPU) == parts.residual_bytes(tiny_program(config))
