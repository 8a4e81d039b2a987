"""Randomness that does not depend on the mesh: named keys for initialization, counter-based bits for dropout.

Dropout bits are a hash of *global* coordinates (seed, step, layer, site, sample, head, token, feature), so a device
computes exactly its slice of the mask that a single device would draw. The hash is an integer mixer, a few
multiplications per element, fused into its consumer. A mask needs good statistics (tested), not unpredictability.
"""

import dataclasses
import zlib
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from megajax.core.precision import at_least_fp32


@dataclasses.dataclass(frozen=True)
class NamedKey:
    """A random key from which children are derived by name or index: `key / "attention" / "query"`, `key / layer`."""

    key: Array

    @classmethod
    def from_seed(cls, seed: int) -> "NamedKey":
        return cls(jax.random.key(seed))

    def __truediv__(self, name: "str | int | Array") -> "NamedKey":
        data = zlib.crc32(name.encode()) if isinstance(name, str) else name
        return NamedKey(jax.random.fold_in(self.key, data))


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # traced once for all its uses
def _mix(x: Array, first: int, second: int, shifts: tuple[int, int, int]) -> Array:
    """A bijection of uint32 in which every input bit flips every output bit with probability close to one half."""
    x ^= x >> jnp.uint32(shifts[0])
    x *= jnp.uint32(first)
    x ^= x >> jnp.uint32(shifts[1])
    x *= jnp.uint32(second)
    return x ^ (x >> jnp.uint32(shifts[2]))


def _mix_a(x: Array) -> Array:
    return _mix(x, 0x7FEB352D, 0x846CA68B, (16, 15, 16))


def _mix_b(x: Array) -> Array:
    return _mix(x, 0x21F0AAAD, 0xD35A2D97, (16, 15, 15))


_GOLDEN = 0x9E3779B9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomBits:
    """The state of a coordinate hash: two uint32 arrays of the same shape, with any number of coordinates folded in."""

    a: Array
    b: Array

    @classmethod
    def from_seed(cls, seed: int | Array) -> "RandomBits":
        word = jnp.uint32(seed) if isinstance(seed, int) else seed.astype(jnp.uint32)
        return cls(_mix_a(word), _mix_b(word ^ jnp.uint32(_GOLDEN)))

    def fold(self, index: "int | Array") -> "RandomBits":
        """Fold in one more coordinate; an array broadcasts against the state."""
        return _folded(self, jnp.uint32(index) if isinstance(index, int) else index)

    def __getitem__(self, index) -> "RandomBits":
        return RandomBits(self.a[index], self.b[index])

    def last(self, index: Array) -> Array:
        """The bits (uint32) at the last coordinate: one mixing round per element instead of two."""
        return _mix_a(self.a + index.astype(jnp.uint32) * jnp.uint32(_GOLDEN)) ^ self.b

    def from_index(self, start: Array) -> "RandomBits":
        """The state whose `last(n)` is this one's `last(start + n)`."""
        return RandomBits(self.a + start.astype(jnp.uint32) * jnp.uint32(_GOLDEN), self.b)


@partial(jax.jit, inline=True)
def _folded(bits: RandomBits, index: Array) -> RandomBits:
    word = index.astype(jnp.uint32)
    a, b = bits.a ^ word * jnp.uint32(0x85EBCA6B), bits.b + word * jnp.uint32(0xC2B2AE35)
    return RandomBits(_mix_a(a), _mix_b(b))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout for one microbatch: the rate, and the hash state of each sample."""

    rate: float = dataclasses.field(metadata={"static": True})  # probability of dropping, 0 turns dropout off
    bits_B: RandomBits | None  # hash state of (seed, step, layer, site, global sample), shape [B]; None: it is off

    @classmethod
    def at(cls, rate: float, seed: int | Array, step: Array, sample_B: Array) -> "Dropout":
        """Dropout for the samples `sample_B`, given as rows of the global batch of `step`."""
        return cls(rate, RandomBits.from_seed(seed).fold(step).fold(sample_B)) if rate else cls.off()

    @classmethod
    def off(cls) -> "Dropout":
        return cls(0.0, None)

    def fold(self, index: int | Array) -> "Dropout":
        """Dropout for another layer or site."""
        return self if self.bits_B is None else Dropout(self.rate, self.bits_B.fold(index))

    def of_parts(self, count: int) -> "Dropout":
        """Dropout for `count` parts of every sample, each with its own mask, [B · parts]."""
        if self.bits_B is None:
            return self
        part_P = jnp.arange(count, dtype=jnp.int32)
        return Dropout(self.rate, jax.tree.map(jnp.ravel, self.bits_B[:, None].fold(part_P[None, :])))

    def apply(self, x: Array, bits: Array) -> Array:
        """Zero the elements whose bits (uint32, broadcasting to `x`) fall below the rate; scale the others by
        1/(1-rate)."""
        keep = bits >= jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        dtype = at_least_fp32(x.dtype)  # 1/(1-rate) rounded to bf16 would shift the mean
        scaled = (x.astype(dtype) * jnp.asarray(1 / (1 - self.rate), dtype)).astype(x.dtype)
        return jnp.where(keep, scaled, jnp.zeros((), x.dtype))

    def __call__(self, x_BTD: Array, token_T: Array) -> Array:
        """Drop features of `x_BTD`, whose tokens have the global positions `token_T`."""
        if self.bits_B is None:
            return x_BTD

        @partial(jax.checkpoint, prevent_cse=False)  # the backward pass draws the mask again instead of saving it
        def drop(x_BTD: Array, bits_BT: RandomBits) -> Array:
            feature_D = jnp.arange(x_BTD.shape[-1], dtype=jnp.int32)
            return self.apply(x_BTD, bits_BT[:, :, None].last(feature_D[None, None, :]))

        return drop(x_BTD, self.bits_B[:, None].fold(token_T[None, :]))
