"""Clean a document's text for the corpus. Time is linear in the length of any text."""

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator

_MARKS = 64  # combining marks in a row that are normalised together; sorting them takes quadratic time
_MAY_NEED_REPAIR = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")  # ftfy leaves other text unchanged; & begins an entity
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_END_OF_LINE = re.compile(r"(?<![ \t])[ \t]*+(?:\r\n?|\n)")  # matches white space only from its beginning
_BLANK_LINES = re.compile(r"\n{3,}")


def clean(text: str, *, fix_unicode: bool, clean_newlines: bool) -> str:
    """A document's cleaned text; empty if only white space is left.

    `fix_unicode` repairs wrongly decoded characters, HTML entities, ligatures, curly quotes and line ends (`ftfy`).
    `clean_newlines` makes lines end with LF, and removes trailing white space, blank lines at both ends and repeated
    blank lines.
    """
    if fix_unicode:
        text = _repaired(text)
    if clean_newlines:
        text = _BLANK_LINES.sub("\n\n", _END_OF_LINE.sub("\n", text)).strip("\n")
    return "" if text.isspace() else text


def _repaired(text: str) -> str:
    """`ftfy.fix_text(text)`, which works line by line; called only for lines that it may change.

    Lines with long runs of nested entities or combining marks are repaired in parts.
    """
    if not _MAY_NEED_REPAIR.search(text):
        return text
    import ftfy

    as_html: bool | str = "auto"
    lines = []
    for line in _LINE.findall(text):
        if "<" in line:
            as_html = False  # from here on the text is markup, whose entities stay
        parts = parts_to_normalise(line) if _MAY_NEED_REPAIR.search(line) else ()
        lines += [ftfy.fix_text(part, unescape_html=as_html) for part in parts] if parts else [line]
    return "".join(lines)


def parts_to_normalise(text: str) -> Iterator[str]:
    """Split a text into parts that take linear time to normalise and repair; nearly every text is one part."""
    if text.isascii() and "&" not in text:
        yield text
        return
    begin = 0
    for found in _slow().finditer(text):
        yield text[begin : found.end()]
        begin = found.end()
    if begin < len(text):
        yield text[begin:]


@functools.cache
def _slow() -> re.Pattern[str]:
    """Long runs of combining marks, or of `&amp;amp;…`, from which each round of ftfy's repairs removes one level."""
    marks = "".join(filter(unicodedata.combining, map(chr, range(sys.maxunicode + 1))))
    # A class compares a character with each of its members above U+FFFF. Most characters are ruled out before that.
    first = "".join(mark for mark in marks if mark <= "\uffff") + "\U00010000-\U0010ffff&\uff06"
    return re.compile(rf"(?=[{first}])(?:[{marks}]{{{_MARKS}}}|[&\uff06](?:#?[0-9A-Za-z]{{1,24}};){{16}})")
