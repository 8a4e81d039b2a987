"""Where the members of an archive begin, found without unpacking it: frames of `.zst`, and members of `.gz` files that
say their size (BGZF, as `bgzip` writes them). They can be unpacked one by one."""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import PurePath
from typing import IO

_GZIP, _ZSTD = b"\x1f\x8b\x08\x04", 0xFD2FB528
_SKIPPABLE = 0x184D2A50  # and the 15 numbers after it
_EXTRA = 12  # bytes of a member before its extra fields
_REPEATED = 1  # the kind of a block that stores one byte


class _Unknown(Exception):
    """Not a member that states its size."""


def member_borders(content: IO[bytes], size: int, wanted: int) -> list[int]:
    """Where members of an archive of `size` bytes begin, at least `wanted` bytes apart, and its end; only its beginning
    and end if members cannot be found."""
    suffix = PurePath(content.name).suffix.lower()
    borders = [0]
    with contextlib.suppress(_Unknown, struct.error):
        for place in (_gzip if suffix == ".gz" else _zstd)(content, size):
            if place - borders[-1] >= wanted and place < size:
                borders.append(place)
        return [*borders, size]
    return [0, size]


def _gzip(content: IO[bytes], size: int) -> Iterator[int]:
    offset = 0
    while offset < size:
        content.seek(offset)
        header = content.read(_EXTRA)
        if header[:4] != _GZIP:
            raise _Unknown
        extra = content.read(*struct.unpack("<H", header[10:]))
        while extra[:2] not in (b"BC", b""):
            extra = extra[4 + struct.unpack("<H", extra[2:4])[0] :]
        offset += 1 + struct.unpack("<H", extra[4:6])[0]
        yield offset


def _zstd(content: IO[bytes], size: int) -> Iterator[int]:
    offset = 0
    while offset < size:
        content.seek(offset)
        magic, first = struct.unpack("<IB", content.read(5))
        if magic & ~15 == _SKIPPABLE:
            offset += 8 + struct.unpack("<I", bytes([first]) + content.read(3))[0]
        elif magic == _ZSTD:
            single, checksum = first >> 5 & 1, first >> 2 & 1
            offset += 5 + (1 - single) + (0, 1, 2, 4)[first & 3] + (single, 2, 4, 8)[first >> 6]
            last = 0
            while not last:
                content.seek(offset)
                last, kind, length = _block(content.read(3))
                offset += 3 + (1 if kind == _REPEATED else length)
                if offset > size:
                    raise _Unknown
            offset += 4 * checksum
        else:
            raise _Unknown
        yield offset


def _block(header: bytes) -> tuple[int, int, int]:
    """Whether a block is a frame's last one, its kind, and its bytes."""
    value = struct.unpack("<I", header + b"\0")[0]
    return value & 1, value >> 1 & 3, value >> 3
