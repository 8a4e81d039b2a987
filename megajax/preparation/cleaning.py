"""Repair and tidy the text of one document (paper §5.2)."""

import re

_MAY_NEED_REPAIR = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")  # ftfy changes no other text; & begins an entity
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_END_OF_LINE = re.compile(r"[ \t]*(?:\r\n?|\n)")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean(text: str, *, fix_unicode: bool, clean_newlines: bool) -> str:
    """The text of a document as it goes into the corpus; empty if only white space is left.

    Args:
        text: any text.
        fix_unicode: repair wrongly decoded characters, HTML entities, ligatures, curly quotes and line ends (`ftfy`).
        clean_newlines: LF as line end, no white space before it, at most one blank line in a row, none at the ends.
    """
    if fix_unicode:
        text = _repaired(text)
    if clean_newlines:
        text = _BLANK_LINES.sub("\n\n", _END_OF_LINE.sub("\n", text)).strip("\n")
    return "" if text.isspace() else text


def _repaired(text: str) -> str:
    """`ftfy.fix_text(text)`, called only for the lines that it may change; it works line by line."""
    if not _MAY_NEED_REPAIR.search(text):
        return text
    import ftfy

    as_html: bool | str = "auto"
    lines = []
    for line in _LINE.findall(text):
        if "<" in line:
            as_html = False  # markup from here on: entities are left as they are
        lines.append(ftfy.fix_text(line, unescape_html=as_html) if _MAY_NEED_REPAIR.search(line) else line)
    return "".join(lines)


def normalised(text: str) -> str:
    """The text by which duplicates are compared: in lower case, with one space for any white space."""
    return " ".join(text.lower().split())
