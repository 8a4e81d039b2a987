"""Text on its way to the terminal: whole characters only, in the prompts' order, all of it in the end."""

import pytest

from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import train_tokenizer
from megajax.generation.text import Screen, TextStream, continuation_text

TEXT = "naïve 漢字 — 𝒻ancy\nend"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte of a character is a token of its own."""
    return train_tokenizer(["abab abab"], 260)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_character_is_cut(tokenizer, size):
    """What is shown is at any time the start of the text; nothing waits longer than its character."""
    ids, stream, shown = tokenizer.encode(TEXT), TextStream(tokenizer, tokenizer.encode("before")), ""
    for start in range(0, len(ids), size):
        shown += stream.add(ids[start : start + size])
        seen = len(tokenizer.decode(ids[: start + size]).rstrip("\ufffd"))
        assert shown == TEXT[:seen]
    assert shown + stream.end() == TEXT


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_words_that_go_on_are_one(size):
    """WordPiece tokens look by what stands before them."""
    tokenizer = train_tokenizer(["The quick brown foxes jumped unbelievably. " * 3] * 20, 100, "wordpiece")
    ids = tokenizer.encode("the unbelievable foxes, quick and brown; jumping over quicker boxes")
    start, rest = ids[:3], ids[3:]
    stream = TextStream(tokenizer, start)
    shown = "".join(stream.add(rest[number : number + size]) for number in range(0, len(rest), size))
    assert tokenizer.decode(start) + shown == tokenizer.decode(ids)
    assert continuation_text(tokenizer, start, rest) == shown


def test_bytes_that_are_no_character_are_shown_in_the_end(tokenizer):
    first = tokenizer.encode("漢")[:1]
    ids = [*first, *tokenizer.encode("a"), *first, *first]
    stream = TextStream(tokenizer, [])
    shown = "".join(stream.add([token]) for token in ids)
    assert shown == "\ufffda"
    assert shown + stream.end() == tokenizer.decode(ids)


def test_texts_come_in_order(tokenizer, capsys):
    """The second one is finished first, and waits for the first one's end."""
    screen = Screen(tokenizer, ["one", "two", "three"], [[], [], []])
    a, b = tokenizer.encode("a"), tokenizer.encode("b")
    screen.add(1, b, finished=True)
    screen.add(0, a, finished=False)
    assert capsys.readouterr().out == "--- 1 of 3\nonea"
    screen.add(2, a, finished=False)
    screen.add(0, [], finished=True)
    assert capsys.readouterr().out == "\n--- 2 of 3\ntwob\n--- 3 of 3\nthreea"
    screen.add(2, tokenizer.encode("漢")[:2], finished=True)
    assert capsys.readouterr().out == "\ufffd\n"
