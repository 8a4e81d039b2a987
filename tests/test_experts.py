"""Mixtures of experts: losses, gradients, loads and biases equal one device's on any mesh."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from parity_grid import cover, deferring, name
from tiny import MIXTURE, full, tiny_config, user_error

from megajax.models.experts import capacity_of
from megajax.models.router import LOAD, Router, bias_step
from megajax.parallel.boundary import F_AND_G
from megajax.parallel.random import NamedKey
from megajax.plan.communication import communication, totals
from megajax.settings.validation import validate
from megajax.verify import Comparison, compare
from megajax.verify.comparison import Leaves
from megajax.verify.run import MeshRun, run
from megajax.verify.theory import check_collectives

ROWS, TOKENS, LAYERS = 8, 16, 2
MESHES = [  # data, pipe, context, tensor; and expert
    *(((1, 1, 1, 1), 2), ((1, 1, 1, 1), 8), ((2, 1, 1, 1), 4), ((1, 2, 1, 1), 4), ((1, 1, 2, 1), 4)),
    *(((1, 1, 1, 2), 4), ((1, 2, 1, 2), 2), ((2, 1, 2, 1), 2), ((1, 1, 2, 2), 2), ((2, 2, 1, 2), 1)),
    *(((1, 2, 2, 1), 2), ((2, 2, 1, 1), 2), ((2, 1, 2, 2), 1)),
]
GRID: dict[str, list] = {
    "mesh": MESHES,
    "capacity": [0.0, 1.0, 1.25],
    "balance": ["none", "loss", "bias"],
    "zero": [0, 1, 3],
    "remat": ["none", "selective", "layer"],
    "schedule": ["1f1b-1", "gpipe-1", "interleaved-2"],
    "weight_gradients": ["together", "deferred"],
    "sequence_parallel": [False, True],
    "shared_expert_size": [0, 8],
    "dense_layers": [0, 1, 2],
}
DEFAULT = [
    (((1, 2, 1, 2), 2), 1.0, "bias", 1, "layer", "interleaved-2", "deferred", True, 8, 0),
    (((2, 1, 2, 1), 2), 1.25, "loss", 3, "selective", "1f1b-1", "together", False, 0, 2),
    (((1, 2, 1, 1), 4), 0.0, "loss", 1, "none", "1f1b-1", "deferred", False, 0, 1),
]


def exists(row: tuple) -> bool:
    ((_, pipe, _, tensor), _), *_, schedule, weight_gradients, split, _, _ = row
    piped = pipe > 1 or (schedule, weight_gradients) == ("1f1b-1", "together")
    return piped and (tensor > 1 or not split)


def pairwise() -> list[tuple]:
    """Every two values meet."""
    rows = [row for row in itertools.product(*GRID.values()) if exists(row)]
    return [rows[number] for number in cover(rows, [*itertools.combinations(range(len(GRID)), 2)])]


def config_of(row: tuple, **others: Any):
    (mesh, expert), capacity, balance, zero, remat, schedule, weight_gradients, split, *parts = row
    kind, _, chunks = schedule.rpartition("-")
    options = {"remat": remat, "schedule": kind, "chunks": int(chunks), "zero": zero, "sequence_parallel": split}
    microbatch = max(1, ROWS // (mesh[0] * expert) // 2)
    options |= deferring(weight_gradients) | {"microbatch": microbatch, "expert": expert}
    return tiny_config(mesh, **options | model_of(capacity, balance, *parts) | others)


def model_of(capacity: float, balance: str, shared: int, dense: int) -> dict[str, Any]:
    own = {"expert_capacity": capacity, "balance": balance, "router_z_loss": 0.01, "shared_expert_size": shared}
    own |= {"num_layers": LAYERS + dense, "dense_layers": dense}
    return MIXTURE | {"sequence_length": TOKENS, "global_batch": ROWS} | own


@functools.cache
def reference(capacity: float, balance: str, shared: int, dense: int, precision: str) -> MeshRun:
    config = tiny_config(microbatch=ROWS, precision=precision, **model_of(capacity, balance, shared, dense))
    return run(config, jax.devices(), 2)


def exact(found: MeshRun) -> Leaves:
    """Loads, what is dropped, and the biases after them."""
    loads = {f"{name}, step {step}": x for step in range(2) for name, x in found.counts[step].items()}
    dropped = {f"dropped, step {step}": np.asarray(found.metrics[step]["experts/dropped"]) for step in range(2)}
    biases = {name: leaf for name, leaf in found.weights.items() if name.endswith("router/bias")}
    return loads | dropped | biases


def check(row: tuple, precision: str = "fp32") -> Comparison:
    """What is sent, by kind, axes, shape, bytes and count, is what is planned and in theory."""
    _, capacity, balance, *_, shared, dense = row
    config = config_of(row, precision=precision)
    expected, actual = reference(capacity, balance, shared, dense, precision), run(config, jax.devices(), 2)
    wanted, found = exact(expected), exact(actual)
    assert any(LOAD in name for name in found)
    assert found.keys() == wanted.keys() and all((found[name] == wanted[name]).all() for name in wanted), row
    assert (theory := check_collectives(config, actual.collectives)).passed, theory
    assert totals(communication(config)) == totals(actual.collectives)
    return compare(expected, actual)


@pytest.mark.parametrize("row", [DEFAULT[0], *map(full, DEFAULT[1:])], ids=name)
def test_grid(row):
    result = check(row)
    assert result.within(), result


@pytest.mark.full
def test_whole_grid():
    """Pairwise, in fp64."""
    for row in pairwise():
        result = check(row, "fp64")
        assert result.loss_error < 1e-12 and result.gradient_error < 1e-12, (row, result)


@pytest.mark.parametrize("renormalize", [True, False])
def test_shares_by_hand(renormalize):
    """Those of the most probable experts, alone or as they are."""
    config = tiny_config(**MIXTURE | {"renormalize_shares": renormalize}).model
    router, x_BTD = Router(config, NamedKey.from_seed(0), F_AND_G), np.random.default_rng(0).normal(size=(2, 3, 24))
    routing = router(x_BTD.astype(np.float32), None, 0)
    logits = x_BTD @ np.asarray(router.weight[...])
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-shares, axis=-1)[..., : config.experts_per_token]
    wanted = np.take_along_axis(shares, chosen, -1)
    assert (routing.chosen_BTK == chosen).all()
    np.testing.assert_allclose(routing.share_BTK, wanted / (wanted.sum(-1, keepdims=True) ** renormalize), rtol=1e-5)


def test_a_capacity_is_rounded_up_from_the_exact_product():
    """1.1 times 10 is a little more than 11 in floating point."""
    for capacity, tokens in ((1.1, 11), (1.11, 12), (0.01, 1), (9.0, 40)):
        assert capacity_of(tiny_config(**MIXTURE | {"expert_capacity": capacity}).model, 40) == tokens


def test_biases_follow_loads():
    """Towards those that are chosen too rarely; none moves where all are chosen as often."""
    load = np.array([[3, 1, 2, 2], [2, 2, 2, 2], [3, 2, 2, 2], [0, 0, 0, 0], [10**9, 0, 1, 1]], np.int32)
    wanted = [[-0.5, 0.5, 0, 0], [0] * 4, [-0.5, 0.5, 0.5, 0.5], [0] * 4, [-0.5, 0.5, 0.5, 0.5]]
    assert np.asarray(bias_step(load, 0.5, np.float32)).tolist() == wanted


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"expert": 3, "global_batch": 6}, "--mesh.expert 3 does not divide --model.num-experts 8; valid: 1, 2, 4, 8"),
        ({"experts_per_token": 9}, "--model.experts-per-token 9 with --model.num-experts 8; valid: 1 to 8"),
        ({"expert": 2, "num_experts": 0, "experts_per_token": 0}, "--mesh.expert 2 with a model without experts; "),
        ({"expert_capacity": -1.0}, "--model.expert-capacity -1.0; valid: 0 to 10000"),
        ({"expert": 8, "global_batch": 4}, "--train.global-batch 4 is not divisible by --mesh.data 1 x "),
        ({"remat": "stage"}, "--train.remat stage with experts"),
        ({"dense_layers": 4}, "--model.dense-layers 4 with --model.num-layers 4, which leaves no layer"),
        ({"dense_layers": 2, "mesh": (1, 4, 1)}, "--mesh.pipe 4 with --model.num-layers 4 less --model.dense-layers 2"),
        ({"bias": "all"}, "--model.bias all with --model.num-experts 8"),
    ],
)
def test_what_cannot_work_is_one_line(options, words):
    config = tiny_config(**{**MIXTURE, "shared_expert_size": 0, "expert_size": 0} | options)
    message = user_error(validate, config, config.mesh.num_devices)
    assert message.startswith(words), message
