"""Cut long documents into pieces, so that none is ever in memory as a whole text, which may take four times its
bytes."""

import codecs
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import IO

from megajax.data.text import streams
from megajax.host.reading import JSON_STRING, check_json_size, check_size

LONG = 1 << 20  # characters; a document of more is cut
_PIECE = 1 << 18  # characters of a piece, at least
_BLOCK_BYTES = 1 << 20  # of UTF-8 decoded at a time
_KEY_BYTES = 1 << 16  # of a key in JSON; a longer key cannot be the wanted one

_MARK = codecs.BOM_UTF8.decode("latin-1")
_SPACE = re.compile(r"[ \t\r\n]*+")
_TO_BRACKET = re.compile(rf"(?:[^\"\[\]{{}}]++|{JSON_STRING.pattern})*+", re.DOTALL)
_SCALAR = re.compile(rf"(?:{JSON_STRING.pattern}|[^\"\[\]{{}},]++)?+", re.DOTALL)
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}
_BLOCK = re.compile(  # of a text in JSON; it ends in no escape, and between no two that are one character
    rb"(?:[^\\]{1,64}+|\\u[dD][89abAB]..\\u....|\\u....|\\.){1,65536}+", re.DOTALL
)


def cut(blocks: Iterable[str]) -> Iterator[str]:
    """A document given in blocks: one text, or, if it is long, pieces cut like plain text."""
    begun: list[str] = []
    rest = iter(blocks)
    while sum(map(len, begun)) <= LONG:
        block = next(rest, None)
        if block is None:
            yield "".join(begun)
            return
        begun.append(block)
    yield from streams.pieces(itertools.chain(begun, rest), _PIECE)


def decoded(content: bytes) -> Iterator[str]:
    """A text in UTF-8 in blocks, without byte order marks; a `UnicodeDecodeError` comes before the first of them."""
    for _ in _blocks(content):
        pass
    yield from streams.without_marks(_blocks(content))


def _blocks(content: bytes) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), _BLOCK_BYTES):
        block = content[start : start + _BLOCK_BYTES]
        yield streams.checked(decoder.decode(block, final=start + len(block) == len(content)))


def in_json(line: bytes, key: str) -> Iterator[str]:
    """The text under `key` of a JSON object, in blocks; errors come before the first block. Values of other keys are
    not parsed, so mistakes there are not found. Raises `ValueError` if the rest is not JSON in UTF-8 or exceeds the
    limits, `KeyError` if there is no such text.
    """
    begin, end = _member(line.decode("latin-1"), key)  # one character per byte
    for check in True, False:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for found in _BLOCK.finditer(line, begin, end):
            text = json.loads(f'"{decoder.decode(found.group(), final=found.end() == end)}"')
            if check:
                text.encode()  # escapes such as \ud800 are valid JSON but no text
            else:
                yield text


def elements(content: IO[bytes], most: int) -> Iterator[bytes]:
    """The elements of an array of JSON, and of further arrays after it, as where files were joined; raises
    `Undecodable` where an array breaks or something else follows it, and `TooLong` for an element of more than `most`
    bytes."""
    text, offset = _more(content, "", 0), 0
    while True:
        text, offset = _next_array(content, text, offset)
        if not text:
            return
        while text[offset - 1] != "]":
            begin = offset = _after_space(text, offset)
            end = _end_of_value(text, begin)
            while _after_space(text, end) == len(text):  # it may go on
                check_size(end - begin, most)
                before = len(text) - begin
                text, begin = _more(content, text, begin), 0
                if len(text) == before:
                    raise streams.Undecodable("the array of JSON does not end")
                end = _end_of_value(text, begin := _after_space(text, 0))
            check_size(end - begin, most)
            if end > begin:
                yield text[begin:end].encode("latin-1")
            offset = _after_space(text, end) + 1
            if text[offset - 1] not in ",]" or (text[offset - 1] == "," and end == begin):
                raise streams.Undecodable(f"not JSON: {json.dumps(text[begin:offset][-20:])} in an array")


def _next_array(content: IO[bytes], text: str, offset: int) -> tuple[str, int]:
    """The text from `offset` on, with more if it is short, and where its array's first element begins; an empty text at
    the end of the content."""
    while (offset := _after_space(text, offset)) > len(text) - len(_MARK):  # a mark may go on, too
        before, text, offset = len(text) - offset, _more(content, text, offset), 0
        if len(text) == before:
            break
    offset = _after_space(text, offset + len(_MARK) * text.startswith(_MARK, offset))
    if text[offset : offset + 1] not in ("", "["):
        raise streams.Undecodable(f"{json.dumps(text[offset : offset + 20])} follows an array, which only arrays may")
    return text[offset:], 1


def _more(content: IO[bytes], text: str, begin: int) -> str:
    """A text from `begin` on, with as much again, decoded as Latin-1."""
    return text[begin:] + content.read(max(len(text) - begin, _BLOCK_BYTES)).decode("latin-1")


def _member(text: str, key: str) -> tuple[int, int]:
    """Where the last text under `key` begins and ends, in an object of JSON that was decoded as Latin-1."""
    check_json_size(text)
    value, offset = None, _after("{", text, len(_MARK) if text.startswith(_MARK) else 0)
    while True:
        begin = _after('"', text, offset) - 1
        end = _after('"', text, _end_of_value(text, begin) - 1)
        is_key = end - begin < _KEY_BYTES and json.loads(text[begin:end].encode("latin-1")) == key
        begin = _after_space(text, _after(":", text, end))
        offset = _after_space(text, _end_of_value(text, begin))
        if is_key:
            value = begin, offset
        if text[offset : offset + 1] != ",":
            break
        offset += 1
    if _after_space(text, _after("}", text, offset)) != len(text):
        raise ValueError("not JSON: more after the object")
    if value is None:
        raise KeyError(key)
    begin, offset = value
    if text[begin : begin + 1] != '"':
        raise ValueError(f'under the key "{key}" is {text[begin:offset][:40]}, not text')
    return begin + 1, text.rindex('"', begin, offset)


def _after_space(text: str, offset: int) -> int:
    found = _SPACE.match(text, offset)
    assert found
    return found.end()


def _after(character: str, text: str, offset: int) -> int:
    """The position after this character, which only white space may precede."""
    offset = _after_space(text, offset)
    if text[offset : offset + 1] != character:
        raise ValueError(f"not JSON: no {character} at column {offset + 1}")
    return offset + 1


def _end_of_value(text: str, offset: int) -> int:
    depth = 0
    while True:
        match = (_TO_BRACKET if depth else _SCALAR).match(text, offset)
        assert match
        offset = match.end()
        step = _STEP.get(text[offset : offset + 1], 0)
        if not step or depth + step <= 0:
            return offset + (depth > 0 and step < 0)
        depth, offset = depth + step, offset + 1
