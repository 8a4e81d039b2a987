"""Muon on sharded matrices is optax's on whole ones, in fp64 to rounding; which weights are matrices."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, muon
from tiny import LLAMA, QWEN3, full, tiny_config, tiny_program

from megajax.core.mesh import matrix_dims, shardings
from megajax.core.optim.adam import learning_rate, update
from megajax.core.program.program import Program
from megajax.settings.config import Config
from megajax.verify import named_leaves

STEPS = 5


def config_of(mesh: tuple[int, ...] = (1, 1, 1), muon: dict | None = None, **options) -> Config:
    rates = {"learning_rate": 0.02, "schedule": "constant", "weight_decay": 0.1, "name": "muon"} | (muon or {})
    return tiny_config(mesh, optimizer=rates, **{"precision": "fp64", "num_layers": 5} | options)


def is_matrix(name: str) -> bool:
    return name.startswith("blocks/") and name.endswith("/weight")


def random_tree(program: Program, seed: int) -> dict:
    """Weights or gradients in canonical form."""
    rng = np.random.default_rng(seed)
    shapes = program.layout.canonical_shapes.params
    return jax.tree.map(lambda leaf: rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype), shapes)


def after_steps(program: Program) -> dict[str, np.ndarray]:
    """Weights after some updates in the region of the step, from gradients that numpy draws."""
    layout = program.layout
    weights, moments = layout.trained_specs, layout.specs.optimizer

    def step(grads, state, params):
        return update(program.optimizer, grads, state, params, True)

    region = jax.shard_map(step, mesh=program.mesh, in_specs=(weights, moments, weights), out_specs=(weights, moments))
    compiled = jax.jit(region, donate_argnums=(1, 2))

    def place(tree):
        return jax.device_put(layout.params_on_stages(tree, specs=weights), shardings(program.mesh, weights))

    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), layout.shapes.optimizer)
    state, params = jax.device_put(state, shardings(program.mesh, moments)), place(random_tree(program, 0))
    for number in range(STEPS):
        params, state = compiled(place(random_tree(program, number + 1)), state, params)
    return named_leaves(jax.device_get(layout.canonical_weights(params)))


def expected(config: Config) -> dict[str, np.ndarray]:
    """The same by optax on whole weights."""
    program, given = tiny_program(config), config.optimizer

    def rate(peak: float):
        return lambda step: peak / given.learning_rate * learning_rate(step, given)

    def dims(path, leaf):
        names = [key.key for key in path]
        if not is_matrix("/".join(names)):
            return None
        rows = leaf.ndim - 2 if "output" in names else 1
        return MuonDimensionNumbers(tuple(range(1, 1 + rows)), tuple(range(1 + rows, leaf.ndim)))

    of_muon = muon(
        rate(given.learning_rate),
        (3.4445, -4.775, 2.0315),
        given.muon_steps,
        given.muon_momentum,
        given.epsilon,
        given.weight_decay,
        muon_weight_dimension_numbers=lambda tree: jax.tree_util.tree_map_with_path(dims, tree),
        consistent_rms=0.2 if given.muon_scale == "match-adamw" else None,
    )
    of_adamw = optax.adamw(
        rate(given.adamw_learning_rate or given.learning_rate),
        *(given.beta1, given.beta2, given.epsilon),
        weight_decay=given.weight_decay,
        mask=program.layout.decays,
    )

    def steps(optimizer) -> dict[str, np.ndarray]:
        params = random_tree(program, 0)
        state = optimizer.init(params)

        @jax.jit
        def step(grads, state, params):
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for number in range(STEPS):
            params, state = step(random_tree(program, number + 1), state, params)
        return named_leaves(jax.device_get(params))

    by_muon, by_adamw = steps(of_muon), steps(of_adamw)
    return {name: by_muon[name] if is_matrix(name) else leaf for name, leaf in by_adamw.items()}


OPTIONS = {
    "gpt2": {},
    "llama": LLAMA | {"muon": {"muon_scale": "spectral", "adamw_learning_rate": 0.003}},
    "qwen3": QWEN3 | {"muon": {"muon_steps": 7, "muon_momentum": 0.8}},
}
REFERENCES: dict[tuple[str, int], dict[str, np.ndarray]] = {}
ROWS = [  # mesh, model, what else
    full((1, 1, 1), "gpt2", {}),
    ((1, 1, 1), "llama", {"num_layers": 1}),  # any mesh is one device exactly (`test_field.py`)
    full((2, 2, 2), "llama", {"schedule": "interleaved", "chunks": 2}),
    full((1, 2, 2, 2), "gpt2", {"zero": 0}),
    full((1, 1, 4), "qwen3", {}),
    full((2, 1, 2), "gpt2", {"num_layers": 2}),  # a device's share is that of one weight (see `_Deal._exchanged`)
    full((8, 1, 1), "gpt2", {}),
    full((3, 1, 2), "gpt2", {}),
    full((7, 1, 1), "gpt2", {}),  # rows and columns are one dim of a shard
    full((1, 1, 8), "gpt2", {}),
    full((4, 1, 2), "qwen3", {"zero": 3}),
    full((2, 1, 2, 2), "llama", {"zero": 3}),
    full((1, 8, 1), "gpt2", {}),
]


@pytest.mark.parametrize(("mesh", "model", "others"), ROWS)
def test_sharded_updates_are_optax_s(mesh, model, others):
    """After five steps, in fp64 to rounding, on any mesh: of matrices by Muon, of the others by AdamW."""
    with jax.enable_x64(True):
        config = config_of(mesh, **OPTIONS[model] | others)
        size = model, config.model.num_layers
        if size not in REFERENCES:
            REFERENCES[size] = expected(config_of(**OPTIONS[model] | {"num_layers": size[1]}))
        actual = after_steps(tiny_program(config))
    for name, leaf in REFERENCES[size].items():
        assert np.abs(actual[name] - leaf).max() < 1e-12 * np.abs(leaf).max(), name


@pytest.mark.parametrize(
    ("dims", "found"),
    [
        ("embed heads head_size", (1, 2)),
        ("heads head_size embed", (2, 1)),
        ("embed mlp", (1, 1)),
        ("experts mlp embed", (1, 1)),  # a stack of them
        ("embed experts", None),  # a router
        ("embed features", None),
        ("embed", None),
        ("heads head_size", None),
        ("vocabulary embed", None),
        ("embed rank", None),
        ("rank mlp", None),
    ],
)
def test_the_names_of_dims_say_what_is_a_matrix(dims, found):
    assert matrix_dims(P(*dims.split())) == found
