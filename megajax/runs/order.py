"""The order of a run's samples, which a resumed run may change from then on: with other batch sizes, another blend of
corpora, or other samples to leave out.

Samples drawn are counted in two ways. A run's `samples` are those that its steps have drawn. Their `numbers` in the
order count those left out too (`data.skip` names these), and go on from one blend to the next. In every blend a corpus
goes on with its own next sample. So the place of a run's data follows from the changes and the step alone.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from megajax.core.config import MOST_ROWS
from megajax.core.errors import Damaged
from megajax.core.options import MOST
from megajax.data.config import skipped_samples
from megajax.data.samples.base import EndlessSamples, Sample
from megajax.data.samples.blend import Blend, BlendedSamples
from megajax.data.samples.loader import BatchSizes
from megajax.host import reading
from megajax.host.files import write_atomically
from megajax.settings.config import Config

ORDER = "order.json"  # in the run directory, before in its data folder; missing if no start changed the order


@dataclass(frozen=True)
class OrderSegment:
    """The order that a start sets."""

    step: int  # number of steps before it
    batch: tuple[int, int, int, int]  # arguments of `BatchSizes.of`
    corpora: tuple[tuple[str, float], ...]  # their folders, with weights; none for a task
    skip: tuple[tuple[int, int], ...]  # first and last numbers of samples to leave out, ascending and apart

    @classmethod
    def of(cls, config: Config, corpora: Sequence[str], step: int = 0) -> Self:
        """The order that a configuration sets from a step on; `corpora` are the folders of its corpora."""
        train, weights = config.train, [source.weight for source in config.data.sources] or [1.0] * len(corpora)
        batch = train.global_batch, train.ramp_start, train.ramp_increment, train.ramp_samples
        return cls(step, batch, tuple(zip(corpora, weights, strict=True)), skipped_samples(config.data.skip))

    @classmethod
    def parsed(cls, record: dict) -> Self:
        """A part as stored."""
        corpora = tuple((str(name), float(weight)) for name, weight in record["corpora"])
        skip = tuple((int(first), int(last)) for first, last in record["skip"])
        full, start, increment, samples = map(int, record["batch"])
        assert 0 < full <= MOST_ROWS, full
        assert all(0 < weight <= MOST for _, weight in corpora), corpora
        return cls(int(record["step"]), (full, start, increment, samples), corpora, skip)

    @property
    def folders(self) -> list[str]:
        """The folders of its corpora."""
        return [name for name, _ in self.corpora]


class Order:
    """The order of all samples that a run has drawn and will draw.

    Attributes:
        parts: the first at step 0, the last of the current start.
        sizes: the global batch sizes of all steps.
    """

    def __init__(self, segments: Sequence[OrderSegment]):
        self.parts, self.sizes = tuple(segments), BatchSizes.of(*segments[0].batch)
        self._drawn = self._number = 0  # samples drawn before the last part; the number of the next one
        self._begin = 0  # the number at which the blend of the last part began
        self._before: dict[str, int] = {}  # samples of each corpus in earlier blends
        for last, segment in itertools.pairwise(segments):
            drawn = self.sizes.first_sample(segment.step)
            if drawn > self._drawn:
                self._number = _after(drawn - self._drawn - 1, self._number, last.skip) + 1
            if segment.corpora != last.corpora:
                counts = Blend([weight for _, weight in last.corpora]).before(self._number - self._begin)
                for name, count in zip(last.folders, counts, strict=True):
                    self._before[name] = self._before.get(name, 0) + count
                self._begin = self._number
            self.sizes, self._drawn = self.sizes.then(segment.step, *segment.batch), drawn

    def at(self, step: int) -> "Order":
        """The order if the last part begins at `step`, because newer checkpoints cannot be read."""
        earlier = tuple(part for part in self.parts[:-1] if part.step < step)
        return Order([*earlier, replace(self.parts[-1], step=min(step, self.parts[-1].step))])

    def line(self, step: int) -> str:
        """What a run says about its samples when it continues after `step`; empty if it begins."""
        last, drawn = self.parts[-1], self.sizes.first_sample(step)
        other = last.corpora != self.parts[len(self.parts) - 2].corpora
        changed = f"; {'other corpora' if other else 'another order'} since step {last.step + 1:,}" if last.step else ""
        skipped = [f"{first}:{end}" for first, end in last.skip if end >= self._number]
        without = f"; left out: {', '.join(skipped)}" if skipped else ""
        told = f"{drawn:,} drawn so far, the next one is number {self.number_of(drawn)}{changed}{without}"
        begins = "\nwarning: the corpora changed; training goes on with the data above" * (other and step == last.step)
        return f"samples: {told}{begins}" if step or skipped else ""

    def samples(self, train: EndlessSamples) -> "OrderedSamples":
        """The samples from the last part on, by how many were drawn before, given those of its blend from their
        first."""
        before = [self._before.get(name, 0) for name in self.parts[-1].folders]
        if isinstance(train, BlendedSamples):
            train, before = BlendedSamples(train.sources, train.weights, before), [0]
        return OrderedSamples(train, self, sum(before) - self._begin)

    def number_of(self, sample: int) -> int:
        """The number of the sample that is drawn after `sample` others, in the last part."""
        return _after(sample - self._drawn, self._number, self.parts[-1].skip)


@dataclass(frozen=True)
class OrderedSamples:
    """An endless sequence in the order of the last part; see `Order.samples`."""

    train: EndlessSamples
    order: Order
    shift: int  # from numbers in the order to those in `train`

    def __getitem__(self, sample: int) -> Sample:
        return self.train[self.place(sample)]

    def place(self, sample: int) -> int:
        """The number in `train` of the sample that is drawn after `sample` others."""
        return self.order.number_of(sample) + self.shift


def _after(count: int, start: int, skip: Sequence[tuple[int, int]]) -> int:
    """The number of the sample after `count` others from `start` on, where those to skip do not count."""
    sample = start + count
    for first, last in skip:
        begin = max(first, start)
        if sample < begin:
            break
        sample += max(0, last + 1 - begin)
    return sample


def next_order(config: Config, run_dir: Path, corpora: Sequence[str], earlier: Config | None, step: int) -> Order:
    """The order of a start that continues after `step`, with a configuration and the folders of its `corpora`;
    `earlier` is the configuration of the last start."""
    now, parts = OrderSegment.of(config, corpora, step), _parts_before(earlier or config, run_dir, step)
    if not parts or replace(parts[-1], step=step) != now:
        parts.append(now)
    return Order(parts)


def known_corpora(earlier: Config, run_dir: Path, step: int) -> dict[str, str]:
    """The folders of all corpora that a run has drawn from up to `step`, each with its path if the last start, which
    had the configuration `earlier`, drew from it, else with an empty one."""
    parts = _parts_before(earlier, run_dir, step)
    known = {name: "" for part in parts for name in part.folders}
    paths = [source.path for source in earlier.data.sources] or [earlier.data.path]
    return known | dict(zip(parts[-1].folders if parts else (), paths, strict=False))


def write_order(config: Config, run_dir: Path, order: Order) -> None:
    """Note the order of a start in the run directory, unless `read_order` would find it anyway. The data folder, where
    earlier versions noted it, may be deleted."""
    if order.parts != read_order(config, run_dir).parts or _file(run_dir) != run_dir / ORDER:
        write_atomically(run_dir / ORDER, json.dumps({"parts": list(map(asdict, order.parts))}, indent=1) + "\n")


def read_order(config: Config, run_dir: Path) -> Order:
    """The order noted in a run directory, else the one that the configuration sets."""
    return Order(_read(run_dir) or [OrderSegment.of(config, default_corpora(config))])


def default_corpora(config: Config) -> list[str]:
    """The folders of a new run's corpora, in its data folder."""
    numbered = [f"source-{number}" for number in range(len(config.data.sources))]
    return numbered or ["."] * config.pretrains


def _parts_before(first: Config, run_dir: Path, step: int) -> list[OrderSegment]:
    """The parts of the order that begin before `step`; `first` sets the order unless one is noted."""
    parts = _read(run_dir) or [OrderSegment.of(first, default_corpora(first))]
    return [part for part in parts if part.step < step]


def _file(run_dir: Path) -> Path:
    """Where the order is noted."""
    older = run_dir / "data" / ORDER
    return older if reading.kind(older) and not reading.kind(run_dir / ORDER) else run_dir / ORDER


def _read(run_dir: Path) -> list[OrderSegment]:
    """The parts noted; none without a file."""
    file = _file(run_dir)
    if not reading.kind(file):
        return []
    try:
        parts = [OrderSegment.parsed(record) for record in reading.read_json(file)["parts"]]
        assert parts and parts[0].step == 0
        Order(parts)
    except (AssertionError, KeyError, TypeError, ValueError, ArithmeticError):
        raise Damaged(file, "not the order of a run's samples", "the file as it was") from None
    return parts
