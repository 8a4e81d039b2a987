"""Texts to token ids: a document as one sequence that ends with the end of text, or as one sequence a sentence."""

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
    """The sequences of each document, ids int32 [length]: one, end-of-text last, or its sentences as they are.

    A sentence without a token is left out, and so is a document without a sentence.
    """
    for texts in in_parts(documents, _BATCH_CHARACTERS):
        if not sentences:
            for ids in tokenizer.encode_batch(texts):
                yield [np.array([*ids, tokenizer.end_of_text], np.int32)]
            continue
        for document in encode_sentences(texts, tokenizer):
            if document:
                yield [np.array(ids, np.int32) for ids in document]


def encode_sentences(texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    """The ids of every sentence of each text; sentences without a token are left out."""
    split = [split_sentences(text) for text in texts]
    encoded = iter(tokenizer.encode_batch([sentence for document in split for sentence in document]))
    for document in split:
        yield [ids for _ in document if (ids := next(encoded))]
