"""The record of a weight says what the layers do with it."""

import jax
import pytest
from flax import nnx
from tiny import LLAMA, MIXTURE, QWEN3, tiny_config, tiny_program


@pytest.mark.parametrize("options", [{}, {"family": "bert"}, LLAMA, QWEN3, MIXTURE], ids=str)
def test_products_have_the_sides_that_layers_contract(options) -> None:
    """Read from the names of their dims."""
    program, found = tiny_program(tiny_config(**options)), {}
    block = program.model.layers[""].block(program.model.shapes["blocks"])
    paths = {id(node): path for path, node in nnx.iter_graph(block) if isinstance(node, nnx.Param)}
    for linear in (linear for linears in block.products.values() for linear in linears):
        ndim = len(linear.weight.shape) - 1  # without the dim of the layers
        found["blocks", *paths[id(linear.weight)]] = linear.contracted, ndim - linear.stacked - linear.contracted
    records = jax.tree.leaves(program.layout.weights)
    assert {weight.path: weight.sides for weight in records if weight.of_product} == found
