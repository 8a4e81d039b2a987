"""What a disk, a crash or somebody makes of a file."""

import os
from collections.abc import Callable
from pathlib import Path


def _flipped(place: Callable[[int], int]) -> Callable[[Path], object]:
    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        if content:
            content[place(len(content))] ^= 1
        file.write_bytes(content)

    return flip


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(),
    "truncated": lambda file: os.truncate(file, max(0, file.stat().st_size - 1)),
    "halved": lambda file: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file: os.truncate(file, 0),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "first byte": _flipped(lambda size: 0),
    "middle byte": _flipped(lambda size: size // 2),
    "last byte": _flipped(lambda size: size - 1),
    "grown": lambda file: file.write_bytes(file.read_bytes() + b" \n"),
    "doubled": lambda file: file.write_bytes(2 * file.read_bytes()),
    "a named pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a link to itself": lambda file: (file.unlink(), file.symlink_to(file.name)),
}
