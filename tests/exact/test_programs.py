"""Every primitive of the programs of this package has a rule: they are traced, and neither compiled nor run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny import LLAMA, MIXTURE, QWEN3, full, tiny_config

from jaxequal.arrays import ARRAYS
from jaxequal.collectives import COLLECTIVES
from jaxequal.flow import equations
from jaxequal.functions import FUNCTIONS
from jaxequal.interpreter import CONTROL
from megajax.core.backend import CPU
from megajax.core.models.lora_config import LoraConfig
from megajax.core.program import scoring
from megajax.core.program.program import Program
from megajax.core.program.train_step import average_weights, train_step_with_gradients
from megajax.generation.choice import Sampling, prompt_bits
from megajax.generation.programs import ROWS, DecodingPrograms
from megajax.verify.forms import in_blocks

KNOWN = {*FUNCTIONS, *ARRAYS, *COLLECTIVES, *CONTROL}
BERT = {"family": "bert", "dropout": 0.1}
CONTEXT = {"mesh": (1, 2, 2, 2), "num_layers": 4, "sequence_length": 32}
DEFERRED = {"weight_gradients": "deferred", "vocabulary": "split"}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
MUON = {"optimizer": {"name": "muon", "skip_above": 3.0}}
CAPACITY = MIXTURE | {"expert_capacity": 1.5, "balance": "loss", "router_z_loss": 0.1}
STEPS: dict[str, dict[str, Any]] = {
    "mixture, interleaved, ZeRO-3": CAPACITY
    | {"mesh": (2, 2, 2), "expert": 2, "zero": 3, "sequence_parallel": True, "remat": "layer", **INTERLEAVED},
    "dropless, bf16, Muon, EMA": MIXTURE
    | {"mesh": (2, 1, 2), "expert": 2, "precision": "bf16", "balance": "bias", "ema": 0.9, **MUON},
    "BERT, fp16, deferred gradients": BERT
    | {"mesh": (2, 2, 2), "precision": "fp16", "layer_order": "post", "remat": "selective", **DEFERRED},
    "window by context, fp8, LoRA": QWEN3
    | {"precision": "fp8", "lora": LoraConfig(rank=2), "remat": "stage", "schedule": "gpipe", **CONTEXT},
    "unrolled": {"scan_layers": "false", "activation": "gelu-tanh", "dropout": 0.1, "zero": 0},
}


def program_of(options: dict[str, Any], blocks: bool = False) -> Program:
    config = tiny_config(**{"microbatch": 1, "global_batch": 8} | options)
    return Program.abstract(config, in_blocks(config) if blocks else CPU)


def check(function: Callable[..., Any], *types: Any) -> None:
    jaxpr = jax.make_jaxpr(function)(*types).jaxpr
    assert {equation.primitive.name for equation in equations(jaxpr)} <= KNOWN


FEW = ("dropless, bf16, Muon, EMA", "window by context, fp8, LoRA")  # others run in `test_field.py`


@pytest.mark.parametrize("name", [name if name in FEW else full(name) for name in STEPS])
def test_a_step_and_the_forms_of_its_state(name: str) -> None:
    options = STEPS[name]
    with jax.enable_x64(options.get("precision") == "fp64"):
        program = program_of(options, blocks=name == "unrolled")
        layout = program.layout
        check(train_step_with_gradients(program), layout.shapes, program.batch_types)
        check(layout.pipelined, layout.canonical_shapes)
        check(layout.canonical, layout.shapes)
        if program.config.train.ema:
            check(average_weights(program), layout.shapes.params, layout.shapes.average)


SCORED = [
    ({"mesh": (2, 2, 2), **LLAMA}, ("scores", "logits", "next_logits")),
    full({"mesh": (2, 2, 2), **CAPACITY, "expert": 2}, ("scores", "logits", "next_logits")),
    full({"mesh": (2, 2, 2), **BERT}, ("scores", "logits")),
    *(full({"mesh": (2, 2, 2), **BERT, "head": head}, ("task_logits",)) for head in ("classes", "span", "choice")),
    full({**LLAMA, **CONTEXT, "precision": "fp8"}, ("scores",)),
]


@pytest.mark.parametrize(("options", "names"), SCORED)
def test_scoring(options: dict[str, Any], names: tuple[str, ...]) -> None:
    program = program_of(options)
    place = [jax.ShapeDtypeStruct((), jnp.int32)]
    for name in names:
        more = place if name == "next_logits" else []
        check(getattr(scoring, name)(program), program.layout.shapes.params, program.batch_types, *more)


ALL_CHOICES = Sampling(0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("options", "sampling"),
    [({"mesh": (2, 1, 2), **QWEN3}, ALL_CHOICES), full({"mesh": (1, 1, 2), **MIXTURE}, Sampling(0.0))],
)
def test_generation(options: dict[str, Any], sampling: Sampling) -> None:
    program = program_of({"zero": 0, **options})
    programs = DecodingPrograms(program, sampling, ends=[3])
    rows, tokens = 4, 16
    inputs = {name: jax.ShapeDtypeStruct((rows,), jnp.int32) for name in ("length", "limit")}
    inputs |= {"tokens": jax.ShapeDtypeStruct((rows, tokens), jnp.int32)}
    inputs |= {"bits": jax.eval_shape(lambda: prompt_bits([[1]] * rows, 0))}
    weights = jax.eval_shape(programs.unstacked, program.layout.shapes.params)
    prefill = programs.region(partial(programs.prefill, 2 * tokens), ROWS)
    check(prefill, weights, inputs)
    state, _ = jax.eval_shape(prefill, weights, inputs)
    check(programs.region(programs.decode, programs.state_specs), weights, state)
