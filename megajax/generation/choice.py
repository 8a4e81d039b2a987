"""Choose the next token: repetition penalty, temperature, top-k, top-p, min-p and random noise, in this order.

A token is drawn by adding Gumbel noise to the logits and taking the highest. The noise is a hash of the seed, the
prompt's text, the token's position and its column in the vocabulary, so a continuation depends neither on the mesh nor
on the other prompts. Letters: B batch, V vocabulary, N most probable tokens.
"""

import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from megajax.core.parallel.random import RandomBits
from megajax.core.precision import at_least_fp32
from megajax.generation.generate_options import GenerateOptions

_LOWEST_TEMPERATURE = 1e-20  # below it the most probable token is chosen anyway, and fp32 might divide by 0


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float  # logits are divided by it; 0: always the most probable token
    top_k: int = 0  # choose among the k most probable tokens; 0: all
    top_p: float = 1.0  # choose among the most probable tokens, after `top_k`, whose probabilities sum to at least this
    seed: int = 0  # of the noise
    min_p: float = 0.0  # after `top_p`, exclude tokens less probable than this times the most probable one
    repetition_penalty: float = 1.0  # of tokens that the text has: divides positive logits, multiplies negative ones

    @classmethod
    def of(cls, options: GenerateOptions) -> "Sampling":
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    @property
    def penalizes(self) -> bool:
        """Whether `choose` needs to know which tokens the text has."""
        return self.repetition_penalty != 1


def prompt_bits(prompts: Sequence[Sequence[int]], seed: int) -> RandomBits:
    """The state of the noise for every prompt, [prompts]; equal prompts get different states, by their order."""
    texts = [np.asarray(prompt, np.int32).tobytes() for prompt in prompts]
    seen: Counter[bytes] = Counter()
    repeats = []
    for text in texts:
        repeats.append(seen[text])
        seen[text] += 1
    hashes = np.array([zlib.crc32(text) for text in texts], np.uint32)
    return RandomBits.from_seed(seed).fold(jnp.asarray(hashes)).fold(jnp.asarray(np.array(repeats, np.uint32)))


def choose(
    logits_BV: Array, bits_B: RandomBits, position_B: Array, sampling: Sampling, seen_BV: Array | None = None
) -> Array:
    """The next token of every row, which gets `position_B`; `logits_BV` exclude the padding of the vocabulary.
    `seen_BV`, if `sampling.penalizes`, says which tokens the prompt and the continuation have."""
    logits_BV = logits_BV.astype(at_least_fp32(logits_BV.dtype))
    if seen_BV is not None:
        penalty = jnp.asarray(sampling.repetition_penalty, logits_BV.dtype)
        penalized_BV = jnp.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
        logits_BV = jnp.where(seen_BV, penalized_BV, logits_BV)
    if sampling.temperature > 0:
        below_BV = logits_BV - jnp.max(logits_BV, axis=1, keepdims=True)  # the highest is 0, safe to divide
        temperature = max(sampling.temperature, _LOWEST_TEMPERATURE)
        logits_BV = _mask_unlikely(below_BV / jnp.asarray(temperature, below_BV.dtype), sampling)
        logits_BV = logits_BV + gumbel_noise(bits_B.fold(position_B), logits_BV.shape[1]).astype(logits_BV.dtype)
    return lax.argmax(logits_BV, 1, jnp.int32)


def gumbel_noise(bits_B: RandomBits, size: int) -> Array:
    """Gumbel noise, fp32 [B, size]: the highest of logits plus noise is distributed as the softmax of the logits."""
    bits_BV = bits_B[:, None].last(jnp.arange(size, dtype=jnp.int32)[None])
    uniform_BV = (bits_BV.astype(jnp.float32) + 0.5) * 2.0**-32  # fine-grained near 0, which gives the highest noise
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform_BV, 1 - 2.0**-24)))


def seen_tokens(tokens_BT: Array, length_B: Array, size: int) -> Array:
    """Which of `size` tokens are among the first `length_B` of every row, [B, size]."""
    rows_BT, place_BT = (lax.broadcasted_iota(jnp.int32, tokens_BT.shape, dim) for dim in (0, 1))
    found_BT = jnp.where(place_BT < length_B[:, None], tokens_BT, size)
    return jnp.zeros_like(tokens_BT, bool, shape=(len(tokens_BT), size)).at[rows_BT, found_BT].set(True, mode="drop")


def _mask_unlikely(logits_BV: Array, sampling: Sampling) -> Array:
    """The logits, of which the highest is 0, with -inf for tokens that top-k, top-p or min-p excludes; ties with the
    last included token are included."""
    size = logits_BV.shape[1]
    num_likely = min(sampling.top_k or size, size)
    least = math.log(sampling.min_p) if sampling.min_p else -math.inf
    if num_likely == size and sampling.top_p == 1:
        return jnp.where(logits_BV >= least, logits_BV, jnp.asarray(-jnp.inf, logits_BV.dtype))
    likely_BN = lax.top_k(logits_BV, num_likely)[0]  # descending
    lowest_B1 = jnp.maximum(likely_BN[:, -1:], least)
    if sampling.top_p < 1:
        weights_BN = jnp.exp(likely_BN - likely_BN[:, :1])
        before_BN = jnp.cumsum(weights_BN, axis=1) - weights_BN  # sum over more probable tokens
        included_BN = before_BN < sampling.top_p * jnp.sum(weights_BN, axis=1, keepdims=True)
        last_B1 = jnp.min(jnp.where(included_BN, likely_BN, jnp.inf), axis=1, keepdims=True)
        lowest_B1 = jnp.maximum(lowest_B1, last_B1)
    return jnp.where(logits_BV >= lowest_B1, logits_BV, jnp.asarray(-jnp.inf, logits_BV.dtype))
