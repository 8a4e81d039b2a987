"""What a layer is traced to keep is what the program keeps, to the byte; a new option of a layer is seen."""

import dataclasses

import jax
import pytest
from tiny import LLAMA, QWEN3, tiny_config, tiny_program

from megajax.backend import CPU, GPU
from megajax.models.mlp import MLP
from megajax.plan import traced
from megajax.plan.memory import memory
from megajax.program.memory import factor_bytes, residual_bytes

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
def test_it_is_what_the_program_keeps(family, mode) -> None:
    options = FAMILIES[family] | {"num_layers": 5, "weight_gradients": "deferred", "max_deferred": 1} | MODES[mode]
    config = tiny_config((1, 2, 4), **options)
    found = memory(config, CPU)
    with jax.enable_x64(config.precision == "fp64"):
        program = tiny_program(config)
        assert found.kept == program.schedule.num_slots * residual_bytes(program)
        assert found.factors == program.schedule.num_factor_slots * factor_bytes(program)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.full), "selective"])
def test_of_documents_in_one_row(remat) -> None:
    config = tiny_config((2, 1, 2), remat=remat, reset_attention=True, microbatch=2, **LLAMA)
    assert memory(config, CPU).kept == residual_bytes(tiny_program(config))


def test_attention_on_gpus_is_kept_once() -> None:
    """Its result has two names where it is cuDNN's, which is traced on any machine."""
    config = tiny_config((1, 1, 2), head_size=8, dropout=0.0, precision="bf16")
    none, selective = (traced.layer_cost(config, GPU, remat) for remat in ("none", "selective"))
    assert none.fused and selective.fused and not traced.layer_cost(config, CPU, "none").fused
    activation, heads, inner = 16 * 24 * 2, 16 * 4 * 8 * 2, 16 * 48 * 2
    statistics = 16 * 4 * 4
    assert none.residuals.num_bytes(1) == 4 * activation + 4 * heads + statistics + 2 * inner
    assert selective.residuals.num_bytes(1) == 2 * activation + 4 * heads + statistics + inner


def test_a_new_option_of_a_layer_needs_no_line_here(monkeypatch) -> None:
    """A third sum in the MLP is communicated, a product that is computed twice takes longer."""
    config = tiny_config((1, 1, 2), dropout=0.0)
    before = traced.layer_cost(config, CPU, "none")
    call = MLP.__call__
    monkeypatch.setattr(MLP, "__call__", lambda self, *args: call(self, *args) + call(self, *args))
    traced._traced.cache_clear()
    after = traced.layer_cost(config, CPU, "none")
    traced._traced.cache_clear()
    assert len(after.forward) == len(before.forward) + 1 and len(after.products) == len(before.products) + 2
    assert after.residuals.num_bytes(1) > before.residuals.num_bytes(1)


def test_sizes_are_linear_in_rows() -> None:
    """Those of three rows, and what does not depend on them."""
    config = tiny_config((1, 2, 2), remat="layer", **LLAMA)
    cost = traced.layer_cost(config, CPU, "layer")
    one, two, three = (cost.residuals.num_bytes(rows) for rows in (1, 2, 3))
    assert three - two == two - one and 0 < 2 * one - two < one
    program = tiny_program(dataclasses.replace(config, train=dataclasses.replace(config.train, microbatch=4)))
    assert 2 * cost.residuals.num_bytes(4) == residual_bytes(program)  # two layers
