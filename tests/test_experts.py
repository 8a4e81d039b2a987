"""Mixtures of experts: losses, gradients, loads and biases equal one device's on any mesh."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from parity_grid import cover, name
from scipy.special import expit, softmax
from tiny import MIXTURE, tiny_config, tiny_program, user_error

from megajax.core.models.attention_mask import CAUSAL
from megajax.core.models.context import Context
from megajax.core.models.decoder.model import real_tokens
from megajax.core.models.experts import capacity_of
from megajax.core.models.router import LOAD, Router, bias_step
from megajax.core.parallel.boundary import F_AND_G
from megajax.core.parallel.random import Dropout, NamedKey
from megajax.core.program.train_step import train_step_with_gradients
from megajax.data.synthetic import random_batch
from megajax.settings.validation import validate
from megajax.verify import CompiledComparison, compare
from megajax.verify.comparison import Leaves
from megajax.verify.forms import in_blocks
from megajax.verify.run import MeshRun, drawn_state, run

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
    (((1, 2, 1, 2), 2), 1.0, "bias", 1, "layer", "interleaved-2", "deferred", True, 8, 1),
    (((2, 1, 2, 1), 2), 1.25, "loss", 3, "selective", "1f1b-1", "together", False, 0, 2),
    (((1, 2, 1, 1), 4), 0.0, "loss", 1, "none", "1f1b-1", "deferred", False, 0, 1),
]


def exists(row: tuple) -> bool:
    ((_, pipe, _, tensor), _), *_, schedule, weight_gradients, split, _, _ = row
    piped = pipe > 1 or (schedule, weight_gradients) == ("1f1b-1", "together")
    return piped and (tensor > 1 or not split)


@functools.cache
def rows() -> list[tuple]:
    return [row for row in itertools.product(*GRID.values()) if exists(row)]


def reference_of(row: tuple) -> tuple:
    """What the computation of one device depends on."""
    return (*row[1:3], *row[-2:])


def pairwise(rows: list[tuple]) -> list[tuple]:
    """Every two values meet."""
    return [rows[number] for number in cover(rows, [*itertools.combinations(range(len(GRID)), 2)])]


def config_of(row: tuple, **others: Any):
    (mesh, expert), capacity, balance, zero, remat, schedule, weight_gradients, split, *parts = row
    kind, _, chunks = schedule.rpartition("-")
    options = {"remat": remat, "schedule": kind, "chunks": int(chunks), "zero": zero, "sequence_parallel": split}
    microbatch = max(1, ROWS // (mesh[0] * expert) // 2)
    options |= {"weight_gradients": weight_gradients, "microbatch": microbatch, "expert": expert}
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
    dropped = {"dropped": np.asarray(found.metrics[0]["experts/dropped"])}
    biases = {name: leaf for name, leaf in found.weights.items() if name.endswith("router/bias")}
    return found.loads | dropped | biases


def check(row: tuple, precision: str = "fp32") -> CompiledComparison:
    """Loss and gradients; loads and biases are equal."""
    _, capacity, balance, *_, shared, dense = row
    config = config_of(row, precision=precision)
    expected = reference(capacity, balance, shared, dense, precision)
    actual = run(config, jax.devices(), 2, backend=in_blocks(config))
    wanted, found = exact(expected), exact(actual)
    assert any(LOAD in name for name in found)
    assert found.keys() == wanted.keys() and all((found[name] == wanted[name]).all() for name in wanted), row
    return compare(expected.trace, actual.trace)


@pytest.mark.full
@pytest.mark.parametrize("row", DEFAULT, ids=name)
def test_grid(row):
    result = check(row)
    assert result.within(), result


@pytest.mark.full
def test_pairs_of_the_grid():
    """Some of them, in fp64; `test_field.py` has all."""
    for row in pairwise(rows())[::6]:
        result = check(row, "fp64")
        assert result.loss_error < 1e-12 and result.gradient_error < 1e-12, (row, result)


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_by_hand(renormalize):
    """Shares are those of the most probable experts, alone or as they are; losses, loads and figures are those of real
    tokens, and one sequence is only padding. Loads are beyond what half precision counts exactly."""
    coefficients = {"balance": "loss", "balance_coefficient": 0.5, "router_z_loss": 0.25}
    config = tiny_config(**MIXTURE | coefficients | {"renormalize_shares": renormalize}).model
    router, x_BTD = Router(config, NamedKey.from_seed(0), F_AND_G), np.random.default_rng(0).normal(size=(3, 1501, 24))
    router.weight[...] *= 50.0
    real_BT = np.arange(1501) < np.array([1501, 4, 0])[:, None]
    routing = router(x_BTD.astype(np.float32), Context(Dropout.off(), CAUSAL, real_BT=real_BT), 2)
    logits = x_BTD @ np.asarray(router.weight[...])
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-shares, axis=-1)[..., : config.experts_per_token]
    assert (routing.chosen_BTK == np.where(real_BT[..., None], chosen, config.num_experts)).all()
    wanted = np.take_along_axis(shares, chosen, -1)
    wanted = np.where(real_BT[..., None], wanted / (wanted.sum(-1, keepdims=True) ** renormalize), 0)
    np.testing.assert_allclose(routing.share_BTK, wanted, rtol=1e-5)
    load, balance, losses = np.zeros((config.num_blocks, config.num_experts), int), 0.0, [0.0] * 3
    for row, count in enumerate([1501, 4]):
        often = np.bincount(chosen[row, :count].ravel(), minlength=config.num_experts)
        each = config.num_experts * often / often.sum() @ shares[row, :count].mean(axis=0)
        load[2], balance = load[2] + often, balance + each
        losses[row] = 0.5 * each + 0.25 * (np.log(np.exp(logits[row, :count]).sum(-1)) ** 2).mean()
    np.testing.assert_allclose(routing.loss_B, losses, rtol=1e-5)
    assert (routing.figures[LOAD] == load).all()
    np.testing.assert_allclose(routing.figures["balance_loss"], balance, rtol=1e-5)
    entropy = -(shares * np.log(shares)).sum(-1)[real_BT].sum()
    np.testing.assert_allclose(routing.figures["router_entropy"], entropy, rtol=1e-5)


@pytest.mark.parametrize(("scores", "count"), [("softmax", 1), ("sigmoid", 2)])
def test_groups_by_hand(scores, count):
    """A token's experts are in the group whose largest scores, so many, have the largest sum."""
    config = tiny_config(**MIXTURE | {"router_scores": scores, "expert_groups": 2}).model
    router, logits_TE = Router(config, NamedKey.from_seed(0), F_AND_G), np.random.default_rng(0).normal(size=(99, 8))
    score_TGE = (softmax(logits_TE, axis=-1) if scores == "softmax" else expit(logits_TE)).reshape(99, 2, 4)
    best_T = np.sort(score_TGE)[..., -count:].sum(-1).argmax(-1)
    chosen_TK = np.argsort(-score_TGE[np.arange(99), best_T])[:, : config.experts_per_token]
    found = router._chosen(score_TGE.reshape(1, 99, 8).astype(np.float32))
    assert (found[0] == chosen_TK + 4 * best_T[:, None]).all()


@pytest.mark.parametrize("documents", [True, False])
def test_what_is_padding(documents):
    """With documents, what is alone in one and has no target; otherwise what follows a row's last target."""
    targets = np.array([[5, -1, 7, -1, -1, -1], [-1, -1, -1, -1, -1, -1], [-1, 3, 2, 1, 1, 4]])
    positions = np.array([[0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 0]])
    batch = {"tokens": targets, "targets": targets}
    wanted = [[1, 1, 1, 0, 0, 0], [0] * 6, [1] * 6]
    if documents:
        batch, wanted = batch | {"positions": positions}, [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]
    assert real_tokens(batch).astype(int).tolist() == wanted
    assert real_tokens({"tokens": targets}).all()


def biases_of(weights: Any) -> list[Any]:
    """Of the layers' routers, and of modules'."""
    layers = weights["blocks"], weights["shared"]["prediction"]["block"]
    return [layer["mlp"]["router"]["bias"] for layer in layers]


@pytest.mark.slow
def test_padding_changes_nothing():
    """Whatever it holds, in a step by capacity; a step without any target leaves the biases alone, though not those of
    a prompt. In half precision, biases stay in fp32. A module for further tokens has one token less."""
    model = MIXTURE | {"expert_capacity": 1.0, "balance": "bias", "router_z_loss": 0.01, "num_layers": 1}
    model |= {"prediction_modules": 1, "dropout": 0.0}
    config = tiny_config(microbatch=8, precision="bf16", reset_attention=True, **model | {"sequence_length": TOKENS})
    program = tiny_program(config)
    bias = program.layout.shapes.params["blocks"]["mlp"]["router"]["bias"]
    assert bias.dtype == np.float32 and program.layout.shapes.params["shared"]["table"].dtype == "bfloat16"
    layout, batch = program.layout, random_batch(config, 0)
    batch["targets"][:, 4:], batch["positions"][:] = -1, np.where(np.arange(TOKENS) < 4, np.arange(TOKENS), 0)
    state = layout.from_canonical(drawn_state(program))
    step = train_step_with_gradients(program).lower(state, program.put_batch(batch, program.local_rows)).compile()

    def results(batch: dict[str, np.ndarray]) -> Any:
        state = layout.from_canonical(drawn_state(program))
        before = jax.device_get(biases_of(state.main))
        state, *found = step(state, program.put_batch(batch, program.local_rows))
        *found, after = jax.device_get((*found, biases_of(state.main)))
        return *found, [new - old for new, old in zip(after, before, strict=True)]

    filler = batch | {"tokens": np.where(np.arange(TOKENS) < 4, batch["tokens"], 77)}
    first, second = results(batch), results(filler)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))
    metrics, _, moved = first
    assert metrics[LOAD].sum(axis=1).tolist() == [8 * 4 * 2, 8 * 3 * 2] and metrics["experts/dropped"] == 0
    expected = [bias_step(load, config.model.balance_step, np.float32) for load in metrics[LOAD]]
    np.testing.assert_allclose([each.ravel() for each in moved], expected, rtol=1e-4)
    metrics, _, moved = results(batch | {"targets": np.full_like(batch["targets"], -1)})
    assert metrics[LOAD].sum(axis=1).tolist() == [8 * 4 * 2, 8 * 3 * 2] and not any(each.any() for each in moved)


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
    ],
)
def test_what_cannot_work_is_one_line(options, words):
    config = tiny_config(**{**MIXTURE, "shared_expert_size": 0, "expert_size": 0} | options)
    message = user_error(validate, config, config.mesh.num_devices)
    assert message.startswith(words), message
