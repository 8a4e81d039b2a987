"""Attention and its gradients by kernels for Hopper GPUs, for sequences of any length.

Letters: B batch, T queries, S keys, H heads, N heads of keys, for H / N heads each, K head size.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from megajax.core.kernels.forward import forward
from megajax.core.kernels.key_gradient import key_gradients
from megajax.core.kernels.query_gradient import query_gradient
from megajax.core.kernels.tiles import GROUPS, ROWS, Form
from megajax.core.parallel.random import RandomBits
from megajax.core.private import kernels_are_interpreted

_BLOCK = GROUPS * ROWS  # lengths are padded to multiples of it


class Seen(NamedTuple):
    """Which keys each query sees, as indices, and the dropout of the probabilities."""

    first_BT: Array  # the first key, int32
    last_BT: Array  # the index after its last key; the result of a query without keys is 0
    bits_BHT: RandomBits | None = None  # the index of a key is the last coordinate to fold in
    rate: float = 0.0  # of dropout
    pieces: int = 1  # of the queries, each with consecutive positions; blocks are skipped within each


def attention(q_BTHK: Array, k_BSNK: Array, v_BSNK: Array, seen: Seen) -> tuple[Array, Array]:
    """Attention, [B, T, H, K], and the log-sum-exp of each query to base 2, fp32 [B, H, T], which `gradients` needs."""
    length = q_BTHK.shape[1]
    q, k, v = (_padded(x, 1) for x in (q_BTHK, k_BSNK, v_BSNK))
    out_BTHK, sums_BHT = forward(q, k, v, _rows(seen), _form(q_BTHK, seen))
    return out_BTHK[:, :length], sums_BHT[:, :, :length]


def gradients(
    q_BTHK: Array, k_BSNK: Array, v_BSNK: Array, out_BTHK: Array, sums_BHT: Array, grad_BTHK: Array, seen: Seen
) -> tuple[Array, Array, Array]:
    """The gradients of queries, keys and values, from both results of `attention` and the gradient of the first."""
    # The sum over keys of probability times its gradient.
    inner_BHT = jnp.einsum("BTHK,BTHK->BHT", out_BTHK.astype(jnp.float32), grad_BTHK.astype(jnp.float32))
    rows = [*_rows(seen), _padded(jnp.stack([sums_BHT, inner_BHT], axis=2), 3)]
    q, k, v, grad = (_padded(x, 1) for x in (q_BTHK, k_BSNK, v_BSNK, grad_BTHK))
    form, num_keys = _form(q_BTHK, seen), k_BSNK.shape[1]
    dq_BTHK = query_gradient(q, k, v, grad, rows, form)
    dk_BSNK, dv_BSNK = key_gradients(q, k, v, grad, rows, form)
    return dq_BTHK[:, : q_BTHK.shape[1]], dk_BSNK[:, :num_keys], dv_BSNK[:, :num_keys]


def _rows(seen: Seen) -> list[Array]:
    """What kernels need to know about each query (`tiles.load_rows`). Padded queries see no key."""
    limits_B2T = _padded(jnp.stack([seen.first_BT, seen.last_BT], axis=1), 2)
    if seen.bits_BHT is None:
        return [limits_B2T]
    return [limits_B2T, _padded(jnp.stack([seen.bits_BHT.a, seen.bits_BHT.b], axis=2), 3)]


def _form(q_BTHK: Array, seen: Seen) -> Form:
    length = q_BTHK.shape[1]
    whole = length % _BLOCK == 0 and length // seen.pieces % ROWS == 0
    return Form(q_BTHK.dtype, seen.rate, seen.pieces if whole else 1, kernels_are_interpreted())


def _padded(x: Any, dim: int) -> Any:
    """Pad a dim with zeros to a multiple of the block."""
    more = -x.shape[dim] % _BLOCK
    return jnp.pad(x, [(0, more if n == dim else 0) for n in range(x.ndim)]) if more else x
