"""GPT-2's size and initial weights: the paper's formula and distributions, the same on every mesh; and the count of a
step's arithmetic: the paper's formula, and the products in the program."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from counting import equations, product_flops
from tiny import MIXTURE, QWEN3, abstract_batch, full, tiny_config, tiny_program

from megajax.core.backend import CPU
from megajax.core.mesh import shardings
from megajax.core.models.config import ModelConfig
from megajax.core.models.flops import step_flops, step_products
from megajax.core.models.staged import StagedModel, count_parameters
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.program.state import INIT_OPTIONS
from megajax.core.program.train_step import train_step
from megajax.settings.presets import load_preset, resolve
from megajax.verify import named_leaves

SEED = 3
WIDE = ModelConfig(num_layers=3, hidden_size=64, num_heads=4, sequence_length=512, vocab_size=2048)
OF_EXPERTS = dataclasses.replace(WIDE, **MIXTURE | {"head_size": 16, "num_layers": 2})


@pytest.mark.parametrize("layers", [1, 5])
def test_the_count_is_the_formula(layers):
    """L(12h² + 13h) + Vh + Th + 2h for any size, V the padded vocabulary."""
    config = tiny_config(num_layers=layers).model
    h = config.hidden_size
    assert count_parameters(config) == layers * (12 * h**2 + 13 * h) + (128 + config.sequence_length + 2) * h


init_wide, init_mixture = (
    jax.jit(StagedModel(model, F_AND_G, CPU).init, compiler_options=INIT_OPTIONS["cpu"]) for model in (WIDE, OF_EXPERTS)
)


@pytest.fixture(scope="module")
def initial() -> dict[str, np.ndarray]:
    return named_leaves(init_wide(SEED))


def test_initial_weights_are_normal(initial):
    """Mean 0, standard deviation 0.02, or 0.02 / sqrt(2L) right before a residual addition; biases 0, norms 1."""
    weight, residual = "blocks/{}/weight".format, 0.02 / (2 * WIDE.num_layers) ** 0.5
    expected = {"shared/table": 0.02, "shared/positions": 0.02, weight("mlp/up"): 0.02, weight("mlp/down"): residual}
    expected |= {weight(f"attention/{name}"): 0.02 for name in ("query", "key", "value")}
    expected[weight("attention/output")] = residual
    for name, leaf in initial.items():
        if name in expected:
            std, error = expected.pop(name), leaf.size**-0.5  # of the estimates below, in units of std
            assert abs(leaf.mean()) < 5 * std * error, name
            assert abs(leaf.std() / std - 1) < 5 * error / 2**0.5, name
            assert abs((leaf**4).mean() / std**4 - 3) < 5 * 96**0.5 * error, name  # not uniform, not truncated
        else:
            assert (leaf == (1 if name.endswith("scale") else 0)).all(), name
            assert name.endswith(("bias", "norm/scale"))
    assert not expected


@pytest.mark.parametrize("init", [init_wide, init_mixture], ids=["gpt2", "mixture"])
def test_no_two_weights_are_drawn_alike(init):
    """Leading elements of every layer and expert of every matrix, in units of their standard deviation, all differ."""
    drawn = [leaf for leaf in named_leaves(init(SEED)).values() if leaf.std() > 0]
    leading = np.concatenate([x.reshape(-1, math.prod(x.shape[-2:]))[:, :8] / x.std() for x in drawn])
    distances = np.abs(leading[:, None] - leading[None]).max(-1)
    assert distances[~np.eye(len(leading), dtype=bool)].min() > 0.1


def test_a_layer_s_weights_do_not_depend_on_the_number_of_layers(initial):
    """Of fewer layers the first ones are the same bit for bit, but for the factor 1 / sqrt(2L) of some."""
    fewer = StagedModel(dataclasses.replace(WIDE, num_layers=2), F_AND_G, CPU)
    for name, leaf in named_leaves(jax.jit(fewer.init, compiler_options=INIT_OPTIONS["cpu"])(SEED)).items():
        expected = initial[name][:2] if name.startswith("blocks") else initial[name]
        if name in ("blocks/attention/output/weight", "blocks/mlp/down/weight"):
            np.testing.assert_allclose(leaf, expected * (WIDE.num_layers / 2) ** 0.5, rtol=1e-6)
        else:
            np.testing.assert_array_equal(leaf, expected)


def test_a_mesh_has_the_same_initial_weights(initial):
    """Bit for bit those of one device, though the pipe does not divide the layers, in the shards where they belong."""
    layout = tiny_program(dataclasses.replace(tiny_config((1, 2, 2), **dataclasses.asdict(WIDE)), seed=SEED)).layout
    params = layout.init().params
    placed = jax.tree.map(
        lambda x, sharding: x.sharding == sharding, params, shardings(layout.mesh, layout.specs.params)
    )
    assert all(jax.tree.leaves(placed)), placed
    actual = named_leaves(layout.canonical_weights(jax.device_get(params)))
    assert actual.keys() == initial.keys()
    for name, leaf in actual.items():
        np.testing.assert_array_equal(leaf, initial[name], err_msg=name)


def test_sizes_that_no_vector_divides_have_the_same_initial_weights():
    """With JAX 0.12 the rest of a vector had another last bit than its beginning, and 4 of 2,304 numbers differed."""
    odd = {"num_layers": 4, "hidden_size": 24, "num_heads": 4, "sequence_length": 16, "vocab_size": 101}
    one, other = (tiny_program(tiny_config(mesh, **odd)).layout for mesh in ((1, 1, 1), (1, 1, 4)))
    first, second = (named_leaves(layout.canonical_weights(layout.init().params)) for layout in (one, other))
    for name, leaf in first.items():
        np.testing.assert_array_equal(second[name], leaf, err_msg=name)


def test_another_seed_has_other_weights(initial):
    for name, leaf in named_leaves(init_wide(SEED + 1)).items():
        assert leaf.std() == 0 or (leaf == initial[name]).mean() < 0.01, name


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


@pytest.mark.parametrize(
    ("length", "words"), [full(16, {}), full(300, {}), (300, QWEN3), full(128, {"family": "bert"})]
)
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
    arguments = program.layout.shapes, abstract_batch(config)
    found = equations(jax.make_jaxpr(train_step(program))(*arguments).jaxpr)
    ran = sum(times * product_flops(eqn) for eqn, times, _ in found if eqn.primitive.name == "dot_general")
    assert ran == sum(product.flops for product in products) + scores + order
