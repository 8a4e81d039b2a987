"""Which words of LAMBADA are predicted, and what broken passages say."""

import json
import math

import pytest

from megajax.core.errors import UserError
from megajax.data.text.tokenizers import train_tokenizer
from megajax.evaluation.pretrained import last_word_figures, read_lambada, split_last_word
from megajax.evaluation.scoring import Continuation


def test_the_real_passages(gpt2_tokenizer, test_data):
    file = test_data / "lambada" / "lambada_test.jsonl"
    passages = read_lambada(str(file), gpt2_tokenizer)
    assert len(passages) == 5153
    assert sum(len(ids) - first > 1 for ids, first in passages) == 1140
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    for text, (ids, first) in [*zip(texts, passages, strict=True)][::50]:
        assert gpt2_tokenizer.decode(ids[first:]) == " " + text.split()[-1]
        assert ids == gpt2_tokenizer.encode(" ".join(split_last_word(text)))


@pytest.mark.parametrize(
    ("text", "context", "word"),
    [("a b  c", "a b", "c"), ("a b\n\nc. \n", "a b", "c."), ("c b c", "c b", "c"), ("alone ", "", "alone")],
)
def test_the_last_word(text, context, word):
    assert split_last_word(text) == (context, word)


def test_figures():
    """A word counts as right as a whole; the perplexity is per word."""
    words = [Continuation(-1.0, True), Continuation(-2.0, False), Continuation(-6.0, False)]
    found = last_word_figures(words)
    assert (found["accuracy"], found["loss"]) == (pytest.approx(1 / 3), pytest.approx(3))
    assert found["perplexity"] == pytest.approx(math.exp(3))
    assert last_word_figures([Continuation(-1e4, False)])["perplexity"] == math.inf


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("bad.jsonl", '{"text": "a b"}\n\n{"txt": "a b"}\n', r'bad\.jsonl:3: no text under the key "text"'),
        ("bad.jsonl", '{"text": "a b"}\n{"text": "alone"}\n', r"--data .*bad\.jsonl:2: the passage is a single word"),
        ("empty.jsonl", "", r"--data: .*empty\.jsonl contains no text"),
        ("plain.txt", "a b", r"--data .*plain\.txt'; valid: a \.jsonl file"),
    ],
)
def test_broken_files(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=problem) as caught:
        read_lambada(str(tmp_path / name), train_tokenizer(["text"], 300))
    assert "\n" not in str(caught.value)
    for path, problem in (tmp_path / "no.jsonl", r": .*no\.jsonl does not exist"), ("", r" ''; valid: a \.jsonl file"):
        with pytest.raises(UserError, match=f"--data{problem}"):
            read_lambada(str(path), train_tokenizer(["text"], 300))
