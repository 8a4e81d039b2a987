"""The weights as plain numbers are those of the program: shapes, places, what ZeRO divides."""

import dataclasses

import jax
import pytest
from tiny import LLAMA, QWEN3, tiny_config, tiny_program

from megajax.mesh import local_shape
from megajax.parallel.shards import NOT_SHARDED
from megajax.plan.shapes import held

BERT = {"family": "bert", "layer_order": "post"}
CASES = [
    ((2, 2, 2), {}),
    ((4, 1, 2), {"zero": 0} | LLAMA),
    ((1, 2, 4), {"num_layers": 5, "vocabulary": "split"} | QWEN3),
    ((2, 2, 2), {"zero": 3, "precision": "bf16", "num_layers": 6, "schedule": "interleaved", "chunks": 2} | BERT),
    ((8, 1, 1), {"zero": 3}),
]


@pytest.mark.parametrize(("mesh", "options"), CASES)
def test_they_are_those_of_the_program(mesh, options) -> None:
    config = tiny_config(mesh, **options)
    layout = tiny_program(config).layout
    sizes = layout.mesh.shape
    expected = {}
    for name, shapes, specs in (
        ("computed", layout.shapes.params, layout.specs.params),
        ("owned", layout.shapes.params, layout.trained_specs),
    ):
        leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
        local = [
            local_shape(spec, leaf.shape, sizes) for (_, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True)
        ]
        expected[name] = local
    zero = config.optimizer.zero
    found = held(config).weights
    assert [(*each.weight.path,) for each in found] == [tuple(key.key for key in path) for path, _ in leaves]
    for name, split in (("computed", zero == 3), ("owned", zero > 0)):
        for each, pipelined in zip(found, expected[name], strict=True):
            shape = each.shard if split else each.whole
            assert (each.copies, *shape) == (
                (pipelined[0] * pipelined[1] * pipelined[2], *pipelined[3:]) if each.weight.stacked else (1, *pipelined)
            )
    assert [each.needs_tensor_sum for each in found] == jax.tree.leaves(layout.needs_tensor_sum)
    if zero:
        dims = jax.tree.leaves((layout.per_use if zero == 3 else layout.per_step).dims)
        mine = [NOT_SHARDED if each.data_dim is None else each.data_dim - len(each.whole) for each in found]
        assert mine == dims


def test_numbers_of_all() -> None:
    config = tiny_config((2, 1, 2))
    wide = held(dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, zero=0)))
    split = held(config)
    assert wide.num_trained == wide.num_computed == split.num_computed and split.num_trained < wide.num_trained
