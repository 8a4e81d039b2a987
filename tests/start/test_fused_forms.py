"""Fused attention and experts' kernels beside plain code. On CPUs, blocks stand for what a GPU has."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import LATENT, QWEN3, full, tiny_config, tiny_program, user_error

from megajax.core.backend import BLOCKS, CPU, GPU, HOPPER
from megajax.core.models import attend
from megajax.core.private import has_gpu_kernels, interpreted_kernels
from megajax.core.program.program import Program
from megajax.runs.trained import note_attention
from megajax.start.form_comparison import LIMIT, FormComparison
from megajax.start.fused_forms import check_attention, comparisons, experts_comparison


@pytest.mark.parametrize(
    ("last_row", "problem"),
    [
        (1 + LIMIT, ""),
        (1 + 3 * LIMIT, "wrong here: a row of the double is 3."),
        (np.nan, "wrong here: a row of the double is nan%"),
        (None, "ValueError: None is not a valid value"),
    ],
)
def test_a_form_is_right_in_every_row_or_has_a_problem(last_row, problem):
    def function(backend):
        return lambda x: [(2 * x).at[-1].multiply(1 if backend is CPU else last_row)]

    ones = jnp.ones((4, 8), jnp.bfloat16)
    compared = FormComparison("doubling", "4 x 8", ["the double"], {"fused": GPU}, CPU, function, lambda: [ones])
    found = compared.problem("fused")
    assert found.startswith(problem) and bool(found) == bool(problem) and "\n" not in found


def program(backend=HOPPER, mesh=(1, 1, 1), **options) -> Program:
    sizes = {"precision": "bf16", "sequence_length": 64, "num_layers": 1, "head_size": 64, "num_heads": 4}
    config = tiny_config(mesh, **sizes | {"dropout": 0.0} | options)
    return Program(config, tiny_program(config).mesh, backend)


def fused_by(monkeypatch, change) -> None:
    """Let blocks with a changed mask be the kernel."""

    def attention(q_BTHK, k_BSHK, v_BSHK, setting):
        setting = setting._replace(visible=change(setting.visible, q_BTHK))
        return attend.IMPLEMENTATIONS["blocks"].attend(q_BTHK, k_BSHK, v_BSHK, setting)

    fused = attend.Implementation(lambda q_BTHK, setting: True, attention)
    monkeypatch.setitem(attend.IMPLEMENTATIONS, "kernel", fused)


ATTENTION = {  # queries and keys, each with their heads
    "gather": ((1, 1, 2, 1), {"reset_attention": True, "dropout": 0.1, "num_heads": 3}, (32, 2, 64, 2)),
    "window": ((1, 1, 2, 1), {"reset_attention": True, "attention_sinks": True, **QWEN3}, (32, 4, 64, 2)),
    "long": ((1, 1, 1), {"sequence_length": 1000, "num_kv_heads": 1, "sliding_window": 600}, (616, 4, 616, 1)),
    "bert": ((1, 1, 2), {"family": "bert", "vocab_size": 600}, (64, 2, 64, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gather", full("window"), full("long"), full("bert")])
def test_attention_is_compared_in_small(monkeypatch, case):
    """With the run's masks, dropout and sinks, and short sequences whose last block is as full as the run's. A kernel
    that forgets the first key of every query, whose gradients are those of what it computes, is found."""
    mesh, options, shape = ATTENTION[case]
    fused_by(monkeypatch, lambda visible, q_BTHK: visible)
    compared = comparisons(program(mesh=mesh, **options))[0]
    q_BTHK, k_BSHK, *_ = compared.inputs()
    assert (compared.name, *q_BTHK.shape[1:3], *k_BSHK.shape[1:3]) == ("attention", *shape)
    assert compared.problem("kernel") == ""

    def forgets(visible, q_BTHK):
        first_BT = jnp.ones(q_BTHK.shape[:2], jnp.int32) if visible.first_key_BT is None else visible.first_key_BT + 1
        return dataclasses.replace(visible, first_key_BT=first_BT)

    fused_by(monkeypatch, forgets)
    assert "wrong here: a row of the heads" in compared.problem("kernel")


MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_size": 128, "hidden_size": 128}
KERNEL = ["kernel"] * has_gpu_kernels()


@pytest.mark.parametrize(
    ("backend", "options", "forms"),
    [
        (CPU, MIXTURE, {}),
        (HOPPER, {"attention": "kernel"}, {}),
        (HOPPER, {"dropout": 0.1}, {"attention": KERNEL, "attention without dropout": ["cudnn"]}),
        (HOPPER, MIXTURE | {"expert_capacity": 1.25}, {"attention": ["cudnn", *KERNEL], "experts": KERNEL}),
        (HOPPER, MIXTURE | {"expert_size": 96}, {"attention": ["cudnn", *KERNEL]}),
    ],
)
def test_what_is_compared(backend, options, forms):
    """Every fused form that a training or its evaluations, which have no capacity, may take by themselves."""
    compared = {each.name: [*each.forms] for each in comparisons(program(backend, **options))}
    assert compared == {name: names for name, names in forms.items() if names}


@pytest.mark.full
@pytest.mark.skipif(not has_gpu_kernels(), reason="its JAX has no such kernels, which 0.11 has")
def test_kernels_of_experts_are_right():
    """By the interpreter of kernels."""
    compared = experts_comparison(program(**MIXTURE | {"expert_size": 256}).config, HOPPER)
    with interpreted_kernels():
        assert compared.problem("kernel") == ""


def test_what_can_be_asked_for():
    """An implementation that cannot do the run's attention is refused in one line that says what can, and so is any on
    CPUs; of several that can, one that is asked for is the only question."""

    def problem(asked, backend=GPU, deterministic=False, **options) -> str:
        config = tiny_config(**{"precision": "bf16", "head_size": 64, "num_heads": 2, "attention": asked} | options)
        config = dataclasses.replace(config, deterministic=deterministic)
        return user_error(check_attention, Program(config, tiny_program(config).mesh, backend))

    able = has_gpu_kernels()
    kernel = ", kernel" if able else ""
    assert problem("cudnn", dropout=0.1) == (
        "--model.attention cudnn cannot do --precision bf16, --model.head-size 64, --model.dropout 0.1; valid: auto"
        f"{kernel}, blocks"
    )
    assert "--data.reset-attention; valid: auto" in problem("cudnn", dropout=0.0, reset_attention=True)
    assert "--model.attention-sinks; valid: auto" in problem("cudnn", dropout=0.0, attention_sinks=True)
    latent = LATENT | {"head_size": 64, "value_size": 72, "dropout": 0.0}
    assert "--model.value-size 72; valid: auto, blocks" in problem("cudnn", **latent)
    assert "there is none for these devices; valid: auto, blocks" in problem("cudnn", CPU, dropout=0.0)
    assert problem("cudnn", dropout=0.0, deterministic=True) == (
        f"--model.attention cudnn: it fails with --deterministic; valid: auto{kernel}, blocks"
    )


def test_a_deterministic_run_has_no_cudnn():
    config = dataclasses.replace(tiny_config(), deterministic=True)
    found = [Program(config, tiny_program(config).mesh, backend).backend.attention for backend in (HOPPER, GPU, CPU)]
    assert found == [("kernel", "blocks"), BLOCKS, BLOCKS]


def test_an_evaluation_that_cannot_do_what_is_asked_for_says_so(capsys):
    """Blocks are used then, with a note; without dropout, cuDNN can do more than in training."""

    def noted(asked, backend=GPU, **options) -> str:
        config = tiny_config(head_size=64, num_heads=2, attention=asked, dropout=0.1, **options)
        note_attention(Program(config, tiny_program(config).mesh, backend), Path("run"))
        return capsys.readouterr().err

    assert noted("cudnn", precision="bf16") == noted("auto", CPU) == noted("blocks", CPU) == ""
    assert noted("cudnn") == (
        "run: --model.attention cudnn cannot do --precision fp32, --model.head-size 64; using blocks\n"
    )
    assert noted("kernel", CPU) == "run: --model.attention kernel: there is none for these devices; using blocks\n"
