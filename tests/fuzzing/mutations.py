"""What a reader of files is to the fuzzer, and changes of a file's bytes: what a disk, a crash, an editor or somebody
hostile may make of it."""

import functools
import gzip
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from backports import zstd

MOST_BYTES = 1 << 20  # of a mutated file

_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*")
_NUMBERS = b"0 -1 1e999 -0.0 NaN Infinity 1.5 255 65536 2147483648 1099511627776".split()
_NUMBERS += [b"9223372036854775808", b"18446744073709551616", b"9" * 40, b"9" * 350, b"9" * 5000, b"0x" + b"f" * 400]
_NUMBERS += ["١٢".encode(), b"1_000", b"true", b"1e-320", b"99999999"]
_VALUES = b"""null true [] {} "" "text" -1 1.5 [[[]]] {"a":1} ' " #""".split()
_VALUES += [b'"' * 3]
_TEXTS = [b"\0", b"\n", b"\r\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", "\u2028".encode(), "é٣".encode()]
_TEXTS += [b"../..", b"/dev/zero", b"<|endoftext|>", b"=", b",", b".", b"[", b"{", b"]", b"}", b"\x80", b"\\", b"PAR1"]
_OPENINGS = [b"[", b'{"a":', b"{a=", b"[{", b"a.", b"(", b'[["', b"{" * 3]
_PIECES = [b"a", b" ", b"\n", b'"', b"\\", b"9", b"0,", b"[],", b"\xff", b"a b ", b"a=1\n", b'"a":1,', b"\0"]
_INTEGERS = [0, 1, 2**40, 2**62, *(2**bits - less for bits in (8, 16, 31, 32, 63, 64) for less in (0, 1))]


class Packing(NamedTuple):
    """How a file is compressed."""

    pack: Callable[[bytes], bytes]
    unpack: Callable[[bytes], bytes]


NONE = Packing(bytes, bytes)
GZ = Packing(functools.partial(gzip.compress, compresslevel=1), gzip.decompress)
ZST = Packing(functools.partial(zstd.compress, level=1), zstd.decompress)


@dataclass(frozen=True)
class Reader:
    """A reader of files."""

    name: str  # in tables
    make: Callable[[Path], object]  # writes its valid files into an empty folder
    read: Callable[[Path], object]
    files: tuple[str, ...]  # names of those that are changed, one at a time
    packing: Packing = NONE  # of a compressed file: its content is changed, or the file is
    most: int = 0  # inputs that the long run stops at; 0: none
    short: int = 25  # inputs of the short run

    def changed(self, whole: bytes, rng: random.Random) -> tuple[bytes, int]:
        """A changed file, and the size of its content before it was packed."""
        inner = self.packing.unpack(whole)
        if self.packing is not NONE and rng.random() < 0.5:
            content = _mutated(whole, rng)
            return content, max(len(content), len(inner))
        inner = _mutated(inner, rng)
        return self.packing.pack(inner), len(inner)


def of_one_file(name: str, file: str, text: str, read: Callable[[Path], object], packing: Packing = NONE) -> Reader:
    """A reader of one file with this valid text; it is given the file's path."""

    def make(folder: Path) -> None:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(packing.pack(text.encode()))

    return Reader(name, make, lambda folder: read(folder / file), (file,), packing)


def _mutated(content: bytes, rng: random.Random) -> bytes:
    """The content after one to four changes."""
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
        change = rng.choices(list(_CHANGES), list(_CHANGES.values()))[0]
        start = rng.randrange(len(content) + 1)
        stop = min(len(content), start + rng.choice([1, 1, 2, 4, 8, 16, 64, 256, 4096, len(content)]))
        content = change(content, start, stop, rng)[:MOST_BYTES]
    return content


def _flip(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8]) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _insert(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    return content[:start] + rng.choice([*_TEXTS, *_VALUES, rng.randbytes(rng.randrange(1, 40))]) + content[start:]


def _nest(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    return content[:start] + rng.choice(_OPENINGS) * rng.choice([3, 60, 70, 1000, 30_000]) + content[start:]


def _lengthen(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    return content[:start] + rng.choice(_PIECES) * rng.choice([100, 5000, 200_000]) + content[start:]


def _splice(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + content[start:stop] + content[place:]


def _inflate(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    found = list(_NUMBER.finditer(content))
    if not found:
        return content
    number = rng.choice(found)
    return content[: number.start()] + rng.choice(_NUMBERS) + content[number.end() :]


def _integer(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    size = rng.choice([1, 2, 4, 8])
    number = (rng.choice(_INTEGERS) + rng.choice([-1, 0, 0, 1])) % 2 ** (8 * size)
    return content[:start] + number.to_bytes(size, rng.choice(["little", "little", "big"])) + content[start + size :]


def _repeat(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    """A line, or what stands between two commas, more than once: so keys are there twice, and counts do not hold."""
    separator = rng.choice([b"\n", b",", b"\n\n"])
    parts = content.split(separator)
    number = rng.randrange(len(parts))
    return separator.join(parts[:number] + parts[number : number + 1] * rng.choice([2, 3, 100]) + parts[number + 1 :])


def _shuffle(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    separator = rng.choice([b"\n", b",", b" "])
    parts = content.split(separator)
    one, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    parts[one], parts[other] = parts[other], parts[one]
    return separator.join(parts)


def _value(content: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    """Another value behind a colon or an equals sign."""
    places = [found.end() for found in re.finditer(rb"[:=\[,]\s?", content)]
    if not places:
        return content
    start = rng.choice(places)
    stop = re.compile(rb"[,}\n\]]|$").search(content, start).end()  # type: ignore[union-attr]
    return content[:start] + rng.choice(_VALUES) + content[max(start, stop - 1) :]


_CHANGES: dict[Callable[[bytes, int, int, random.Random], bytes], float] = {
    _flip: 10,
    lambda content, start, stop, rng: content[:start]: 4,
    lambda content, start, stop, rng: content[:start] + content[stop:]: 6,
    lambda content, start, stop, rng: content[:start] + bytes(stop - start) + content[stop:]: 4,
    _insert: 8,
    _splice: 5,
    _inflate: 10,
    _integer: 6,
    _value: 8,
    _repeat: 5,
    _shuffle: 4,
    _nest: 1.5,
    _lengthen: 1.5,
}
