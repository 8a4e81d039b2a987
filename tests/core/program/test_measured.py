"""The choice among forms of a computation: the fastest of those that are right; others are left out in a line."""

import dataclasses
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import LATENT, QWEN3, full, tiny_config, tiny_program, user_error

from megajax.core.backend import BLOCKS, CANDIDATES, CPU, GPU, HOPPER
from megajax.core.models import attend
from megajax.core.private import has_gpu_kernels, interpreted_kernels
from megajax.core.program import measured
from megajax.core.program.measured import LIMIT, FormQuestion, answer, repeated
from megajax.core.program.one_layer import OneLayer, check_attention
from megajax.core.program.program import Program
from megajax.core.program.synthetic import random_batch
from megajax.runs.trained import note_attention

# On CPUs, two sizes of blocks: what the mechanism does with them it does with any implementation.
SIZES = {f"blocks of {size}": {"attention": BLOCKS, "query_block": size} for size in (16, 32)}
TRANSPOSED = CANDIDATES["weight gradients"]


def question(*forms: str, inputs=lambda: [jnp.ones((4, 8), jnp.bfloat16)]) -> FormQuestion:
    """Doubling, by forms of these names, each of which does it in its own way."""

    def function(backend):
        def double(x):
            name = named[backend.query_block]
            if name == "does not compile":
                raise NotImplementedError("no such instruction on this GPU\nwith details")
            if name == "slow":
                for _ in range(200):
                    x = jnp.sin(x @ jnp.ones((8, 8), x.dtype)) * 0 + jnp.ones((4, 8), x.dtype)
            last_row = {"wrong in one row": 1.0 + 3 * LIMIT, "not a number": np.nan}.get(name, 1.0)
            return ((2 * x).at[-1].multiply(jnp.asarray(last_row, x.dtype)),)

        return double

    backends = {name: dataclasses.replace(CPU, query_block=number) for number, name in enumerate(forms)}
    named = {backend.query_block: name for name, backend in backends.items()} | {CPU.query_block: "reference"}
    return FormQuestion("doubling", "4 x 8", ["the double"], backends, CPU, function, inputs)


def test_the_fastest_right_form_is_taken():
    """One wrong in a single row, one that gives no numbers and one that does not compile are left out, each in a line
    that says why."""
    asked = question("wrong in one row", "slow", "does not compile", "quick", "not a number")
    found = answer(asked, seconds=60)
    assert found.taken == "quick" and set(found.milliseconds) == {"slow", "quick"}
    assert found.milliseconds["quick"] < found.milliseconds["slow"]
    first, *others = found.lines(asked)
    assert first.startswith("doubling: quick is taken; compared, 4 x 8: slow ") and first.count(" ms") == 2
    assert "does not compile is left out: NotImplementedError: no such instruction on this GPU" in "\n".join(others)
    assert "wrong in one row is left out: wrong here: a row of the double is" in "\n".join(others)
    assert len(others) == 3 and all("\n" not in line for line in others)


def test_every_call_of_a_repeated_function_is_computed():
    """Each sees the first numbers that the last one gave, within limits; integers stay as they are."""
    added = repeated(lambda x, places: (x + 0.25, x * places.astype(x.dtype)))
    x, places = np.array([0.0, 5.0], np.float32), np.array([0, 4], np.int32)
    for times, first in ((1, 0.25), (3, 0.75), (50, 1.25)):
        np.testing.assert_array_equal(added(times, x, places), [[first, 5.25], [0, 20]])


def test_it_ends_in_its_time(monkeypatch):
    """A form whose compilation does not end is left out, and where nothing can be compared nothing is taken."""
    with monkeypatch.context() as patched:
        patched.setattr(measured, "_compiling", lambda function, inputs: Future())
        found = answer(question("hangs"), seconds=0.5)
    assert found.taken == "" and found.left_out == {"hangs": "not compiled after 0.5 s"}

    def no_memory():
        raise MemoryError("out of memory")

    found = answer(question("first", inputs=no_memory), seconds=25)
    assert found.taken == "" and found.left_out == {"first": "the reference fails: MemoryError: out of memory"}


WAYS = {
    "documents and dropout": {"dropout": 0.1, "reset_attention": True, "attention_sinks": True},
    "half precision": {"precision": "bf16", "dropout": 0.0, "num_kv_heads": 2},
}


def layer(mesh=(1, 1, 1), **options) -> OneLayer:
    program = tiny_program(tiny_config(mesh, microbatch=2, **{"sequence_length": 64, "num_layers": 1} | options))
    return OneLayer(program, {name: array[:2] for name, array in random_batch(program.config, 0).items()})


@pytest.mark.parametrize("way", ["documents and dropout", full("half precision")])
@pytest.mark.slow
def test_a_layer_is_measured(way):
    """Attention with the run's masks and dropout, and the MLP's products, in forms that differ by rounding alone."""
    asked = layer(**WAYS[way]).questions({"attention": SIZES, "weight gradients": TRANSPOSED})
    assert [each.name for each in asked] == ["attention", "weight gradients"]
    for each in asked:
        found = answer(each, seconds=60)
        assert found.left_out == {} and found.taken in each.forms and len(found.milliseconds) == 2, found


SHARES = {  # of a device: queries, keys, heads, heads of keys
    "heads": ((1, 1, 2, 2), {"num_kv_heads": 2}, (64, 64, 2, 1)),
    "window": ((1, 1, 2, 1), {"reset_attention": True, **QWEN3}, (32, 36, 8, 2)),
    "gather": ((1, 1, 2, 1), {"reset_attention": True, "num_heads": 3}, (32, 64, 3, 3)),
    "bert": ((1, 1, 2), {"family": "bert"}, (64, 64, 4, 4)),
}


@pytest.mark.parametrize("case", [full("heads"), "window", full("gather"), "bert"])
def test_it_is_the_share_of_a_device(case):
    """Whatever the mesh makes of a layer; traced alone."""
    mesh, options, shape = SHARES[case]
    share = layer(mesh, **{"context_attention": "heads" if case == "heads" else "auto"} | options)
    assert (share.num_queries, share.num_keys, share.heads, share.kv_heads) == shape
    asked = share.attention(SIZES)
    inputs = asked.inputs()
    heads, *gradients = jax.eval_shape(asked.function(asked.forms["blocks of 16"]), *inputs)
    assert heads.shape == inputs[0].shape == (2, shape[0], shape[2], share.model.head_size)
    assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs[:3]]


def test_a_wrong_attention_is_left_out(monkeypatch):
    """One that forgets the last key of every query, whose gradients are those of what it computes."""

    def forgets(q_BTHK, k_BSHK, v_BSHK, setting):
        visible = dataclasses.replace(setting.visible, first_key_BT=jnp.ones(q_BTHK.shape[:2], jnp.int32))
        return attend.IMPLEMENTATIONS["blocks"].attend(q_BTHK, k_BSHK, v_BSHK, setting._replace(visible=visible))

    implementation = attend.Implementation(lambda q_BTHK, setting: True, forgets)
    monkeypatch.setitem(attend.IMPLEMENTATIONS, "kernel", implementation)
    forms = {"kernel": {"attention": ("kernel", *BLOCKS)}, "blocks": {"attention": BLOCKS}}
    found = answer(layer(dropout=0.0).attention(forms), seconds=60)
    assert found.taken == "blocks" and "wrong here: a row of the heads" in found.left_out["kernel"]


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


def test_explicit_and_equal_forms_are_not_compared():
    """Blocks that are the same here are one form; on a GPU every implementation that can is one."""
    long = {"dropout": 0.1, "precision": "bf16", "sequence_length": 512, "attention": "blocks"}
    assert [*layer(**long).attention(CANDIDATES["attention"]).forms] == ["blocks of 128", "blocks of 256"]
    assert layer(dropout=0.1).questions({"attention": CANDIDATES["attention"]}) == []


MIXTURE = {"num_experts": 4, "experts_per_token": 2, "expert_size": 128, "hidden_size": 128, "num_heads": 2}


@pytest.mark.skipif(not has_gpu_kernels(), reason="its JAX has no such kernels, which 0.11 has")
@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (True, {}),
        (True, {"mesh": (1, 1, 1), "expert_capacity": 1.25}),  # whose evaluations have none
        (False, {"expert_size": 96}),
        (False, {"precision": "fp32"}),
        (False, {"num_experts": 0, "experts_per_token": 0, "expert_size": 0}),
    ],
)
def test_experts_are_asked_about_where_kernels_can_multiply(asked: bool, options: dict) -> None:
    one = layer(**{"precision": "bf16"} | MIXTURE | options)
    one.program = Program(one.program.config, one.program.mesh, HOPPER)
    assert [*one.experts(CANDIDATES["experts"]).forms] == ["kernel", "loop"] * asked


@pytest.mark.full
@pytest.mark.skipif(not has_gpu_kernels(), reason="its JAX has no such kernels, which 0.11 has")
def test_kernels_of_experts_are_right_on_the_share_of_a_device() -> None:
    """By the interpreter of kernels."""
    one = layer(precision="bf16", mesh=(1, 1, 2), **MIXTURE | {"expert_size": 256})
    one.program = Program(one.program.config, one.program.mesh, HOPPER)
    with interpreted_kernels():
        found = answer(one.experts(CANDIDATES["experts"]), seconds=600)
    assert set(found.milliseconds) == {"kernel", "loop"} and not found.left_out
