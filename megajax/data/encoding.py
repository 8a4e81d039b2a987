"""Texts to token ids: a document is one sequence with begin and end tokens, or one sequence for each sentence."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megajax.data.sentences import split_sentences
from megajax.data.text import in_parts
from megajax.data.tokenizer import Tokenizer

_BATCH_CHARACTERS = 4 << 20  # text tokenized in one go


def encode_documents(
    documents: Iterable[str], tokenizer: Tokenizer, *, sentences: bool = False
) -> Iterator[list[npt.NDArray[np.int32]]]:
    """The sequences of each document, ids int32 [length]: one, by `as_document`, or one for each sentence.

    A sentence without a token is left out, and so is a document without a sentence.
    """
    for texts in in_parts(documents, _BATCH_CHARACTERS):
        for sequences in encode_texts(texts, tokenizer, sentences=sentences):
            if not sentences:
                yield [as_document(np.array(sequences[0], np.int32), tokenizer)]
            elif sequences:
                yield [np.array(ids, np.int32) for ids in sequences]


def as_document(ids: npt.NDArray[np.integer], tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """The ids of a text with the tokenizer's begin token, unless the text spells it out, and the end of text."""
    first = len(tokenizer.begin)
    begin = np.array(tokenizer.with_begin(ids[:first].tolist()), np.int32)
    return np.concatenate([begin, ids[first:], [tokenizer.end_of_text]]).astype(np.int32)


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer, *, sentences: bool) -> Iterator[list[list[int]]]:
    """The ids of each text, or of each of its non-empty sentences, without begin or end tokens."""
    split = [split_sentences(text) if sentences else [text] for text in texts]
    encoded = iter(tokenizer.encode_batch([sequence for document in split for sequence in document]))
    for document in split:
        sequences = [next(encoded) for _ in document]
        yield [ids for ids in sequences if ids] if sentences else sequences
