"""Record all sites of a train step on any mesh in mesh-independent form (`core/parallel/sites.py`), and find the first
activation that differs: its layer, site, and forward or backward."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from megajax.core.axes import AXES
from megajax.core.parallel import sites
from megajax.core.parallel.sites import CollectiveRecord, SiteRecord
from megajax.verify.comparison import finite


class SitePlace(NamedTuple):
    """Identifies an activation."""

    layer: int  # global index; -1 in the head
    site: str
    backward: bool  # the gradient with respect to the activation

    def __str__(self) -> str:
        where = "the head" if self.layer < 0 else f"layer {self.layer}"
        return f"{self.site} of {where}, {'backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Activation:
    """One sample's activation at a place, assembled from its shards."""

    value: np.ndarray  # all shards, concatenated
    agree: bool  # whether replicas and recomputations of each shard are bitwise equal


Unlike = Callable[[Activation, Activation], str]
"""How an activation differs from what is expected, in words; empty if it does not."""


class Recording:
    """The activations of a step that is traced and run inside `with recording.taken():`."""

    def __init__(self) -> None:
        self.turns: dict[tuple[bool, str], int] = {}  # (in the head, site) -> when it was first traced
        self.collectives: dict[str, float] = {}  # largest error of each collective on weights and their gradients
        self._seen: dict[SitePlace, dict[int, list[SiteRecord]]] = defaultdict(lambda: defaultdict(list))

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Record the sites of everything traced in this context, and wait for all callbacks."""
        with sites.recording(self.take):
            yield
            jax.effects_barrier()

    def take(self, seen: SiteRecord | CollectiveRecord) -> None:
        """Add one device's record."""
        if isinstance(seen, CollectiveRecord):
            self.collectives[seen.name] = max(finite(seen.error), self.collectives.get(seen.name, 0.0))
            return
        site = SitePlace(seen.layer, seen.site, seen.backward)
        key = seen.layer < 0, seen.site
        self.turns[key] = min(seen.turn, self.turns.get(key, seen.turn))
        for sample in seen.samples.tolist():
            self._seen[site][sample].append(seen)

    @property
    def places(self) -> set[SitePlace]:
        """All recorded places."""
        return {*self._seen}

    def samples(self, place: SitePlace) -> list[int]:
        """Rows of the global batch that were recorded at this place."""
        return sorted(self._seen[place]) if place in self._seen else []

    def activations(self, place: SitePlace) -> Iterator[tuple[int, Activation]]:
        """(row of the global batch, activation) for every sample."""
        for sample, seen in sorted(self._seen[place].items()):
            yield sample, _put_together(sample, seen)


def _put_together(sample: int, seen: list[SiteRecord]) -> Activation:
    """Assemble shards: devices have parts of the tokens (in any order), of another dim, or of both."""
    groups: dict[tuple[int, ...], list[SiteRecord]] = defaultdict(list)
    for record in seen:
        groups[() if record.tokens is None else tuple(record.tokens.tolist())].append(record)
    joined = {tokens: _same_tokens(sample, records) for tokens, records in groups.items()}
    if len(joined) == 1:
        return next(iter(joined.values()))
    agree, (first, *others) = all(one.agree for one in joined.values()), (one.value for one in joined.values())
    if any(one.value.shape[1:2] != (len(tokens),) for tokens, one in joined.items()):
        # Of rows, not of tokens: devices have terms of a sum, and its gradient each.
        if seen[0].backward:
            return Activation(first, agree and all(np.array_equal(x, first, equal_nan=True) for x in others))
        return Activation(sum(others, first), agree)
    order = np.argsort(np.concatenate([*joined]))
    return Activation(np.concatenate([first, *others], axis=1)[:, order], agree)  # dim 0 is one sample's sequences


def _same_tokens(sample: int, seen: list[SiteRecord]) -> Activation:
    parts: dict[int, list[tuple[SiteRecord, np.ndarray]]] = defaultdict(list)
    for record in seen:
        rows = record.value.reshape(len(record.samples), -1, *record.value.shape[1:])
        (index,) = np.flatnonzero(record.samples == sample)[:1]
        parts[record.first].append((record, rows[index]))
    one, values, agree = seen[0], [], True
    axes = [AXES.index(axis) for axis in one.partial if one.backward]
    for _, records in sorted(parts.items()):
        # Partial gradients are summed over devices; other records are replicas or recomputations.
        groups: dict[tuple[int, ...], np.ndarray] = {}
        for record, value in sorted(records, key=lambda pair: pair[0].device):
            first = groups.setdefault(tuple(record.device[axis] for axis in axes), value)
            agree = agree and np.array_equal(value, first, equal_nan=True)
        values.append(np.sum([*groups.values()], axis=0))
    whole = one.split is None or (one.split == 1 and one.tokens is not None)
    return Activation(values[0] if whole else np.concatenate(values, axis=one.split), agree)


@dataclass(frozen=True)
class Difference:
    """The first activation that differs."""

    place: SitePlace  # layer, site and direction
    what: str  # how it differs, in words
    samples: list[int]  # rows of the global batch that differ
    num_samples: int  # number of rows in the batch

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.samples[:8])) + (", …" if len(self.samples) > 8 else "")
        return f"{self.place}: {self.what} (rows {rows} of {self.num_samples})"


def first_difference(reference: Recording, other: Recording, unlike: Unlike) -> Difference | None:
    """The first place in the order of computation where `other`, the same step on another mesh, is `unlike`
    `reference`."""
    computed = {-1, *(site.layer for site in other.places)}
    turns = other.turns | reference.turns
    last = max((site.layer for site in reference.places), default=0) + 1

    def in_turn(site: SitePlace) -> tuple:
        head = site.layer < 0
        rank = (last if head else site.layer), turns[head, site.site]
        # A layer that never runs comes first: another layer runs in its place, under its own number.
        return site.layer in computed, site.backward, tuple(-number for number in rank) if site.backward else rank

    places = sorted(reference.places | other.places, key=in_turn)
    differences = (_difference(site, reference, other, unlike) for site in places)
    return next((difference for difference in differences if difference), None)


def _difference(site: SitePlace, reference: Recording, other: Recording, unlike: Unlike) -> Difference | None:
    expected, computed = reference.samples(site), other.samples(site)
    if expected != computed:
        lost, more = sorted({*expected} - {*computed}), sorted({*computed} - {*expected})
        what = f"rows never computed: {lost}" if lost else f"rows computed that do not exist: {more}"
        return Difference(site, what, lost or more, len(expected))
    values = dict(reference.activations(site))
    how = {sample: unlike(values[sample], actual) for sample, actual in other.activations(site)}
    differing = [sample for sample, what in how.items() if what]
    return Difference(site, how[differing[0]], differing, len(expected)) if differing else None
