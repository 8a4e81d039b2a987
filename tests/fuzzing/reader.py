"""What a reader of files is to the fuzzer."""

import functools
import gzip
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backports import zstd
from mutations import mutated


class Packing(NamedTuple):
    """How a file is compressed."""

    pack: Callable[[bytes], bytes]
    unpack: Callable[[bytes], bytes]


NONE = Packing(bytes, bytes)
GZ = Packing(functools.partial(gzip.compress, compresslevel=1), gzip.decompress)
ZST = Packing(functools.partial(zstd.compress, level=1), zstd.decompress)


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    Attributes:
        name: in tables.
        make: writes its valid files into an empty folder.
        read: reads them.
        files: names of those that are changed, one at a time.
        packing: of a compressed file: its content is changed, or the file is.
        most: inputs that the long run stops at; 0: none.
        short: inputs of the short run.
    """

    name: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: tuple[str, ...]
    packing: Packing = NONE
    most: int = 0
    short: int = 25

    def changed(self, whole: bytes, rng: random.Random) -> tuple[bytes, int]:
        """A changed file, and the size of its content before it was packed."""
        inner = self.packing.unpack(whole)
        if self.packing is not NONE and rng.random() < 0.5:
            content = mutated(whole, rng)
            return content, max(len(content), len(inner))
        inner = mutated(inner, rng)
        return self.packing.pack(inner), len(inner)
