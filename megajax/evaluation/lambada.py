"""LAMBADA: predict the last word of a passage, each subword from the text before it (paper §5.3)."""

import math
from collections.abc import Sequence
from pathlib import Path

from megajax.data.records import TextDocuments
from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.evaluation.perplexity import exponential
from megajax.evaluation.scoring import Continuation


def read_lambada(path: str, tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Ids of every passage, and the index at which its last word begins, for `score_continuations`.

    The last word is what follows the last white space, and is encoded with a space before it.
    """
    if Path(path).suffix.lower() != ".jsonl":
        raise UserError(f"--data {path!r}; valid: a .jsonl file of passages, such as lambada_test.jsonl")
    contexts, words = [], []
    for place, text in TextDocuments(path, flag="--data").placed():
        context, word = split_last_word(text)
        if not context:
            raise UserError(f"--data {place}: the passage is one word; valid: a last word and text before it")
        contexts.append(context)
        words.append(" " + word)
    before = [tokenizer.with_begin(context) for context in tokenizer.encode_batch(contexts)]
    pairs = zip(before, tokenizer.encode_continuations(words), strict=True)
    return [(context + word, len(context)) for context, word in pairs]


def split_last_word(text: str) -> tuple[str, str]:
    """The text before the last word, without the white space between them, and the word."""
    word = text.split()[-1]
    return text.rstrip().removesuffix(word).rstrip(), word


def last_word_figures(words: Sequence[Continuation]) -> dict[str, float]:
    """The figures of at least one last word.

    `accuracy` is the share of words whose every subword is the most probable one, `loss` the mean cross-entropy of a
    word in nats, `perplexity` that per word.
    """
    loss = -math.fsum(word.log_probability for word in words) / len(words)
    accuracy = sum(word.greedy for word in words) / len(words)
    return {"accuracy": accuracy, "perplexity": exponential(loss), "loss": loss}
