"""WikiText-103 as the Megatron paper evaluates it: perplexity per word of the original text (paper §5.3)."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megajax.data.gpt import EvaluationSamples
from megajax.data.text import TextDocuments
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokens import TokenDocuments
from megajax.errors import UserError

# The corpus is cut in words, with spaces around punctuation. Replacements that undo this, in this order:
_WORDS = [("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")]
_MARKS = [(f" {mark} ", f"{mark} ") for mark in ":;.!?,"]
_PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]  # no spaces just inside
_REST = [("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°")]
_REST += [(" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]


@dataclass(frozen=True)
class WikiText:
    """A test text."""

    original_tokens: int  # words and punctuation marks of the text in the file, the paper's T_o
    ids: list[int]  # subwords of the text without its word tokenization
    name: str  # the file

    def samples(self, sequence_length: int, overlap: int) -> EvaluationSamples:
        """Windows over the text."""
        documents = TokenDocuments.from_documents([np.array(self.ids, np.int32)], self.name)
        return EvaluationSamples(documents, sequence_length=sequence_length, overlap=overlap)


def read_wikitext(path: str, tokenizer: Tokenizer) -> WikiText:
    """The file `wiki.test.tokens`, or another text in its form."""
    refusal = UserError(f"--data {path!r}; valid: one file of plain text, such as wiki.test.tokens")
    if Path(path).is_dir() or Path(path).suffix.lower() == ".jsonl":  # "" is a folder, the current one
        raise refusal
    text, *more = itertools.islice(TextDocuments(path, cut=False, flag="--data"), 2)
    if more:
        raise refusal
    return WikiText(len(text.strip().split(" ")), tokenizer.with_begin(tokenizer.encode(detokenize(text))), path)


def detokenize(text: str) -> str:
    """The text as it was written, without the spaces that the corpus puts around punctuation."""
    for spaced, plain in (*_WORDS, *_MARKS):
        text = text.replace(spaced, plain)
    for opening, closing in _PAIRS:
        inner = rf"\s*([^{re.escape(closing)}]*?)\s*"
        text = re.sub(re.escape(opening) + inner + re.escape(closing), rf"{opening}\1{closing}", text)
    for spaced, plain in _REST:
        text = text.replace(spaced, plain)
    return text
