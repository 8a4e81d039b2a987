"""Which way keys reach the devices that share a sequence, and what they send and compute."""

import dataclasses
import math

import jax
import pytest
from counting import assert_sent_for_attention
from tiny import LATENT, LLAMA, full, tiny_config

from megajax.core.backend import CPU
from megajax.core.models.context_attention import context_way, elements_sent
from megajax.core.program.communication import collectives_of, equations
from megajax.core.program.program import Program, training_way
from megajax.core.program.train_step import train_step_with_gradients
from megajax.plan.compiled import traced_step


@pytest.mark.full
@pytest.mark.parametrize("context", [2, 4, 8])
def test_causal_work_is_even(context):
    """With gathered keys a program has no branches, so that all devices compute as much, and together not more than one
    device: queries times keys of all products."""
    size = {"context_attention": "gather", "sequence_length": 1024, "num_layers": 1, "global_batch": 1}
    alone, shared = (attention_work(tiny_config((1, 1, count, 1), **size)) for count in (1, context))
    assert shared * context == alone


def attention_work(config) -> int:
    """Multiplications of attention's products in a step, on one device."""
    program = Program.abstract(config, dataclasses.replace(CPU, query_block=64))
    step = train_step_with_gradients(program).trace(program.layout.shapes, program.batch_types)
    found = 0
    for eqn, count in equations(step.jaxpr.jaxpr):
        assert eqn.primitive.name not in ("cond", "while")
        if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1][0]:
            inner = [eqn.invars[0].aval.shape[dim] for dim in eqn.params["dimension_numbers"][0][0]]
            found += count * math.prod(eqn.outvars[0].aval.shape) * math.prod(inner)
    return found


@pytest.mark.parametrize("precision", [full("bf16"), "fp8"])
def test_latents_are_gathered_but_in_8_bits(precision):
    """Then keys and values are: of a traced step, of which nothing is compiled."""
    options = LATENT | {"context_attention": "gather", "remat": "layer", "precision": precision}
    config = tiny_config((1, 1, 2, 2), microbatch=2, **options)
    assert_sent_for_attention(config, collectives_of(traced_step(config, jax.devices()[:4])))


def test_the_way_that_sends_less_is_taken():
    """Few heads of keys are gathered, of a window only what it sees; what each would send; and what GPUs can fuse."""
    few, many = tiny_config((1, 1, 4, 1), **LLAMA | {"num_kv_heads": 1}).model, tiny_config((1, 1, 4, 1)).model
    sizes = {"data": 1, "pipe": 1, "context": 4, "tensor": 1}
    assert context_way(few, sizes) == "gather" and context_way(many, sizes) == "heads"
    assert context_way(dataclasses.replace(many, sliding_window=4), sizes) == "window"
    assert context_way(many, sizes | {"tensor": 4}) == "gather"  # two heads are not divided by four devices
    assert context_way(many, sizes | {"context": 1}) == "none"
    sent = elements_sent(few, sizes)
    assert sent["gather"] == 6 * 1 * 4 * 16 * 3 / 4 and sent["heads"] == 4 * (8 + 4) * 4 * 16 * 3 / 16
    # Of attention that cuDNN has, heads are taken wherever they can be.
    assert context_way(few, sizes, fusible=True) == "heads" and context_way(many, sizes | {"tensor": 4}) == "gather"
    for precision, dropout, way in (("bf16", 0, "heads"), ("bf16", 0.1, "gather"), ("fp32", 0, "gather")):
        options = LLAMA | {"num_kv_heads": 1, "head_size": 8, "dropout": dropout, "precision": precision}
        assert training_way(tiny_config((1, 1, 4, 1), **options)) == way
    # Latents are gathered; but keys and values in 8 bits.
    for precision, way in (("bf16", "gather"), ("fp8", "heads")):
        assert training_way(tiny_config((1, 1, 4, 1), **LATENT, dropout=0.1, precision=precision)) == way
