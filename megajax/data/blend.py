"""Samples from several sources in given shares: among the first n, a source with share w has more than w·n - 1 and
fewer than w·n + 1, in its own order. The source of sample n depends only on the weights and n."""

import array
import heapq
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from megajax.data.samples import CorpusSamples, EpochSamples, Sample

_BLOCK = 4096  # samples whose sources are computed together


class Blend:
    """The source of every sample.

    The k-th sample of a source with share w must be placed in the window from ⌊k/w⌋ to ⌈(k+1)/w⌉. Each place goes to
    the source whose window ends first among those that have begun (earliest deadline first, which meets all windows if
    the shares sum to 1; Baruah et al., "Proportionate progress", 1996). The computation uses integers: weights count as
    the decimal fractions they are written as, and the order repeats after `period` samples, their common denominator.
    It is computed from its start, a million samples per second, and takes two bytes per sample.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        assert fractions and all(fraction > 0 for fraction in fractions)
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        counts = [int(fraction * denominator) for fraction in fractions]
        common = math.gcd(*counts)
        self._counts = [count // common for count in counts]  # samples of each source per period
        self.period = sum(self._counts)
        self._sources = array.array("H")  # sources of a period's samples, as far as computed
        self._before: list[list[int]] = []  # samples of each source before each block
        self._waiting = [(0, source, 0) for source in range(len(weights))]  # start of a window, source, sample
        self._ready: list[tuple[int, int, int]] = []  # end of a window, source, sample
        self._lock = threading.Lock()

    @property
    def shares(self) -> list[float]:
        """The share of each source; they sum to 1."""
        return [count / self.period for count in self._counts]

    def place(self, number: int) -> tuple[int, int]:
        """The source of sample `number`, and the sample's number in that source."""
        period, slot = divmod(number, self.period)
        with self._lock:
            while len(self._sources) <= slot:
                self._extend()
        source, block = self._sources[slot], slot // _BLOCK
        here = np.array(self._sources[block * _BLOCK : slot], np.uint16)
        return source, period * self._counts[source] + self._before[block][source] + int((here == source).sum())

    def _extend(self) -> None:
        """Compute the sources of one more block."""
        given = self._before[-1].copy() if self._before else [0] * len(self._counts)
        last = np.array(self._sources[-_BLOCK:], np.uint16)
        for source, count in enumerate(np.bincount(last, minlength=len(given))):
            given[source] += int(count)
        self._before.append(given)
        begin = len(self._sources)
        for slot in range(begin, min(begin + _BLOCK, self.period)):
            while self._waiting and self._waiting[0][0] <= slot:
                _, source, sample = heapq.heappop(self._waiting)
                end = -(-(sample + 1) * self.period // self._counts[source])
                heapq.heappush(self._ready, (end, source, sample))
            _, source, sample = heapq.heappop(self._ready)
            self._sources.append(source)
            heapq.heappush(self._waiting, ((sample + 1) * self.period // self._counts[source], source, sample + 1))


class BlendedSamples:
    """An endless sequence of samples from several sources."""

    def __init__(self, sources: Sequence[EpochSamples], weights: Sequence[float]) -> None:
        self.sources = sources
        self.blend = Blend(weights)
        self.sequence_length = sources[0].sequence_length
        self.epoch_size = sum(source.epoch_size for source in sources)
        assert len(sources) == len(weights) and {source.sequence_length for source in sources} == {self.sequence_length}

    def __getitem__(self, number: int) -> Sample:
        source, own = self.blend.place(number)
        return self.sources[source][own]


class JoinedSamples:
    """Evaluation samples of several corpora, interleaved: any prefix has each in proportion to its size."""

    def __init__(self, corpora: Sequence[CorpusSamples]) -> None:
        self._corpora = corpora
        self._order = Blend([len(corpus) for corpus in corpora])
        self.sequence_length, self.form = corpora[0].sequence_length, corpora[0].form

    def __len__(self) -> int:
        return sum(map(len, self._corpora))

    def __getitem__(self, number: int) -> Sample:
        corpus, own = self._order.place(number)
        return self._corpora[corpus][own]

    def documents(self) -> Iterator[npt.NDArray[np.integer]]:
        """The tokens, document by document."""
        return itertools.chain.from_iterable(corpus.documents() for corpus in self._corpora)
