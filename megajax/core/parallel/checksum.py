"""Checksums of bits, on the device that has them."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from megajax.core.parallel.random import RandomBits


def checksum(arrays: Sequence[Array]) -> Array:
    """A number, uint32, that one changed word of one array always changes, and several change but for one case in 2^32:
    the sum of all words, each mixed with its place."""
    total = jnp.uint32(0)
    for place, x in enumerate(arrays):
        words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))  # two of 64 bits
        word_N = words.astype(jnp.uint32).reshape(-1)
        mixed_N = RandomBits(word_N, jnp.uint32(0)).last(lax.iota(jnp.uint32, word_N.size))
        total += jnp.uint32(2 * place + 1) * jnp.sum(mixed_N, dtype=jnp.uint32)
    return total
