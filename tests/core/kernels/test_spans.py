"""A kernel takes every block that is seen once and no other, and leaves the mask out only where all is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import full

from megajax.core.kernels.spans import BlockTurns, spans_of_keys, spans_of_queries

LENGTH, QUERIES, KEYS = 64, 8, 4
MOST = 2 * LENGTH // KEYS  # turns; as many are computed in every case, so that nothing is compiled twice
PLACE = np.arange(LENGTH)
DOCUMENT = np.searchsorted([10, 33, 40], PLACE, side="right")
FIRST = np.array([0, 10, 33, 40])[DOCUMENT]
TWO = np.concatenate([PLACE[16:48], PLACE[16:48] + 48])  # two pieces of a longer sequence
LIMITS = {
    "everything": (0 * PLACE, 0 * PLACE + LENGTH),
    "causal": (0 * PLACE, PLACE + 1),
    "documents": (FIRST, PLACE + 1),
    "whole documents": (FIRST, np.array([10, 33, 40, 64])[DOCUMENT]),
    "window": (np.maximum(PLACE - 8, 0), np.minimum(PLACE + 9, LENGTH)),
    "padding": (0 * PLACE, 0 * PLACE + 30),
    "nothing for some": (np.where(PLACE < 20, 5, 0), np.where(PLACE < 20, 5, PLACE + 1)),
    "two pieces": (0 * TWO, np.minimum(TWO + 1, LENGTH)),
    "two pieces in a window": (np.minimum(TWO - 8, LENGTH), np.minimum(TWO + 1, LENGTH)),
}


def taken(spans: jax.Array, times: int) -> list[tuple[int, int, bool]]:
    """Every turn's time and block, and whether it is without a mask."""
    turns, turn = BlockTurns(list(spans), times), jnp.arange(MOST, dtype=jnp.int32)
    found = (*turns.place(turn), turn < turns.full_count)
    return list(zip(*(np.asarray(x)[: int(turns.count)].tolist() for x in found), strict=True))


def check(taken: list[tuple[int, int, bool]], seen: np.ndarray, times: int) -> None:
    """`seen`: of every block and what lies across, bool [blocks, across, within]."""
    some, fully = seen.any((1, 2)), seen.all((1, 2))
    assert sorted(x[:2] for x in taken) == [(time, block) for time in range(times) for block in np.flatnonzero(some)]
    assert all(fully[block] for _, block, unmasked in taken if unmasked)


OFTEN = ("documents", "nothing for some", "two pieces in a window")


@pytest.mark.parametrize("name", [name if name in OFTEN else full(name) for name in LIMITS])
def test_blocks_that_are_seen(name: str) -> None:
    first, last = LIMITS[name]
    limits_B2T = jnp.asarray(np.stack([first, last])[None], jnp.int32)
    seen = (np.arange(LENGTH) >= first[:, None]) & (np.arange(LENGTH) < last[:, None])
    blocks = seen.reshape(LENGTH // QUERIES, QUERIES, LENGTH // KEYS, KEYS)
    spans = spans_of_queries(limits_B2T, QUERIES, KEYS, LENGTH)[0]
    for number, span in enumerate(spans):
        check(taken(span[None], 1), blocks[number].swapaxes(0, 1), 1)
    pieces = 2 if "two" in name else 1
    spans = spans_of_keys(limits_B2T, QUERIES, KEYS, LENGTH, pieces)[0]
    for number, span in enumerate(spans):
        check(taken(span, 2), blocks[:, :, number], 2)


def test_causal_blocks_are_mostly_without_a_mask() -> None:
    limits_B2T = jnp.asarray(np.stack(LIMITS["causal"])[None], jnp.int32)
    turns = [taken(span[None], 1) for span in spans_of_queries(limits_B2T, QUERIES, QUERIES, LENGTH)[0]]
    assert [[unmasked for _, _, unmasked in each] for each in turns] == [[True] * n + [False] for n in range(8)]
