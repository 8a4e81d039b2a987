"""The text of a document as it goes into the corpus. Time is linear in the text, whatever it holds."""

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator

_MARKS = 64  # combining marks in a row that are normalised in one go: their order takes quadratic time
_MAY_NEED_REPAIR = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")  # ftfy changes no other text; & begins an entity
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_END_OF_LINE = re.compile(r"(?<![ \t])[ \t]*+(?:\r\n?|\n)")  # white space is tried from its beginning only
_BLANK_LINES = re.compile(r"\n{3,}")


def clean(text: str, *, fix_unicode: bool, clean_newlines: bool) -> str:
    """The text of a document as it goes into the corpus; empty if only white space is left.

    `fix_unicode` repairs wrongly decoded characters, HTML entities, ligatures, curly quotes, line ends (`ftfy`). With
    `clean_newlines` lines end with LF and no white space, and there are no blank lines at the ends or two in a row.
    """
    if fix_unicode:
        text = _repaired(text)
    if clean_newlines:
        text = _BLANK_LINES.sub("\n\n", _END_OF_LINE.sub("\n", text)).strip("\n")
    return "" if text.isspace() else text


def _repaired(text: str) -> str:
    """`ftfy.fix_text(text)`, called only for the lines that it may change; it works line by line.

    Lines with very many entities of entities, or combining marks, in a row are repaired in parts.
    """
    if not _MAY_NEED_REPAIR.search(text):
        return text
    import ftfy

    as_html: bool | str = "auto"
    lines = []
    for line in _LINE.findall(text):
        if "<" in line:
            as_html = False  # markup from here on: entities are left as they are
        parts = parts_to_normalise(line) if _MAY_NEED_REPAIR.search(line) else ()
        lines += [ftfy.fix_text(part, unescape_html=as_html) for part in parts] if parts else [line]
    return "".join(lines)


def parts_to_normalise(text: str) -> Iterator[str]:
    """A text in parts that take linear time to normalise and to repair; nearly every text is one."""
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
    """Combining marks in a row; and `&amp;amp;…`, of which each round of ftfy's repairs takes one away."""
    marks = "".join(filter(unicodedata.combining, map(chr, range(sys.maxunicode + 1))))
    return re.compile(rf"[{marks}]{{{_MARKS}}}|[&\uff06](?:#?[0-9A-Za-z]{{1,24}};){{16}}")
