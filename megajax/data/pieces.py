"""Documents of a stream of text: split at a separator, or cut where a paragraph, a line or a word ends."""

import re
from collections.abc import Iterable, Iterator, Sequence

from megajax.host import reading

_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")


def separated(blocks: Iterable[str], separator: str) -> Iterator[str]:
    """The documents between separators.

    Raises:
        TooLong: one is longer than a document may be.
    """
    parts: list[str] = []  # of a text that has not ended
    tail = ""  # its end, in which the separator may have begun
    for block in blocks:
        first, *others = (tail + block).split(separator)
        for text in others:
            yield joined([*parts, first]).strip("\r\n")
            parts, first = [], text
        parts.append(first[: -len(separator)])
        tail = first[-len(separator) :]
        check_length(parts)
    yield joined([*parts, tail]).strip("\r\n")


def joined(blocks: Iterable[str]) -> str:
    """One document from several blocks.

    Raises:
        TooLong: it is longer than a document may be.
    """
    parts: list[str] = []
    for block in blocks:
        parts.append(block)
        check_length(parts)
    return "".join(parts)


def check_length(parts: Sequence[str]) -> None:
    """Check that the blocks of a document are together not too long.

    Raises:
        TooLong: they are.
    """
    if sum(map(len, parts)) > reading.LINE_BYTES:
        raise reading.TooLong(f"more than {reading.LINE_BYTES >> 20} MiB as one text; valid: at most that")


def pieces(blocks: Iterable[str], target: int) -> Iterator[str]:
    """A text in pieces of about `target` characters, at most four times as many."""
    longest = 4 * target
    pending, start = "", 0
    for block in blocks:
        pending, start = pending[start:] + block, 0
        while len(pending) - start >= longest:
            end = _end_of_piece(pending, start + target, start + longest)
            yield pending[start:end]
            start = end
    while start < len(pending):
        end = _end_of_piece(pending, start + target, start + longest)
        yield pending[start:end]
        start = end


def _end_of_piece(text: str, earliest: int, latest: int) -> int:
    """Where to cut, from `earliest` to `latest`: after blank lines, without those after a line, else after a word."""
    blank_lines = _BLANK_LINES.search(text, earliest, latest)
    if blank_lines:
        return blank_lines.end()
    for separator in "\n", " ":
        found = text.find(separator, earliest, latest)
        if found >= 0:
            return found + 1
    return latest
