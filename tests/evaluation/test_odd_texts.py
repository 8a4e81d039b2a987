"""Texts that the evaluations refuse or score in an unusual way."""

import gzip
import json

import pytest

from megajax.data.tokenizers import train_tokenizer
from megajax.errors import UserError
from megajax.evaluation.lambada import LastWords, read_lambada
from megajax.evaluation.scoring import Continuation
from megajax.evaluation.wikitext import read_wikitext

TOKENIZER = train_tokenizer(["one two three four five six"] * 5, 270)


def test_wikitext_is_one_text(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("one two", "three four five"))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for path in str(tmp_path / "a.jsonl.gz"), "python-stdlib", str(tmp_path):
        with pytest.raises(UserError, match="valid: one file of plain text"):
            read_wikitext(path, TOKENIZER)


def test_a_passage_of_one_word_is_named_by_its_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one two three"}\n\n{"text": "word"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:3: the passage is one word"):
        read_lambada(str(file), TOKENIZER)


def test_a_perplexity_without_end_is_infinite():
    assert LastWords.of([Continuation(-1e4, False)]).perplexity == float("inf")
