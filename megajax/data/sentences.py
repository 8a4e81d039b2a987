"""Text to sentences, by the package `sentencex` (Wikimedia's rules for English, without a download)."""

import re
from collections.abc import Iterator

_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_WRAPPED = 120  # characters: lines that are longer were not wrapped
_FULL = 0.8  # of the longest line around it, for a line to be wrapped
_WINDOW = 2048  # characters split in one go; in much longer ones `sentencex` takes one stray quote for a long quotation


def split_sentences(text: str) -> list[str]:
    """The sentences of a text in order, without white space around them.

    A blank line ends a sentence. So does the end of a line, unless the line was wrapped: lines up to the next blank one
    have at most 120 characters, and with the next word this one would have 80% of the longest.
    """
    lines = (line for block in _BLANK_LINES.split(text) for line in _unwrapped(block))
    return [sentence for line in lines for sentence in _of_line(line)]


def _unwrapped(block: str) -> Iterator[str]:
    """The lines of a text without blank lines; wrapped lines are joined."""
    lines = [stripped for line in block.splitlines() if (stripped := line.strip())]
    width = max(map(len, lines), default=0)
    begun: list[str] = []
    for number, line in enumerate(lines, start=1):
        begun.append(line)
        next_word = lines[number].split(" ", 1)[0] if number < len(lines) else ""
        if width > _WRAPPED or not next_word or len(line) + 1 + len(next_word) < _FULL * width:
            yield " ".join(begun)
            begun = []


def _of_line(line: str) -> Iterator[str]:
    """The sentences of a line, found in windows; each begins after the last complete one of the window before."""
    import sentencex

    start = 0
    while start < len(line):
        parts = sentencex.segment("en", line[start : start + _WINDOW])
        if start + _WINDOW < len(line) and len(parts) > 1:
            parts = parts[:-1]
        start += sum(map(len, parts))
        yield from (stripped for part in parts if (stripped := part.strip()))
