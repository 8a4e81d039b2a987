"""Embedding and cross-entropy over a split vocabulary equal the dense ones, values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tiny import full, user_error

from megajax.core.backend import CPU
from megajax.core.batch import IGNORED
from megajax.core.mesh import make_mesh
from megajax.core.models.distillation import distillation
from megajax.core.models.own_loss import Logits
from megajax.core.parallel.boundary import F_AND_G, RegionBoundary
from megajax.core.parallel.vocabulary import cross_entropy, embedding_lookup, greedy_ids, output_logits

SIZES = [full(1), full(2), 8]
BATCH, LENGTH, HIDDEN = 2, 8, 6
SPLITS = [(F_AND_G, P()), (RegionBoundary(sequence_parallel=True), P(None, "tensor"))]  # and the spec of x_BTD
# (raw, padded): odd; a multiple already; the last of 8 devices has nothing but padding, the one before some.
VOCABULARIES = [(101, 104), (64, 64), (101, 128)]


def region(size: int, in_specs, out_specs):
    """Decorator: run a function in the `shard_map` region of `size` tensor devices."""
    mesh = make_mesh(jax.devices()[:size], tensor=size)
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return lambda function: jax.jit(mapped(function))


def sample(raw: int, padded: int, seed: int = 0, ignored: bool = False) -> tuple[np.ndarray, ...]:
    """Hidden states, table (padded rows are not zero), and token ids that include the vocabulary's first and last."""
    rng = np.random.default_rng(seed)
    x_BTD = rng.normal(size=(BATCH, LENGTH, HIDDEN)).astype(np.float32)
    table_VD = rng.normal(size=(padded, HIDDEN)).astype(np.float32)
    ids_BT = rng.integers(0, raw, (BATCH, LENGTH), np.int32)
    ids_BT[0, 0], ids_BT[1, -1] = 0, raw - 1
    if ignored:
        ids_BT[0, 2:4] = IGNORED
    return x_BTD, table_VD, ids_BT


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_lookup_equals_the_dense_one(size, sequence):
    """Rows of the table, and the gradient of every row, for ids in every device's range."""
    split, spec = SPLITS[sequence]
    _, table_VD, ids_BT = sample(101, 104)
    grad_BTD = np.random.default_rng(1).normal(size=(BATCH, LENGTH, HIDDEN)).astype(np.float32)

    @region(size, (P("tensor"), P(), spec), (spec, P("tensor")))
    def lookup(table_VD, ids_BT, grad_BTD):
        y_BTD, pullback = jax.vjp(lambda table: embedding_lookup(table, ids_BT, split), table_VD)
        return y_BTD, pullback(grad_BTD)[0]

    y_BTD, grad_VD = lookup(table_VD, ids_BT, grad_BTD)
    np.testing.assert_array_equal(y_BTD, table_VD[ids_BT])
    expected_VD = np.zeros_like(table_VD)
    np.add.at(expected_VD, ids_BT, grad_BTD)
    np.testing.assert_allclose(grad_VD, expected_VD, rtol=1e-6, atol=1e-7)


@partial(jax.jit, static_argnums=0)
def dense_head(raw: int, x_BTD, table_VD, targets_BT, weight_BT):
    """The same with optax on the raw vocabulary."""

    def loss(x_BTD, table_VD):
        logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD[:raw])
        picked = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, jnp.maximum(targets_BT, 0))
        return jnp.where(targets_BT == IGNORED, 0.0, picked)

    loss_BT, pullback = jax.vjp(loss, x_BTD, table_VD)
    return loss_BT, *pullback(weight_BT)


@pytest.mark.parametrize(("raw", "padded"), [*map(lambda each: full(*each), VOCABULARIES[:2]), VOCABULARIES[2]])
@pytest.mark.parametrize(("size", "sequence"), [full(1, False), full(2, False), (8, False), (2, True), full(8, True)])
def test_head_equals_the_dense_one(size, sequence, raw, padded):
    """Loss per token and gradients of hidden states and table; ignored targets; padded rows have no gradient at all."""
    x_BTD, table_VD, targets_BT = sample(raw, padded, ignored=True)
    weight_BT = np.random.default_rng(2).uniform(0.5, 2, (BATCH, LENGTH)).astype(np.float32)
    split, spec = SPLITS[sequence]

    @region(size, (spec, P("tensor"), P(), P()), (P(), spec, P("tensor")))
    def head(x_BTD, table_VD, targets_BT, weight_BT):
        def loss(x_BTD, table_VD):
            return cross_entropy(output_logits(x_BTD, table_VD, raw, split, CPU), targets_BT)

        loss_BT, pullback = jax.vjp(loss, x_BTD, table_VD)
        return loss_BT, *pullback(weight_BT)

    loss_BT, grad_BTD, grad_VD = head(x_BTD, table_VD, targets_BT, weight_BT)
    expected = dense_head(raw, x_BTD, table_VD, targets_BT, weight_BT)
    for actual, reference in zip((loss_BT, grad_BTD, grad_VD), expected, strict=True):
        np.testing.assert_allclose(actual, reference, rtol=2e-5, atol=2e-6)
    ignored_BT = targets_BT == IGNORED
    assert ignored_BT.any() and not np.asarray(loss_BT)[ignored_BT].any() and not np.asarray(grad_BTD)[ignored_BT].any()
    assert not np.asarray(grad_VD)[raw:].any()


@pytest.mark.parametrize("size", SIZES)
def test_padded_columns_have_no_probability(size):
    """Exactly zero, however large the padded rows' products would be."""
    x_BTD, table_VD, _ = sample(101, 128)
    table_VD[101:] = 1e3 * np.sign(x_BTD[0, 0])

    @region(size, (P(), P("tensor")), P(None, None, "tensor"))
    def logits(x_BTD, table_VD):
        return output_logits(x_BTD, table_VD, 101, F_AND_G, CPU)

    probability_BTV = np.asarray(jax.nn.softmax(logits(x_BTD, table_VD)))
    assert not probability_BTV[..., 101:].any()
    np.testing.assert_allclose(probability_BTV.sum(-1), 1, rtol=1e-5)


def split_cross_entropy(size: int):
    @region(size, (P(None, None, "tensor"), P()), (P(), P(None, None, "tensor")))
    def run(logits_BTV, targets_BT):
        loss_BT, pullback = jax.vjp(lambda logits: cross_entropy(logits, targets_BT), logits_BTV)
        return loss_BT, pullback(jnp.ones_like(loss_BT))[0]

    return run


@pytest.mark.parametrize("size", SIZES)
def test_large_logits_do_not_overflow(size):
    """Logits of ±10,000: loss and gradient are those of the differences between the logits."""
    logits_BTV = np.full((1, 4, 64), -1e4, np.float32)
    logits_BTV[0, :2, 9] = 1e4  # one winner, which is the target or is not
    logits_BTV[0, 2] = 1e4  # all equal and large
    targets_BT = np.array([[9, 50, 3, 7]], np.int32)
    loss_BT, grad_BTV = split_cross_entropy(size)(logits_BTV, targets_BT)
    np.testing.assert_allclose(loss_BT, [[0, 2e4, np.log(64), np.log(64)]], rtol=1e-6)
    expected_BTV = np.zeros_like(logits_BTV)
    expected_BTV[0, 1, [9, 50]] = 1, -1
    expected_BTV[0, 2:] = 1 / 64
    expected_BTV[0, [2, 3], [3, 7]] -= 1
    np.testing.assert_allclose(grad_BTV, expected_BTV, atol=1e-7)


@pytest.mark.parametrize("size", SIZES)
def test_bf16_logits_have_fp32_statistics(size):
    """The loss of bf16 logits is exact to fp32, a sum of 8,192 terms included; their gradient is bf16."""
    logits_BTV = np.random.default_rng(3).normal(size=(1, 3, 8192)).astype(jnp.bfloat16)
    targets_BT = np.array([[0, 4095, 8191]], np.int32)
    loss_BT, grad_BTV = split_cross_entropy(size)(logits_BTV, targets_BT)
    assert loss_BT.dtype == jnp.float32 and grad_BTV.dtype == jnp.bfloat16
    wide_BTV = logits_BTV.astype(np.float64)
    normalizer_BT = np.log(np.exp(wide_BTV).sum(-1))
    picked_BT = np.take_along_axis(wide_BTV, targets_BT[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss_BT, normalizer_BT - picked_BT, rtol=2e-6)
    hit_BTV = np.arange(8192) == targets_BT[..., None]
    expected_BTV = np.exp(wide_BTV - normalizer_BT[..., None]) - hit_BTV
    np.testing.assert_allclose(np.asarray(grad_BTV).astype(np.float64), expected_BTV, rtol=2**-8)


@pytest.mark.parametrize("size", SIZES)
def test_greedy_ids_are_the_first_of_the_largest(size):
    """Equal logits on one device and on several; all equal; the vocabulary's first and last; not a number."""

    @region(size, (P(None, None, "tensor"),), P())
    def greedy(logits_BTV):
        return greedy_ids(logits_BTV)

    logits_BTV = np.random.default_rng(4).normal(size=(2, 4, 64)).astype(np.float32)
    logits_BTV[0, 0, [9, 10, 50]] = 7
    logits_BTV[0, 1] = -3
    logits_BTV[0, 2, 0] = logits_BTV[0, 3, 63] = 7
    expected_BT = logits_BTV.argmax(-1)
    logits_BTV[1, 0] = np.nan
    found_BT = np.asarray(greedy(logits_BTV))
    assert found_BT[1, 0] >= 64, "no id is the greatest"
    np.testing.assert_array_equal(np.delete(found_BT, 4), np.delete(expected_BT, 4))


@pytest.mark.parametrize("size", SIZES)
def test_ids_that_no_column_has_count_nowhere(size):
    """A teacher may have more ids than its student, which has 101: ids of padding and beyond. In fp64 by hand."""
    ids_BTK = np.array([[[3, 150, 100], [110, 5, 7], [128, 101, 999], [4, 0, 100], [-1, -1, -1]]], np.int32)
    p_BTK = np.array([[[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.2, 0.2, 0.6], [0.1, 0.2, 0.3], [1, 1, 1]]])
    x_BTD = np.random.default_rng(5).normal(size=(1, 5, 128)).astype(np.float32)

    @region(size, (P(), P("tensor"), P()), P())
    def losses(x_BTD, table_VD, batch):
        logits = Logits(output_logits(x_BTD, table_VD, 101, F_AND_G, CPU), 101, F_AND_G)
        log_q_BT = jnp.sum(logits.log_probabilities(batch["teacher_ids"]), -1)
        return distillation(3).function(logits, batch)["loss"] + log_q_BT

    batch = {"teacher_ids": ids_BTK, "teacher_log_p": np.log(p_BTK).astype(np.float32), "targets": ids_BTK[..., 0]}
    table_VD = np.eye(128, dtype=np.float32)
    loss_BT, pullback = jax.vjp(lambda x_BTD: losses(x_BTD, table_VD, batch), x_BTD)
    known_BTK = (ids_BTK >= 0) & (ids_BTK < 101)
    p_BTK = np.where(known_BTK, p_BTK, 0)
    p_BTK[0, :2] /= p_BTK[0, :2].sum(-1, keepdims=True)  # of what both know; the others as they were given
    weight_BTV = np.einsum("btk,btkv->btv", p_BTK - known_BTK, ids_BTK[..., None] == np.arange(101))
    z_BTV = x_BTD[..., :101].astype(np.float64)
    log_BTV = z_BTV - np.log(np.exp(z_BTV).sum(-1, keepdims=True))
    entropy_BT = (p_BTK * np.log(np.maximum(p_BTK, 1e-99))).sum(-1)
    np.testing.assert_allclose(loss_BT, entropy_BT - (weight_BTV * log_BTV).sum(-1), rtol=1e-5, atol=1e-6)
    grad_BTV, sum_BT1 = pullback(jnp.ones((1, 5)))[0][..., :101], weight_BTV.sum(-1, keepdims=True)
    np.testing.assert_allclose(grad_BTV, sum_BT1 * np.exp(log_BTV) - weight_BTV, atol=1e-6)
    assert "an id 150 in a loss; valid: up" in user_error(Logits(table_VD, 101, F_AND_G).cross_entropy, ids_BTK[0, :2])
