"""Record all sites of a train step on any mesh, in mesh-independent form (`parallel/sites.py`)."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from megajax.parallel import sites
from megajax.parallel.sites import SiteRecord


class Place(NamedTuple):
    """Where an activation is.

    Attributes:
        layer: global index; -1 in the head.
        site: its name.
        backward: the gradient of the loss there, not the activation.
    """

    layer: int
    site: str
    backward: bool

    def __str__(self) -> str:
        where = "the head" if self.layer < 0 else f"layer {self.layer}"
        return f"{self.site} of {where}, {'backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Activation:
    """One sample's activation at a place, assembled from its shards.

    Attributes:
        value: all shards, concatenated.
        devices: the devices that had each shard, in order.
        agree: replicas and recomputations of each shard are bitwise equal.
    """

    value: np.ndarray
    devices: tuple[tuple[tuple[int, ...], ...], ...]
    agree: bool


class Recording:
    """The activations of a step that is traced and run inside `with recording.taken():`."""

    def __init__(self) -> None:
        self.turns: dict[tuple[bool, str], int] = {}  # (in the head, site) -> when it was first traced
        self._seen: dict[Place, dict[int, list[SiteRecord]]] = defaultdict(lambda: defaultdict(list))

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Record the sites of what is traced in this context, and wait for all callbacks."""
        with sites.recording(self.take):
            yield
            jax.effects_barrier()

    def take(self, seen: SiteRecord) -> None:
        """Add one device's record."""
        place = Place(seen.layer, seen.site, seen.backward)
        key = seen.layer < 0, seen.site
        self.turns[key] = min(seen.turn, self.turns.get(key, seen.turn))
        for sample in seen.samples.tolist():
            self._seen[place][sample].append(seen)

    @property
    def places(self) -> set[Place]:
        """All recorded places."""
        return {*self._seen}

    def samples(self, place: Place) -> list[int]:
        """Rows of the global batch that were recorded there."""
        return sorted(self._seen[place]) if place in self._seen else []

    def activations(self, place: Place) -> Iterator[tuple[int, Activation]]:
        """(row of the global batch, activation) for every sample."""
        for sample, seen in sorted(self._seen[place].items()):
            yield sample, _put_together(sample, seen)


def _by_device(part: list[tuple[SiteRecord, np.ndarray]]) -> list[list[tuple[SiteRecord, np.ndarray]]]:
    devices = sorted({seen.device for seen, _ in part})
    return [[each for each in part if each[0].device == device] for device in devices]


def _put_together(sample: int, seen: list[SiteRecord]) -> Activation:
    parts: dict[int, list[tuple[SiteRecord, np.ndarray]]] = defaultdict(list)
    for each in seen:
        rows = each.value.reshape(len(each.samples), -1, *each.value.shape[1:])
        (index,) = np.flatnonzero(each.samples == sample)[:1]
        parts[each.first].append((each, rows[index]))
    own = [parts[first] for first in sorted(parts)]
    one = own[0][0][0]
    # Gradients of a shared shard add up over devices; several records of one device are recomputations.
    groups = [_by_device(part) for part in own] if one.shared and one.backward else [[part] for part in own]
    same = [
        np.array_equal(value, group[0][1], equal_nan=True) for part in groups for group in part for _, value in group
    ]
    agree, split = all(same), one.split
    values = [np.sum([group[0][1] for group in part], axis=0) for part in groups]
    value = values[0] if split is None else np.concatenate(values, axis=split)  # rows stand in the samples' dim
    devices = tuple(tuple(sorted({each.device for each, _ in part})) for part in own)
    return Activation(value, devices, agree)
