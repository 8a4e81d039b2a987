"""Sentences of texts, and documents of token ids from them."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megajax.data.text.encoding import encode_documents, encode_texts, split_sentences
from megajax.data.text.tokenizers import train_tokenizer

PROSE = """Emma Woodhouse, handsome, clever, and rich, with a comfortable home
and happy disposition, seemed to unite some of the best blessings
of existence; and had lived nearly twenty-one years in the world
with very little to distress or vex her. She was the youngest of the
two daughters.

CHAPTER II

Mr. Weston was a native of Highbury.  He paid No. 27 $3.50, i.e. too much! Why?
"""


def test_prose():
    """Wrapped lines are joined, abbreviations end nothing, blank lines end a sentence."""
    first, *rest = split_sentences(PROSE)
    assert first == " ".join(PROSE.partition(" She was")[0].split())
    assert rest == [
        "She was the youngest of the two daughters.",
        "CHAPTER II",
        "Mr. Weston was a native of Highbury.",
        "He paid No. 27 $3.50, i.e. too much!",
        "Why?",
    ]


def test_lines_that_were_not_wrapped():
    """A line that is longer than any that is wrapped, or had room for the next word, ends a sentence."""
    assert split_sentences("Contents\nFirst words\nA part that is much longer than these") == [
        "Contents",
        "First words",
        "A part that is much longer than these",
    ]
    long = "word " * 40
    assert split_sentences(f"{long}\n{long}end. More\r\nLast") == [long.strip(), f"{long}end.", "More", "Last"]


def without_losses(text: str) -> list[str]:
    """Sentences of a text, which lose nothing but white space."""
    sentences = split_sentences(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    return sentences


@given(st.text(st.sampled_from("ab .!?\"'()\n\r\t“”…A1é。\u200b"), max_size=300))
def test_any_text(text):
    assert all(sentence and sentence == sentence.strip() for sentence in without_losses(text))


def test_odd_texts():
    """A long line is looked at in parts; one quotation mark in it is never closed."""
    for text in ("", " \n\t\n ", "\x00", "...", '"', "a", "。", "\u2028", "\ud7ff\ue000"):
        without_losses(text)
    assert len(without_losses('He said "yes. ' + "This is a sentence of words. " * 5000)) > 4800
    assert len(split_sentences("x" * 100_000)[0]) > 1000


def test_documents_of_sentences():
    texts = ["First one. Second one. \x00", "\x00", "Only one"]
    tokenizer = train_tokenizer(texts * 9, 120, "wordpiece")
    found = list(encode_documents(texts, tokenizer, sentences=True))
    assert [[tokenizer.decode(ids) for ids in document] for document in found] == [
        ["first one.", "second one."],
        ["only one"],
    ]
    assert all(ids.dtype == np.int32 for document in found for ids in document)
    whole = [ids for (ids,) in encode_documents(texts, tokenizer)]
    assert [ids[-1] for ids in whole] == [tokenizer.end_of_text] * 3
    assert [len(document) for document in encode_texts(texts, tokenizer, sentences=True)] == [2, 0, 1]


def test_wikitext(test_data):
    text = (test_data / "wikitext-103" / "wiki.test.tokens").read_text()
    sentences = [sentence for sentence in split_sentences(text) if not sentence.startswith("=")]
    ended = sum(bool(re.search(r"[.!?:;…][\"'”’)\] ]*$", sentence)) for sentence in sentences)
    assert 8000 < len(sentences) < 11_000 and ended > 0.95 * len(sentences)
