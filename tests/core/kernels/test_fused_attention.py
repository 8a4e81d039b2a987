"""Attention by kernels is as near to attention in fp32 as the blocks are, values and gradients, whatever a query sees:
in Pallas' interpreter of kernels for GPUs."""

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from parity_grid import cover

from megajax.core.backend import BLOCKS, GPU
from megajax.core.mesh import make_mesh
from megajax.core.models import fused_attention
from megajax.core.models.attend import attend_in_blocks, with_padded_values
from megajax.core.models.attention_mask import CAUSAL, FROM_START, AttentionMask, Pieces, Places
from megajax.core.models.attention_setting import Setting
from megajax.core.models.blocked_attention import OWN_KEYS
from megajax.core.models.context_attention import attend_to_others
from megajax.core.parallel.boundary import RegionBoundary
from megajax.core.parallel.random import Dropout
from megajax.core.private import has_gpu_kernels, interpreted_kernels

pytestmark = pytest.mark.skipif(not has_gpu_kernels(), reason="its JAX has no such kernels, which 0.11 has")

SPLIT = P(None, None, "tensor")  # by heads
LENGTH, BATCH, HEADS, WINDOW = 128, 1, 2, 40  # a tile has as many queries
DOCUMENTS = np.concatenate([np.arange(50), np.arange(LENGTH - 50)])[None].astype(np.int32)


def _at(*starts: int) -> Pieces:
    """Pieces of which only the device knows where they start."""
    return Pieces(jnp.asarray(starts, jnp.int32))


# What a query sees, where queries and keys stand, and how many of both there are.
LIMITS = {
    "everything": (AttentionMask(), FROM_START, LENGTH, LENGTH),
    "causal": (CAUSAL, FROM_START, LENGTH, LENGTH),
    "documents": (CAUSAL.in_documents(jnp.asarray(DOCUMENTS)), FROM_START, LENGTH, LENGTH),
    "padding": (AttentionMask().padded(jnp.asarray([LENGTH // 3], jnp.int32)), FROM_START, LENGTH - 27, LENGTH - 27),
    "window": (AttentionMask(window=WINDOW), FROM_START, LENGTH, LENGTH),
    "documents in a window": (
        *(AttentionMask(causal=True, window=WINDOW).in_documents(jnp.asarray(DOCUMENTS)), FROM_START),
        *(LENGTH, LENGTH),
    ),
    "two pieces": (CAUSAL, Places(_at(64, 192)), LENGTH, 2 * LENGTH),
    "two tiles of queries": (AttentionMask(causal=True, window=LENGTH + WINDOW), FROM_START, 2 * LENGTH, 2 * LENGTH),
    "keys before": (
        AttentionMask(causal=True, window=WINDOW, first_key_BT=jnp.full((BATCH, LENGTH), 70, jnp.int32)),
        Places(_at(100), _at(100 - WINDOW + 1), ahead=WINDOW - 1),
        LENGTH,
        LENGTH + WINDOW - 1,
    ),
}
GRID = {
    "size": [64, 96, 128, 192, 256],
    "limits": list(LIMITS),
    "rate": [0.25, 0.0],
    "kv_heads": [1, 2],
    "dtype": ["bfloat16", "float16"],
    "sinks": [False, True],
}
ROWS = list(itertools.product(*GRID.values()))
PAIRS = list(itertools.combinations(range(len(GRID)), 2))
PAIRWISE = [ROWS[number] for number in cover(ROWS, PAIRS)]


def found_and_expected(
    row: tuple, *, gathered: bool = False, detect_races: bool = False
) -> tuple[bool, list[list[np.ndarray]]]:
    """Whether a race was found; and output and gradients of queries, keys, values and maybe sinks by the kernels, by
    blocks, and by blocks in fp32. `gathered`: by the devices of a context group, which the interpreter has one of."""
    size, limits, rate, kv_heads, dtype, sinks = row
    visible, places, *lengths = LIMITS[limits]
    drop = Dropout.at(rate, 3, jnp.int32(2), jnp.arange(BATCH, dtype=jnp.int32))
    rng = np.random.default_rng(zlib.crc32(repr(row).encode()))
    values = {192: 128}.get(size, size)  # as DeepSeek has them
    queries, keys = (BATCH, lengths[0], HEADS), (BATCH, lengths[1], kv_heads)
    shapes = (*queries, size), (*keys, size), (*keys, values), (*queries, values)
    inputs = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    sinks_H = [jnp.asarray(rng.normal(1, 1, HEADS), dtype)] if sinks else []
    setting = Setting(visible, drop, GPU, places)

    def run(attend, *inputs):
        @jax.jit
        @partial(jax.shard_map, mesh=make_mesh(jax.devices()[:1]), in_specs=specs, out_specs=specs)
        def both(q, k, v, grad, *sink_H):
            def attention(q, k, v, *sink_H):
                return attend(q, k, v, setting._replace(sink_H=sink_H[0] if sink_H else None))

            out, pull = jax.vjp(attention, q, k, v, *sink_H)
            return out, *pull(grad)

        return [np.asarray(x, np.float32) for x in both(*inputs)]

    kernels, blocks = partial(with_padded_values, fused_attention.attend), partial(attend_in_blocks, OWN_KEYS)
    split = SPLIT
    if gathered:
        kernels, blocks, split = in_group("kernel"), in_group("blocks"), P(None, "context", "tensor")
    inputs, specs = [*inputs, *sinks_H], (split,) * 4 + (P("tensor"),) * sinks
    with interpreted_kernels(detect_races=detect_races) as races:
        by_kernels = run(kernels, *inputs)
        raced = races()
    return raced, [by_kernels, run(blocks, *inputs), run(blocks, *(x.astype(jnp.float32) for x in inputs))]


def in_group(implementation: str) -> Callable[..., jax.Array]:
    """A layer's attention with gathered keys."""
    backend = replace(GPU, attention=(implementation, *BLOCKS))
    gather = RegionBoundary(context="gather")
    return lambda q, k, v, setting: attend_to_others(q, k, v, setting._replace(backend=backend), gather)


def check(row: tuple, **options: bool) -> None:
    kernels, rounded, expected = found_and_expected(row, **options)[1]
    are_as_near(kernels[:4], rounded[:4], expected[:4])
    np.testing.assert_allclose(kernels[4:], expected[4:], rtol=0.02)  # of sinks, which are too few to compare roundings


def are_as_near(found: list[np.ndarray], rounded: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Check that results of kernels are about as near to those expected as rounded ones. A key too many, or a
    probability dropped that is to be kept, would be off by a hundred roundings."""
    for kernels, others, exact in zip(found, rounded, expected, strict=True):
        rounding = np.abs(others - exact)
        assert np.abs(kernels - exact).max() <= 2 * rounding.max()
        assert np.sqrt(np.mean((kernels - exact) ** 2)) <= 1.25 * np.sqrt(np.mean(rounding**2))


def name(row: tuple) -> str:
    return "-".join(map(str, row))


def test_kernels_are_attention() -> None:
    """By one row; `test_pairwise.py` has every pair of features, in less time, of a tile of queries."""
    check((64, "two tiles of queries", 0.25, 1, "bfloat16", True))


@pytest.mark.full
@pytest.mark.parametrize("row", PAIRWISE, ids=name)
def test_kernels_are_attention_in_the_pairwise_grid(row: tuple) -> None:
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("size", GRID["size"])
def test_no_race(size: int) -> None:
    assert not found_and_expected((size, "two pieces", 0.25, 1, "bfloat16", False), detect_races=True)[0]


@pytest.mark.full
@pytest.mark.parametrize("limits", ["causal", "documents in a window"])
def test_gathered_keys(limits: str) -> None:
    check((64, limits, 0.25, 1, "bfloat16", True), gathered=True)
