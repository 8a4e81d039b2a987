"""Samples from several sources in given shares: among the first n, a source with share w has more than w·n - 1 and
fewer than w·n + 1, in its own order. The source of sample n depends only on the weights and n."""

import heapq
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megajax.data.samples.base import CorpusSamples, EpochSamples, Sample

_BLOCK = 4096  # samples whose sources are computed together
_RECENT = 16  # blocks that are kept


class Blend:
    """The source of every sample.

    The k-th sample of a source with share w must be placed in the window from ⌊k/w⌋ to ⌈(k+1)/w⌉. Each place goes to
    the source whose window ends first among those that have begun (earliest deadline first, which meets all windows if
    the shares sum to 1; Baruah et al., "Proportionate progress", 1996). The computation uses integers: weights count as
    the decimal fractions they are written as, and the order repeats after `period` samples, their common denominator.

    A place is found without those before it. At any slot, each source has at most one sample whose window has begun and
    which may be placed or not. How many are not placed follows from the shares; which ones, from the slots shortly
    before: an order in which those with the earliest ends wait and one in which those with the latest ends do enclose
    the true one for good, so once they agree, they are it. Usually they do after some hundred slots, and at the latest
    after the longest window.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        assert fractions and all(fraction > 0 for fraction in fractions)
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        counts = [int(fraction * denominator) for fraction in fractions]
        common = math.gcd(*counts)
        self._counts = [count // common for count in counts]  # samples of each source per period
        self.period = sum(self._counts)
        self._blocks: dict[int, _Block] = {}  # recent ones by number, the oldest first
        self._lock = threading.Lock()

    @property
    def shares(self) -> list[float]:
        """The share of each source; they sum to 1."""
        return [count / self.period for count in self._counts]

    def place(self, index: int) -> tuple[int, int]:
        """The source of sample `index`, and the sample's index in that source."""
        period, slot = divmod(index, self.period)
        block, here = divmod(slot, _BLOCK)
        before, sources = self._block(block)
        source = int(sources[here])
        own = before[source] + int((sources[:here] == source).sum())
        return source, period * self._counts[source] + own

    def before(self, index: int) -> list[int]:
        """How many samples of each source come before sample `index`."""
        period, slot = divmod(index, self.period)
        return [period * count + own for count, own in zip(self._counts, self._before(slot), strict=True)]

    def _block(self, index: int) -> "_Block":
        with self._lock:
            if index not in self._blocks:
                start = index * _BLOCK
                earlier = self._blocks.get(index - 1)
                before = self._before(start) if earlier is None else earlier.after
                sources = self._order(before, start, min(start + _BLOCK, self.period))
                if len(self._blocks) == _RECENT:
                    del self._blocks[next(iter(self._blocks))]
                self._blocks[index] = _Block(before, np.fromiter(sources, np.uint16))
            return self._blocks[index]

    def _before(self, slot: int) -> list[int]:
        """The samples of each source in the period's slots before this one."""
        longest = self.period // min(self._counts) + 1
        back = 64
        while back < longest:
            start = max(0, slot - back)
            first, last = (self._after(before, start, slot) for before in self._enclosing(start))
            if first == last:
                return first
            back *= 4
        start = max(0, slot - longest)
        return self._after(self._enclosing(start)[0], start, slot)

    def _enclosing(self, slot: int) -> tuple[list[int], list[int]]:
        """The samples of each source before a slot if of those that may wait there the ones whose windows end first do,
        besides those that certainly wait, and if the ones whose windows end last do."""
        begun = [-(-slot * count // self.period) for count in self._counts]
        waiting = sum(begun) - slot
        left = [-slot * count % self.period for count in self._counts]  # of a sample, in periods
        may_wait = [source for source, parts in enumerate(left) if parts]
        may_wait.sort(key=lambda source: (self._end(source, begun[source] - 1), source), reverse=True)
        begins = {source: self._begin(source, begun[source] - 1) for source in may_wait}
        # The n that end last, down to some source: since that one began, at least as many samples waited as all parts
        # left sum to. If these are n or more, none of the n had a turn.
        waits = [
            source
            for index, source in enumerate(may_wait)
            if index * self.period < sum(left[other] for other in may_wait if begins[other] <= begins[source])
        ]
        others = [source for source in reversed(may_wait) if source not in waits]
        ways = [*waits, *others][:waiting], may_wait[:waiting]
        first, last = ([count - (source in way) for source, count in enumerate(begun)] for way in ways)
        return first, last

    def _after(self, before: list[int], start: int, stop: int) -> list[int]:
        """The samples of each source before slot `stop`, with those before slot `start`."""
        after = before.copy()
        for source in self._order(before, start, stop):
            after[source] += 1
        return after

    def _begin(self, source: int, sample: int) -> int:
        return sample * self.period // self._counts[source]

    def _end(self, source: int, sample: int) -> int:
        return -(-(sample + 1) * self.period // self._counts[source])

    def _order(self, before: list[int], start: int, stop: int) -> Iterator[int]:
        """The sources of the slots from `start` to `stop`, with the samples of each source before them."""
        waiting = [(self._begin(source, sample), source, sample) for source, sample in enumerate(before)]
        ready: list[tuple[int, int, int]] = []  # end of a window, source, sample
        heapq.heapify(waiting)  # beginning of a window, source, sample
        for slot in range(start, stop):
            while waiting and waiting[0][0] <= slot:
                _, source, sample = heapq.heappop(waiting)
                heapq.heappush(ready, (self._end(source, sample), source, sample))
            _, source, sample = heapq.heappop(ready)
            yield source
            heapq.heappush(waiting, (self._begin(source, sample + 1), source, sample + 1))


class _Block(NamedTuple):
    """Consecutive slots."""

    before: list[int]  # samples of each source before them
    sources: npt.NDArray[np.uint16]

    @property
    def after(self) -> list[int]:
        """Samples of each source before the next block."""
        own = np.bincount(self.sources, minlength=len(self.before)).tolist()
        return [count + more for count, more in zip(self.before, own, strict=True)]


class BlendedSamples:
    """An endless sequence of samples from several sources, each from its first on, or after those drawn `before`."""

    def __init__(
        self, sources: Sequence[EpochSamples], weights: Sequence[float], before: Sequence[int] | None = None
    ) -> None:
        self.sources, self.weights, self._before = sources, weights, before or [0] * len(sources)
        self.blend = Blend(weights)
        self.sequence_length = sources[0].sequence_length
        self.epoch_size = sum(source.epoch_size for source in sources)
        assert len(sources) == len(weights) and {source.sequence_length for source in sources} == {self.sequence_length}

    def __getitem__(self, index: int) -> Sample:
        source, own = self.place(index)
        return self.sources[source][own]

    def place(self, index: int) -> tuple[int, int]:
        """The source of a sample, and its number there."""
        source, own = self.blend.place(index)
        return source, self._before[source] + own


class JoinedSamples:
    """Evaluation samples of several corpora, interleaved: any prefix has each in proportion to its size."""

    def __init__(self, corpora: Sequence[CorpusSamples]) -> None:
        self._corpora = corpora
        self._order = Blend([len(corpus) for corpus in corpora])
        self.sequence_length, self.form = corpora[0].sequence_length, corpora[0].form

    def __len__(self) -> int:
        return sum(map(len, self._corpora))

    def __getitem__(self, index: int) -> Sample:
        corpus, own = self._order.place(index)
        return self._corpora[corpus][own]

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return sum(corpus.num_tokens for corpus in self._corpora)

    def documents(self) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens, document by document."""
        return itertools.chain.from_iterable(corpus.documents() for corpus in self._corpora)
