"""All shards as one sequence of N documents, and the groups of shards that are processed together."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.preparation.shards import WorkFolder

# Documents per group: 1/64 of all, so that all workers have work, but between these limits; 1/1024 of very many.
_GROUP = 1 << 10, 1 << 18
_GROUPS = 64, 1024


class Numbering:
    """Counts records per file over the shards in order. A shard's summary has `files`: its first file, its last file,
    and the number of its records in the last."""

    def __init__(self) -> None:
        self._last, self._count = -1, 0  # the last file so far, and the number of its records so far

    def before(self, files: Sequence[int]) -> int:
        """The number of records of the next shard's first file that are in earlier shards."""
        first, last, count = files
        before = self._count if first == self._last else 0
        self._last, self._count = last, count + (before if first == last else 0)
        return before


@dataclass(frozen=True, eq=False)
class CleanedShards:
    """The shards after cleaning: a few numbers per shard, nothing per document. S shards, G groups."""

    text_bytes: int
    starts: npt.NDArray[np.int64]  # the first document of each shard, then N, [S + 1]
    texts: npt.NDArray[np.int64]  # the number of non-empty texts before each shard, [S]
    first_files: npt.NDArray[np.int64]  # each shard's first file, [S]
    before: npt.NDArray[np.int64]  # the number of that file's records in earlier shards, [S]
    groups: npt.NDArray[np.int64]  # the first shard of each group, then S, [G + 1]

    @classmethod
    def combined(cls, summaries: Iterable[Mapping[str, Any]]) -> "CleanedShards":
        """The corpus with these summaries of cleaned shards."""
        starts, texts, first_files, before, text_bytes = [0], [0], [], [], 0
        numbering = Numbering()
        for summary in summaries:
            first_files.append(summary["files"][0])
            before.append(numbering.before(summary["files"]))
            starts.append(starts[-1] + summary["pieces"])
            texts.append(texts[-1] + summary["texts"])
            text_bytes += summary["bytes"]
        total = starts[-1]
        wanted = max(total // _GROUPS[1], min(max(total // _GROUPS[0], _GROUP[0]), _GROUP[1]))
        groups = [0]
        for shard in range(1, len(starts)):
            if shard == len(starts) - 1 or starts[shard] - starts[groups[-1]] >= wanted:
                groups.append(shard)
        arrays = (np.array(each, np.int64) for each in (starts, texts[:-1], first_files, before, groups))
        return cls(text_bytes, *arrays)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1

    @property
    def num_groups(self) -> int:
        return len(self.groups) - 1

    def shards_of(self, group: int) -> range:
        """A group's shards."""
        return range(int(self.groups[group]), int(self.groups[group + 1]))

    def groups_of(self, documents: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Each document's group."""
        return np.searchsorted(self.starts[self.groups], documents.astype(np.int64), side="right") - 1

    def locate(self, document: int) -> tuple[int, int]:
        """A document's shard, and its index in the shard."""
        shard = int(np.searchsorted(self.starts, document, side="right")) - 1
        return shard, document - int(self.starts[shard])

    def number_in_file(self, shard: int, file: int, in_shard: int) -> int:
        """A record's number in its file, given its number in the shard."""
        return in_shard + (int(self.before[shard]) if file == self.first_files[shard] else 0)

    def save(self, work: WorkFolder) -> None:
        """Write the corpus for the workers."""
        names = ("starts", "texts", "first_files", "before", "groups")
        work.save("corpus", 0, {name: getattr(self, name) for name in names}, {"text_bytes": self.text_bytes})

    @classmethod
    def load(cls, work: WorkFolder) -> "CleanedShards":
        """Read what `save` wrote."""
        return _loaded(work)


@functools.lru_cache(maxsize=2)
def _loaded(work: WorkFolder) -> CleanedShards:
    arrays = work.load("corpus", 0, "starts", "texts", "first_files", "before", "groups")
    return CleanedShards(work.read_summary("corpus", 0)["text_bytes"], *arrays)
