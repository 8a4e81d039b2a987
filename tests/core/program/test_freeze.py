"""Weights that `train.freeze` names are not trained: on any mesh, whatever the optimizer; others are as if alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from field import assert_exact
from jax.sharding import PartitionSpec
from tiny import LLAMA, MIXTURE, full, tiny_config, tiny_program, user_error

from jaxequal import numbers
from jaxequal.arrays import total
from jaxequal.functions import FUNCTIONS
from megajax.core.mesh import make_mesh
from megajax.core.models.freeze import fewer_layers, frozen_weights, untrained_layers
from megajax.core.parallel.shards import NOT_SHARDED, Shards
from megajax.core.pipeline.stages import Layers
from megajax.core.pipeline.sums import Floats, Sums
from megajax.settings.config import Config
from megajax.verify.comparison import named_parts
from megajax.verify.fields import Drawn, run_step

SIZE = {"num_layers": 5, "global_batch": 4, "precision": "fp64", "microbatch": 2}
AT_ONCE = {"warmup_steps": 0, "weight_decay": 0.5}


def config_of(mesh: tuple[int, ...], *freeze: str, **options: Any) -> Config:
    return tiny_config(mesh, freeze=freeze, **SIZE | {"optimizer": AT_ONCE} | options)


def masks(*freeze: str, **model: Any) -> dict[str, list[int] | bool]:
    """The frozen layers of stacked weights, by path, and whether others are frozen."""
    program = tiny_program(tiny_config(**{"num_layers": 5} | model))
    found = frozen_weights(freeze, program.model.shapes, program.config.model)
    return {"/".join(path): np.flatnonzero(mask).tolist() if mask.ndim else bool(mask) for path, mask in found.items()}


def test_names_select_weights():
    assert masks("embedding") == {"shared/table": True, "shared/positions": True}
    assert masks("head") == {"shared/final_norm/scale": True, "shared/final_norm/bias": True}
    layers = masks("layers.1-2,layers.4.mlp", "layers.0.attention.query")
    assert layers["blocks/mlp/up/weight"] == [1, 2, 4] and layers["blocks/attention/query/weight"] == [0, 1, 2]
    assert layers["blocks/attention/output/weight"] == [1, 2] and not any(path.startswith("shared") for path in layers)
    assert set(map(tuple, masks("layers").values())) == {(0, 1, 2, 3, 4)}
    assert masks("none") == masks() == {}
    mixture = {"num_experts": 4, "experts_per_token": 2, "dense_layers": 2, "positions": "rotary"}
    found = masks("layers.1-3.attention", **mixture)
    assert found["shared/dense_blocks/attention/query/weight"] == [1]
    assert found["blocks/attention/query/weight"] == [0, 1]


@pytest.mark.parametrize("name", ["embeddings", "layers.5", "layers.2-1", "layers.0.mlpp", "layers.", "Layers", ""])
def test_a_name_that_matches_nothing_lists_those_that_do(name: str):
    found = user_error(lambda: masks("embedding", name))
    assert found.startswith(f"--train.freeze {name!r}; valid: embedding, head, layers, layers.N or layers.FIRST-LAST")
    assert "with layers 0 to 4" in found and "layers.0.attention (attention, " in found and "positions, table" in found


def test_something_must_be_left():
    found = user_error(lambda: masks("embedding,head", "layers"))
    assert found == "--train.freeze embedding,head,layers leaves nothing to train; valid: fewer weights"


@pytest.mark.parametrize(
    ("freeze", "count"),
    [
        ("embedding,layers.0-2", 3),
        ("embedding,layers.0-1,layers.3", 2),
        ("embedding,layers", 5),
        *(("layers.0-3", 0), ("table,layers.0-1", 0), ("embedding,layers.0-1.mlp", 0)),
    ],
)
def test_layers_that_the_backward_pass_leaves_out(freeze: str, count: int):
    program = tiny_program(tiny_config(num_layers=5))
    shapes, model = program.model.shapes, program.config.model
    assert untrained_layers(frozen_weights([freeze], shapes, model), shapes, model) == count


def test_ranges_are_scaled_with_the_layers():
    """As `verify` makes a model smaller."""
    names = ("embedding,layers.0-11", "layers.23.mlp", "layers.attention")
    assert fewer_layers(names, 24, 4) == ("embedding", "layers.0-1", "layers.3-3.mlp", "layers.attention")
    assert fewer_layers(("layers.0-22",), 24, 2) == ("layers.0-1",)


FREEZE = ("embedding,layers.0-1", "layers.3.mlp", "final_norm.scale")
INTERLEAVED = {"schedule": "interleaved", "chunks": 2, "microbatch": 1}
MUON = {"optimizer": AT_ONCE | {"name": "muon", "epsilon": 1e-4}, "ema": 0.5}
DENSE = MIXTURE | {"num_experts": 4, "dense_layers": 2, "num_layers": 3}  # ZeRO shards the dim of those layers
SMALL = {"hidden_size": 16, "num_heads": 4, "sequence_length": 8, "vocab_size": 21}


def test_what_is_frozen_stays_and_does_not_count():
    """Exactly: not in gradients, their norm and clipping, not by decay, nor in moments; other gradients are as without
    freezing."""
    options = MUON | SMALL | {"precision": "fp32"}
    some, every = (run_step(config_of((1, 1, 1), *names, **options), branches=False) for names in (FREEZE, ()))
    drawn = Drawn(some.config)
    masks = frozen_weights(FREEZE, drawn.program.model.shapes, some.config.model)
    begun, after, squares = named_parts(drawn.canonical), some.taken.state, []
    for name, gradient in every.gradients.items():
        frozen = masks.get(tuple(name.split("/")), np.zeros((), bool))
        dims = *frozen.shape, *[1] * (gradient.ndim - 2 - frozen.ndim)
        frozen = np.broadcast_to(frozen.reshape(dims), gradient.shape)
        found = np.where(frozen, 0, gradient)
        np.testing.assert_array_equal(some.gradients[name], found, err_msg=name)
        squares.append(total(numbers.multiply(found, found), tuple(range(2, found.ndim)), np.float64))
        for part, leaves in begun.items():
            if name in leaves and part != "average":
                same = after[part][name] == leaves[name]
                assert same[frozen].all() and (frozen.all() or not same[~frozen].all()), (part, name)
    norm = FUNCTIONS["sqrt"][1](functools.reduce(numbers.add, squares))
    np.testing.assert_array_equal(*map(numbers.elements, (some.taken.metrics["grad_norm"], norm)))


@pytest.mark.parametrize(
    ("mesh", "freeze", "same", "here"),
    [
        full((2, 2, 2), FREEZE, LLAMA | MUON, {"zero": 3, "vocabulary": "split", "remat": "selective", **INTERLEAVED}),
        full((2, 2, 1), FREEZE, MUON, INTERLEAVED),
        full((2, 2, 2), FREEZE, {}, {"zero": 3, "weight_gradients": "deferred", "microbatch": 1}),
        full((2, 2, 2), FREEZE, LLAMA, {"zero": 0, "vocabulary": "split", "remat": "stage", "microbatch": 1}),
        full((1, 2, 1), ("layers.1-3", "head"), {}, {"weight_gradients": "deferred", "microbatch": 1}),
        ((2, 1, 1), ("layers.0",), DENSE, {}),
        full((3, 1, 1), ("layers.0",), DENSE | {"global_batch": 6}, {"zero": 3}),
        full((2, 1, 2), ("embedding,layers.0-3",), {"family": "bert"}, {"zero": 3, "sequence_parallel": True}),
    ],
)
@pytest.mark.slow
def test_every_mesh_freezes_the_same(mesh: tuple[int, ...], freeze: tuple[str, ...], same: dict, here: dict):
    assert_exact(config_of(mesh, *freeze, **{"precision": "bf16"} | SMALL | same | here), planned=same == LLAMA | MUON)


def test_the_backward_pass_ends_at_the_first_trained_layer():
    """Layers before it have no gradient and change none."""

    def totals(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        layers = Layers(
            function=lambda weights, _, index, x, context: (x * weights["w"], {}),
            weights={"w": weights},
            layer_index=jnp.arange(4, dtype=jnp.int32)[None],
            unroll=False,
            summation=Floats(jnp.float32),
            padded=False,
            storage=Shards({"w": NOT_SHARDED}),
            first_trained=2,
        )
        _, residuals = layers.forward_with_residuals(0, x, None)
        sums = Sums({("blocks", "w"): jnp.zeros_like(weights)})
        grad, sums = layers.pull_back(0, residuals, None, jnp.ones_like(x), sums)
        return sums.gradients["blocks", "w"], grad

    one, whole = make_mesh(jax.devices()[:1]), PartitionSpec()
    region = jax.shard_map(totals, mesh=one, in_specs=(whole, whole), out_specs=(whole, whole))
    total, grad = jax.jit(region)(jnp.array([2.0, 3.0, 5.0, 7.0]), jnp.ones(()))
    assert total.tolist() == [0, 0, 6 * 7, 30] and grad == 5 * 7
