"""The count of a step's arithmetic: the paper's formula, and the products in the program."""

import math

import jax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from tiny import QWEN3, abstract_batch, tiny_config, tiny_program

from megajax.models.config import ModelConfig
from megajax.models.family import step_flops, step_products
from megajax.program.train_step import train_step
from megajax.settings.presets import load_preset, resolve


@pytest.mark.parametrize(
    ("layers", "hidden", "length", "vocabulary"), [(4, 512, 512, 8192), (40, 1536, 1024, 50257), (3, 24, 20, 101)]
)
def test_it_is_the_papers_formula(layers, hidden, length, vocabulary):
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_heads=8, sequence_length=length, vocab_size=vocabulary
    )
    batch, padded = 8, model.padded_vocab_size
    formula = 72 * batch * length * layers * hidden**2
    formula *= 1 + length / (6 * hidden) + padded / (12 * layers * hidden)
    assert step_flops(model, batch) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(
    ("preset", "parameters", "in_no_product", "heads"),
    [
        ("llama3-8b", 8_030_261_248, 128256 * 4096 + 65 * 4096, 32 * 128),
        ("mistral-7b", 7_241_732_096, 32000 * 4096 + 65 * 4096, 32 * 128),  # its window is half of a sequence
        ("qwen3-0.6b", 596_049_920, 28 * (2 * 1024 + 2 * 128) + 1024, 16 * 128),  # its table is the head, too
    ],
)
def test_it_is_six_for_every_weight_and_attention_as_if_all_was_seen(
    preset: str, parameters: int, in_no_product: int, heads: int
):
    """Of every token, with the published numbers of parameters, less the embedding table and the norms."""
    model = resolve(load_preset(preset)).model
    attention = 12 * model.num_layers * heads * model.sequence_length
    by_hand = 6 * (parameters - in_no_product) + attention
    assert step_flops(model, 2) == 2 * model.sequence_length * by_hand


def product_flops(jaxpr: Jaxpr) -> int:
    """Of all matrix products in a program, those in a scan as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, ClosedJaxpr):
                    total += times * product_flops(part.jaxpr)
                elif isinstance(part, Jaxpr):
                    total += times * product_flops(part)
    return total


@pytest.mark.parametrize(("length", "words"), [(16, {}), (300, {}), (300, QWEN3)])
def test_the_step_runs_these_products_and_the_scores_once_more(length: int, words: dict):
    """A sequence of one block of queries, and of two; with fewer heads of keys, a gate, and a window."""
    config = tiny_config(global_batch=2, microbatch=2, sequence_length=length, **words)
    program = tiny_program(config)
    products = step_products(config.model, 2, program.backend.block_of(length))
    scores = sum(product.flops for product in products if "scores" in product.name) // 2  # of which half is forward
    arguments = jax.eval_shape(program.layout.init), abstract_batch(config)
    found = product_flops(jax.make_jaxpr(train_step(program))(*arguments).jaxpr)
    assert found == sum(product.flops for product in products) + scores


def test_bert_computes_the_logits_of_its_masked_tokens_only():
    """The step's products beside those listed are the order head's, of one token a sequence."""
    config = tiny_config(family="bert", global_batch=2, microbatch=2, sequence_length=128)
    program = tiny_program(config)
    hidden, length = config.model.hidden_size, config.model.sequence_length
    products = step_products(config.model, 2, program.backend.block_of(length))
    (head,) = [product for product in products if product.name == "head, forward"]
    assert head.rows == 2 * 40 < 2 * length
    scores = sum(product.flops for product in products if "scores" in product.name) // 2
    order = 3 * 2 * 2 * hidden * (hidden + 2)  # forward, and both gradients, of two rows
    arguments = jax.eval_shape(program.layout.init), abstract_batch(config)
    found = product_flops(jax.make_jaxpr(train_step(program))(*arguments).jaxpr)
    assert found == sum(product.flops for product in products) + scores + order
