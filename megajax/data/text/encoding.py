"""Encode texts as token ids: a document is one sequence with begin and end tokens, or one sequence per sentence.

Sentences are found by the package `sentencex` (Wikimedia's rules for English, without a download).
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megajax.data.text.tokenizer import Tokenizer

_BATCH_CHARACTERS = 4 << 20  # text tokenized together
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_WRAPPED = 120  # characters; longer lines are not wrapped ones
_FULL = 0.8  # a wrapped line with its next word has at least this share of the longest line around it
_WINDOW = 2048  # characters split together; in much longer texts `sentencex` takes a stray quote for a long quotation


def encode_documents(
    documents: Iterable[str], tokenizer: Tokenizer, *, sentences: bool = False
) -> Iterator[list[npt.NDArray[np.int32]]]:
    """The sequences of each document, ids int32 [length]: one, as by `as_document`, or one per sentence. Sentences
    without tokens are left out, and so are documents without sentences."""
    for texts in in_parts(documents, _BATCH_CHARACTERS):
        for sequences in encode_texts(texts, tokenizer, sentences=sentences):
            if not sentences:
                yield [as_document(np.array(sequences[0], np.int32), tokenizer)]
            elif sequences:
                yield [np.array(ids, np.int32) for ids in sequences]


def as_document(ids: npt.NDArray[np.integer], tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """The ids of a text after the tokenizer's begin token (unless the text spells it out), then the end of text."""
    first = len(tokenizer.begin)
    begin = np.array(tokenizer.with_begin(ids[:first].tolist()), np.int32)
    return np.concatenate([begin, ids[first:], [tokenizer.end_of_text]]).astype(np.int32)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, *, sentences: bool) -> list[list[list[int]]]:
    """The ids of each text, or of each of its non-empty sentences, without begin or end tokens."""
    split = [split_sentences(text) if sentences else [text] for text in texts]
    encoded = iter(tokenizer.encode_batch([sequence for document in split for sequence in document]))
    found = [[next(encoded) for _ in document] for document in split]
    return [[ids for ids in sequences if ids] for sequences in found] if sentences else found


def in_parts(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Documents in batches of at least this many characters; the last batch may have fewer."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def split_sentences(text: str) -> list[str]:
    """The sentences of a text in order, without surrounding white space.

    A blank line ends a sentence. So does the end of a line, unless the line was wrapped: the lines up to the next blank
    one have at most 120 characters, and with the next word this line would reach 80% of the longest.
    """
    lines = (line for block in _BLANK_LINES.split(text) for line in _unwrapped(block))
    return [sentence for line in lines for sentence in _line_sentences(line)]


def _unwrapped(block: str) -> Iterator[str]:
    """The lines of a text without blank lines, with wrapped lines joined."""
    lines = [stripped for line in block.splitlines() if (stripped := line.strip())]
    width = max(map(len, lines), default=0)
    begun: list[str] = []
    for number, line in enumerate(lines, start=1):
        begun.append(line)
        next_word = lines[number].split(" ", 1)[0] if number < len(lines) else ""
        if width > _WRAPPED or not next_word or len(line) + 1 + len(next_word) < _FULL * width:
            yield " ".join(begun)
            begun = []


def _line_sentences(line: str) -> Iterator[str]:
    """The sentences of a line, found in windows; each begins after the last complete sentence of the one before."""
    import sentencex

    start = 0
    while start < len(line):
        parts = sentencex.segment("en", line[start : start + _WINDOW])
        if start + _WINDOW < len(line) and len(parts) > 1:
            parts = parts[:-1]
        start += sum(map(len, parts))
        yield from (stripped for part in parts if (stripped := part.strip()))
