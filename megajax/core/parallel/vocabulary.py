"""The vocabulary sharded over mesh axes: embedding lookup, and cross-entropy fused with the tied output product.

It is sharded over `tensor`, or over `pipe` and `tensor` if all stages run embedding and head together.

Logits stay where they are computed: three numbers per token cross devices, never a vocabulary (paper §3).
Letters: B batch, T tokens, D model, V vocabulary (each device holds a contiguous range of its rows).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from megajax.core.backend import Backend
from megajax.core.batch import IGNORED
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.collectives import TENSOR, Axes, axis_index, g, max_over
from megajax.core.parallel.products import product, spread
from megajax.core.precision import at_least_fp32


def _local_ids(ids_BT: Array, local_size: int, axes: Axes) -> tuple[Array, Array]:
    """Local indices of global ids, clipped into this device's vocabulary range, and whether they fall inside it."""
    ids_BT = ids_BT - axis_index(axes) * local_size
    inside_BT = (ids_BT >= 0) & (ids_BT < local_size)
    return jnp.clip(ids_BT, 0, local_size - 1), inside_BT


def embedding_lookup(table_VD: Array, tokens_BT: Array, boundary: RegionBoundary) -> Array:
    """Rows of the sharded table, [B, T, D]: every device looks up the ids in its range, and `g` adds the results."""
    ids_BT, inside_BT = _local_ids(tokens_BT, table_VD.shape[0], boundary.vocabulary)
    rows_BTD = jnp.take(table_VD, ids_BT, axis=0, mode="clip")
    rows_BTD = jnp.where(inside_BT[..., None], rows_BTD, jnp.zeros((), table_VD.dtype))
    return boundary.leave(rows_BTD, boundary.vocabulary)


def output_logits(
    x_BTD: Array,
    table_VD: Array,
    vocab_size: int,
    boundary: RegionBoundary,
    backend: Backend,
    bias_V: Array | None = None,
) -> Array:
    """This device's columns of the logits; padded columns (ids from `vocab_size` up) get zero probability."""
    logits_BTV = product(boundary.enter(x_BTD, boundary.vocabulary), table_VD.T, 1, backend)
    if bias_V is not None:
        logits_BTV += spread(bias_V, logits_BTV)
    local_size = table_VD.shape[0]
    column_V = axis_index(boundary.vocabulary) * local_size + jnp.arange(local_size, dtype=jnp.int32)
    lowest = jnp.asarray(jnp.finfo(logits_BTV.dtype).min, logits_BTV.dtype)
    return jnp.where((column_V < vocab_size)[None, None, :], logits_BTV, lowest)


def cross_entropy(logits_BTV: Array, targets_BT: Array, axes: Axes = TENSOR) -> Array:
    """Loss per token, shape [B, T], in at least fp32; zero where the target is `IGNORED`."""
    return _cross_entropy(logits_BTV, targets_BT, *_local_ids(targets_BT, logits_BTV.shape[-1], axes), axes)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(logits_BTV: Array, targets_BT: Array, ids_BT: Array, inside_BT: Array, axes: Axes) -> Array:
    return _forward(logits_BTV, targets_BT, ids_BT, inside_BT, axes)[0]


def greedy_ids(logits_BTV: Array, axes: Axes = TENSOR) -> Array:
    """The id of each token's largest logit, the lowest one in a tie, int32 [B, T]."""
    local_size = logits_BTV.shape[-1]
    max_BT = max_over(jnp.max(logits_BTV, axis=-1), axes)
    column_V = axis_index(axes) * local_size + jnp.arange(local_size, dtype=jnp.int32)
    nowhere = jnp.iinfo(jnp.int32).max
    first_BT = jnp.min(jnp.where(logits_BTV == max_BT[..., None], column_V[None, None, :], nowhere), axis=-1)
    return -max_over(-first_BT, axes)


def target_scores(logits_BTV: Array, targets_BT: Array, axes: Axes) -> tuple[Array, Array]:
    """Cross-entropy of every target, and 1 or 0 (int32) for whether it is the most probable id. Both are [B, T]; where
    the target is `IGNORED` they are 0 and `IGNORED`."""
    hit_BT = (greedy_ids(logits_BTV, axes) == targets_BT).astype(jnp.int32)
    return cross_entropy(logits_BTV, targets_BT, axes), jnp.where(targets_BT == IGNORED, IGNORED, hit_BT)


def log_probabilities(logits_BTV: Array, ids_BTK: Array, axes: Axes = TENSOR) -> Array:
    """The log-probabilities of K ids for each token, [B, T, K], in at least fp32; 0 where an id is `IGNORED`."""
    shifted_BTV, sum_BT, _ = _shifted(logits_BTV, axes)
    index_BTK, inside_BTK = _local_ids(ids_BTK, logits_BTV.shape[-1], axes)
    picked_BTK = jnp.take_along_axis(shifted_BTV, index_BTK, axis=-1, mode="clip")
    nothing = jnp.zeros((), picked_BTK.dtype)
    picked_BTK = g(jnp.where(inside_BTK, picked_BTK, nothing), axes)
    return jnp.where(ids_BTK == IGNORED, nothing, picked_BTK - jnp.log(sum_BT)[..., None])


def entropy(logits_BTV: Array, vocab_size: int, axes: Axes = TENSOR) -> Array:
    """The entropy of each token's distribution over the ids below `vocab_size`, [B, T], in at least fp32."""
    shifted_BTV, sum_BT, _ = _shifted(logits_BTV, axes)
    column_V = axis_index(axes) * logits_BTV.shape[-1] + jnp.arange(logits_BTV.shape[-1], dtype=jnp.int32)
    there_BTV = jnp.broadcast_to(column_V < vocab_size, shifted_BTV.shape)
    shifted_BTV = jnp.where(there_BTV, shifted_BTV, jnp.zeros((), shifted_BTV.dtype))
    weighted_BTV = jnp.where(there_BTV, jnp.exp(shifted_BTV) * shifted_BTV, jnp.zeros((), shifted_BTV.dtype))
    return jnp.log(sum_BT) - g(jnp.sum(weighted_BTV, axis=-1), axes) / sum_BT


def log_sum_exp(logits_BTV: Array, axes: Axes = TENSOR) -> Array:
    """The logarithm of the sum of exponentials of each token's logits, [B, T], in at least fp32."""
    _, sum_BT, max_BT = _shifted(logits_BTV, axes)
    return jnp.log(sum_BT) + max_BT


def _shifted(logits_BTV: Array, axes: Axes) -> tuple[Array, Array, Array]:
    """The logits below each token's largest one, in at least fp32, the sums of their exponentials, and that logit."""
    max_BT = max_over(jnp.max(lax.stop_gradient(logits_BTV), axis=-1), axes)
    max_BT = max_BT.astype(at_least_fp32(logits_BTV.dtype))
    shifted_BTV = logits_BTV.astype(max_BT.dtype) - max_BT[..., None]
    return shifted_BTV, g(jnp.sum(jnp.exp(shifted_BTV), axis=-1), axes), max_BT


def _forward(logits_BTV: Array, targets_BT: Array, ids_BT: Array, inside_BT: Array, axes: Axes):
    dtype = at_least_fp32(logits_BTV.dtype)
    max_BT = max_over(jnp.max(logits_BTV, axis=-1), axes).astype(dtype)
    sum_BT = jnp.sum(jnp.exp(logits_BTV.astype(dtype) - max_BT[..., None]), axis=-1)
    picked_BT = jnp.take_along_axis(logits_BTV, ids_BT[..., None], axis=-1)[..., 0].astype(dtype)
    picked_BT = jnp.where(inside_BT, picked_BT, jnp.zeros((), dtype))
    sum_BT, picked_BT = g((sum_BT, picked_BT), axes)
    log_sum_BT = jnp.log(sum_BT)  # not added to the maximum: the sum would be rounded at the logits' magnitude
    loss_BT = jnp.where(targets_BT == IGNORED, jnp.zeros((), dtype), log_sum_BT - (picked_BT - max_BT))
    return loss_BT, (logits_BTV, targets_BT, ids_BT, inside_BT, max_BT, log_sum_BT)


def _backward(axes: Axes, residuals, grad_BT: Array):
    logits_BTV, targets_BT, ids_BT, inside_BT, max_BT, log_sum_BT = residuals
    grad_BT = jnp.where(targets_BT == IGNORED, jnp.zeros((), grad_BT.dtype), grad_BT)
    probability_BTV = jnp.exp((logits_BTV.astype(max_BT.dtype) - max_BT[..., None]) - log_sum_BT[..., None])
    column_V = jnp.arange(logits_BTV.shape[-1], dtype=jnp.int32)
    hit_BTV = (column_V[None, None, :] == ids_BT[..., None]) & inside_BT[..., None]
    grad_BTV = (probability_BTV - hit_BTV.astype(probability_BTV.dtype)) * grad_BT[..., None]
    return grad_BTV.astype(logits_BTV.dtype), None, None, None


_cross_entropy.defvjp(_forward, _backward)
