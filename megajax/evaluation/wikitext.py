"""WikiText-103 as the Megatron paper evaluates it: perplexity per word of the original text (paper §5.3)."""

import itertools
import re
from pathlib import Path

import numpy as np

from megajax.data.records import TextDocuments
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokens import TokenDocuments
from megajax.errors import UserError

# The corpus is cut in words, with spaces around punctuation. Replacements that undo this, in this order:
_WORDS = [("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")]
_MARKS = [(f" {mark} ", f"{mark} ") for mark in ":;.!?,"]
_PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]  # no spaces just inside
_REST = [("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°")]
_REST += [(" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]


def read_wikitext(path: str, tokenizer: Tokenizer) -> tuple[int, TokenDocuments]:
    """The file `wiki.test.tokens`, or another text in its form.

    Returns its words and punctuation marks, the paper's T_o, and the subwords of the text without its word tokenization
    as one document.
    """
    refusal = UserError(f"--data {path!r}; valid: one file of plain text, such as wiki.test.tokens")
    if Path(path).is_dir() or Path(path).suffix.lower() == ".jsonl":  # "" is a folder, the current one
        raise refusal
    text, *more = itertools.islice(TextDocuments(path, cut=False, flag="--data"), 2)
    if more:
        raise refusal
    ids = np.array(tokenizer.with_begin(tokenizer.encode(detokenize(text))), np.int32)
    return len(text.strip().split(" ")), TokenDocuments.from_sequences([[ids]], path)


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
