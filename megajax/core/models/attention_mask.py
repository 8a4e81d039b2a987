"""Which keys a query sees, and the positions of both: all that attention knows of the task, and its cost depends on.

Letters: B batch, T queries, S keys, P pieces, H heads, N heads of all samples, sample by sample.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import Array

from megajax.core.errors import UserError
from megajax.core.models.config import ModelConfig
from megajax.core.models.registry import FAMILIES, SCORES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """The positions in the sequence of an array's tokens: the array consists of equal pieces, each with consecutive
    positions.
    """

    start_P: Array | None = None  # position where each piece starts, int32; None: there is one, which starts at 0

    @property
    def count(self) -> int:
        """The number of pieces."""
        return 1 if self.start_P is None else self.start_P.shape[0]

    def at(self, start: int, end: int, length: int) -> Array:
        """Positions of the tokens with indices `start` to `end` of `length`, possibly in several pieces, int32."""
        if self.start_P is None:
            return jnp.arange(start, end, dtype=jnp.int32)
        piece_T = jnp.arange(length // self.count, dtype=jnp.int32)
        return (self.start_P[:, None] + piece_T[None]).reshape(-1)[start:end]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """Limits on what queries see, in positions of the sequence; a key must satisfy all of them."""

    # A query sees the keys up to its own position; otherwise all.
    causal: bool = field(default=False, metadata={"static": True})
    # A query sees its own position and at most `window - 1` keys on either side; None: any distance.
    window: int | None = field(default=None, metadata={"static": True})
    # The window of some of the layers, which `in_layer` knows; the others have none.
    window_of_some: int | None = field(default=None, metadata={"static": True})
    # `window - 1` where only the device knows the layer, int32, B being 1; it has no `window`.
    before_B: Array | None = None
    first_key_BT: Array | None = None  # the first key that each query sees, int32; None: key 0
    num_keys_B: Array | None = None  # number of keys in each sample, int32, the rest being padding; None: all
    # What becomes of scores, a function of them, of the positions of query and key, and of the head; None: nothing.
    score: Callable[..., Array] | None = field(default=None, metadata={"static": True})
    head_BH: Array | None = None  # the numbers of this device's heads, int32, for `score`

    @classmethod
    def of_model(cls, model: ModelConfig, length: int) -> "AttentionMask":
        """What a model's tokens see in a text of this length, apart from documents and padding."""
        window = model.sliding_window if 0 < model.sliding_window < length else None
        causal = FAMILIES[model.family].continues_text
        score = SCORES[model.scores]
        if all(model.windowed):
            return cls(causal=causal, window=window, score=score)
        return cls(causal=causal, window_of_some=window if any(model.windowed) else None, score=score)

    def in_layer(self, windowed: Array | bool) -> "AttentionMask":
        """The mask of a layer that has the window or not, if layers differ."""
        if self.window_of_some is None:
            return self
        if isinstance(windowed, bool):
            return replace(self, window=self.window_of_some if windowed else None, window_of_some=None)
        before = jnp.where(windowed, jnp.int32(self.window_of_some - 1), jnp.int32(jnp.iinfo(jnp.int32).max))
        return replace(self, before_B=before[None], window_of_some=None)

    def in_documents(self, position_BT: Array) -> "AttentionMask":
        """The same mask within documents; `position_BT` are the positions of the tokens in their documents."""
        place_T = jnp.arange(position_BT.shape[1], dtype=jnp.int32)
        return replace(self, first_key_BT=place_T[None, :] - position_BT)

    def padded(self, num_keys_B: Array) -> "AttentionMask":
        """The same mask of the first `num_keys` keys of each sample; 0 (a sample that nobody looks at) counts as 1."""
        return replace(self, num_keys_B=jnp.maximum(num_keys_B, 1))

    def in_sequence(self, batch: int, length: int) -> "AttentionMask":
        """The same mask without keys before the sequence's first token: they exist on no device."""
        first_BT = jnp.zeros((batch, length), jnp.int32) if self.first_key_BT is None else self.first_key_BT
        return replace(self, first_key_BT=jnp.maximum(first_BT, 0))

    def of_queries(self, select: Callable[[Array], Array]) -> "AttentionMask":
        """The mask of the queries that `select` selects from an array [B, T, …]."""
        return self if self.first_key_BT is None else replace(self, first_key_BT=select(self.first_key_BT))

    def of_heads(self, batch: int, num_heads: int) -> "AttentionMask":
        """The same mask repeated for every head of every sample, with N in place of B; of `head`, those for each."""

        def repeated(x: Array) -> Array:
            return jnp.repeat(jnp.broadcast_to(x, (batch, *x.shape[1:])), num_heads, axis=0)

        heads, mask = self.head_BH, jax.tree.map(repeated, replace(self, head_BH=None))
        return mask if heads is None else replace(mask, head_BH=heads.reshape(batch * num_heads, -1))

    def scored(self, scores: Array, query: Array, key: Array, head: Array) -> Array:
        """Scores as the model changes them; all four arrays have the same dims, of which some may be 1."""
        if self.score is None:
            return scores
        with jax.numpy_dtype_promotion("standard"):
            changed = self.score(scores, query, key, head)
        if (getattr(changed, "shape", None), getattr(changed, "dtype", None)) != (scores.shape, scores.dtype):
            raise UserError("model.scores: the function returned other shapes or dtypes; valid: those of the scores")
        return changed

    @property
    def before(self) -> int | None:
        """The most keys before its own position that a query sees; None: all, or not known while tracing."""
        return None if self.window is None else self.window - 1

    @property
    def after(self) -> int | None:
        """The most keys after its own position that a query sees; None: all."""
        return 0 if self.causal else self.before

    def key_range(self, start: int, end: int, num_keys: int) -> tuple[int, int]:
        """The range of keys that queries at positions `start` to `end` may see, whatever the sample. Positions are
        relative to the first key."""
        first = 0 if self.before is None else max(0, start - self.before)
        return first, num_keys if self.after is None else min(num_keys, end + self.after)

    def keys_seen(self, length: int) -> float:
        """How many keys a query sees on average in a text of this length, to within one: the area of the mask."""
        most = min(self.window or length, length)
        return (1 if self.causal else 2) * (most * (1 - most / (2 * length)))

    def block_sizes(self, num_queries: int, size: int, before: int = 0) -> list[tuple[int, int]]:
        """How many queries and keys `Places.blocks` have, if keys start `before` tokens earlier than queries."""
        blocks = Places(ahead=before).blocks(self, num_queries, num_queries + before, size)
        return [(queries.stop - queries.start, keys.stop - keys.start) for queries, keys in blocks]

    def bounds(self, query_BT: Array) -> tuple[list[Array], list[Array]]:
        """Lower and upper bounds, inclusive, of the keys that queries at these positions see; a dim may be 1."""
        lower = [] if self.before is None else [query_BT - self.before]
        lower += [] if self.before_B is None else [query_BT - self.before_B[:, None]]
        upper = [] if self.after is None else [query_BT + self.after]
        lower += [] if self.first_key_BT is None else [self.first_key_BT]
        upper += [] if self.num_keys_B is None else [self.num_keys_B[:, None] - 1]
        return lower, upper

    def mask(self, query_BT: Array, key_BS: Array) -> Array | None:
        """Which keys the queries at these positions see, bool [B, T, S], of which B or T may be 1; None if all."""
        lower, upper = self.bounds(query_BT)
        limits = [first_BT[:, :, None] <= key_BS[:, None] for first_BT in lower]
        limits += [key_BS[:, None] <= last_BT[:, :, None] for last_BT in upper]
        return functools.reduce(operator.and_, limits) if limits else None


CAUSAL = AttentionMask(causal=True)


def mean_keys_seen(model: ModelConfig, length: int) -> float:
    """The mean of `AttentionMask.keys_seen` over a model's layers."""
    of_all, share = AttentionMask.of_model(model, length), sum(model.windowed) / len(model.windowed)
    without, within = (of_all.in_layer(windowed).keys_seen(length) for windowed in (False, True))
    return without + share * (within - without)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """The positions of queries and keys."""

    queries: Pieces = Pieces()
    keys: Pieces = Pieces()
    # How far queries are ahead of keys, if that is known although `start_P` are not.
    ahead: int | None = field(default=None, metadata={"static": True})

    def key_range(self, visible: AttentionMask, start: int, end: int, num_keys: int) -> slice:
        """The keys that the queries `start` to `end` may see, whatever the sample; all of them if positions are not
        known while tracing."""
        if self.ahead is None and (self.queries.start_P is not None or self.keys.start_P is not None):
            return slice(0, num_keys)
        ahead = self.ahead or 0
        first, last = visible.key_range(start + ahead, end + ahead, num_keys)
        return slice(min(first, num_keys), min(last, num_keys))

    def blocks(self, visible: AttentionMask, num_queries: int, num_keys: int, size: int) -> list[tuple[slice, slice]]:
        """Blocks of at most `size` queries, none of which spans two pieces, and the keys that each may see."""
        piece = num_queries // self.queries.count
        starts = [(first, first + piece) for first in range(0, num_queries, piece)]
        blocks = [(start, min(start + size, end)) for first, end in starts for start in range(first, end, size)]
        return [(slice(*block), self.key_range(visible, *block, num_keys)) for block in blocks]


FROM_START = Places()  # queries and keys both start at the first token
