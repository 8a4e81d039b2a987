"""The count of a step's arithmetic: the paper's formula, and the products in the program."""

import jax
import pytest
from counting import equations, product_flops
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


@pytest.mark.parametrize(("length", "words"), [(16, {}), (300, {}), (300, QWEN3), (128, {"family": "bert"})])
def test_the_step_runs_these_products_and_the_scores_once_more(length: int, words: dict):
    """A sequence of one block of queries, and of two; with fewer heads of keys, a gate, and a window. BERT's logits are
    those of its masked tokens only; beside what is listed its order head has products, of one token a sequence."""
    config = tiny_config(global_batch=2, microbatch=2, sequence_length=length, **words)
    program, hidden = tiny_program(config), config.model.hidden_size
    products = step_products(config.model, 2, program.backend.block_of(length))
    scores = sum(product.flops for product in products if "scores" in product.name) // 2  # of which half is forward
    order = 0
    if "family" in words:
        (head,) = [product for product in products if product.name == "head, forward"]
        assert head.rows == 2 * 40 < 2 * length
        order = 3 * 2 * 2 * hidden * (hidden + 2)  # forward, and both gradients, of two rows
    arguments = jax.eval_shape(program.layout.init), abstract_batch(config)
    found = equations(jax.make_jaxpr(train_step(program))(*arguments).jaxpr)
    ran = sum(times * product_flops(eqn) for eqn, times, _ in found if eqn.primitive.name == "dot_general")
    assert ran == sum(product.flops for product in products) + scores + order
