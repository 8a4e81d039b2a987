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
        place = SitePlace(seen.layer, seen.site, seen.backward)
        key = seen.layer < 0, seen.site
        self.turns[key] = min(seen.turn, self.turns.get(key, seen.turn))
        for sample in seen.samples.tolist():
            self._seen[place][sample].append(seen)

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
    for each in seen:
        groups[() if each.tokens is None else tuple(each.tokens.tolist())].append(each)
    found = {tokens: _of_same_tokens(sample, each) for tokens, each in groups.items()}
    if len(found) == 1:
        return next(iter(found.values()))
    agree, (first, *others) = all(each.agree for each in found.values()), (each.value for each in found.values())
    if any(each.value.shape[1:2] != (len(tokens),) for tokens, each in found.items()):
        # Of rows, not of tokens: devices have terms of a sum, and its gradient each.
        if seen[0].backward:
            return Activation(first, agree and all(np.array_equal(x, first, equal_nan=True) for x in others))
        return Activation(sum(others, first), agree)
    order = np.argsort(np.concatenate([*found]))
    return Activation(np.concatenate([first, *others], axis=1)[:, order], agree)  # dim 0 is one sample's sequences


def _of_same_tokens(sample: int, seen: list[SiteRecord]) -> Activation:
    parts: dict[int, list[tuple[SiteRecord, np.ndarray]]] = defaultdict(list)
    for each in seen:
        rows = each.value.reshape(len(each.samples), -1, *each.value.shape[1:])
        (index,) = np.flatnonzero(each.samples == sample)[:1]
        parts[each.first].append((each, rows[index]))
    one, values, agree = seen[0], [], True
    axes = [AXES.index(axis) for axis in one.partial if one.backward]
    for _, part in sorted(parts.items()):
        # Partial gradients are summed over devices; other records are replicas or recomputations.
        groups: dict[tuple[int, ...], np.ndarray] = {}
        for each, value in sorted(part, key=lambda pair: pair[0].device):
            first = groups.setdefault(tuple(each.device[axis] for axis in axes), value)
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
    computed = {-1, *(place.layer for place in other.places)}
    turns = other.turns | reference.turns
    last = max((place.layer for place in reference.places), default=0) + 1

    def in_turn(place: SitePlace) -> tuple:
        head = place.layer < 0
        rank = (last if head else place.layer), turns[head, place.site]
        # A layer that never runs comes first: another layer runs in its place, under its own number.
        return place.layer in computed, place.backward, tuple(-number for number in rank) if place.backward else rank

    places = sorted(reference.places | other.places, key=in_turn)
    differences = (_difference(place, reference, other, unlike) for place in places)
    return next((difference for difference in differences if difference), None)


def _difference(place: SitePlace, reference: Recording, other: Recording, unlike: Unlike) -> Difference | None:
    expected, found = reference.samples(place), other.samples(place)
    if expected != found:
        lost, more = sorted({*expected} - {*found}), sorted({*found} - {*expected})
        what = f"rows never computed: {lost}" if lost else f"rows computed that do not exist: {more}"
        return Difference(place, what, lost or more, len(expected))
    values = dict(reference.activations(place))
    how = {sample: unlike(values[sample], actual) for sample, actual in other.activations(place)}
    differing = [sample for sample, what in how.items() if what]
    return Difference(place, how[differing[0]], differing, len(expected)) if differing else None
