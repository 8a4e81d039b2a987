"""Windows over contexts: what is in them, the answers' labels, and both against Hugging Face's tokenizer."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_records import SPECIAL, SQUAD1, SQUAD2, letters, real_tokenizer, squad

from megajax.core.batch import IGNORED, span_form
from megajax.core.errors import UserError
from megajax.data.tasks.records import NOT_THERE, Answer, Question
from megajax.data.tasks.registry import TaskConfig
from megajax.data.tasks.windows import SpanWindows
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import wordpiece

TOKENIZER = letters()
CONTEXT = "a b c d e f g h"


def windows(records, length, stride, *, training=True, question_tokens=0) -> SpanWindows:
    config = TaskConfig(doc_stride=stride, question_tokens=question_tokens)
    return SpanWindows(records, TOKENIZER, sequence_length=length, config=config, training=training)


def words(sample) -> str:
    return TOKENIZER.decode(sample["tokens"][: int(sample["length"])].tolist())


def spans(samples) -> list[tuple[int, int]]:
    return [(int(samples[number]["start"]), int(samples[number]["end"])) for number in range(len(samples))]


def test_windows_and_labels():
    records = [
        Question("one", "  x y", CONTEXT, (Answer("c d", 4), Answer("h", 14))),
        Question("none", "x", "a b", ()),
        Question("short", "x", "a b c", (Answer("b c", 2),)),
        Question("last", "x y", CONTEXT, (Answer("d e", 6),)),  # begins with the last token of a window
    ]
    samples = windows(records, 9, 2)
    assert [words(samples[number]) for number in range(3)] == [
        "[CLS] x y [SEP] a b c d [SEP]",
        "[CLS] x y [SEP] c d e f [SEP]",
        "[CLS] x y [SEP] e f g h [SEP]",
    ]
    assert samples.owners.tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    assert samples[3]["token_types"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert spans(samples) == [(6, 7), (4, 5), (0, 0), (0, 0), (4, 5), (0, 0), (5, 6), (0, 0)]
    place, characters = samples.characters(1)
    assert (place, characters.tolist()) == (4, [[4, 5], [6, 7], [8, 9], [10, 11]])
    assert samples.counts == {} and samples.records == records and samples.form == span_form()
    shapes = {name: shape[1:] for name, shape in span_form().shapes(1, tokens=9).items()}
    assert {name: array.shape for name, array in samples[0].items()} == shapes
    assert all(array.dtype == np.int32 for array in samples[0].values())


def test_answers_that_cannot_be_placed():
    """They are left out of training; on dev they have no label."""
    known = Question("known", "x", CONTEXT, (Answer("b", 2),))
    odd = dataclasses.replace(known, name="away", answers=(Answer("b", NOT_THERE), Answer("b", 2)))
    samples = windows([odd, known, odd], 20, 2)
    assert samples.records == [known] and samples.owners.tolist() == [0] and spans(samples) == [(4, 4)]
    assert samples.counts == {"questions whose answer is not in the context, left out": 2}
    dev = windows([odd, known, odd], 20, 2, training=False)
    assert spans(dev) == [(IGNORED, IGNORED), (4, 4), (IGNORED, IGNORED)]
    assert dev.counts == {} and len(dev.records) == 3
    long = windows([dataclasses.replace(known, answers=(Answer(CONTEXT, 0),)), known], 9, 2)
    assert spans(long)[:2] == [(0, 0), (0, 0)] and spans(long).count((4, 4)) == 1
    assert long.counts == {"questions whose answer does not fit into any window": 1}
    blank = windows([Question("blank", "x", " a", (Answer(" a", 0),)), Question("empty", "x", "", ())], 9, 2)
    assert spans(blank) == [(0, 0), (0, 0)] and words(blank[1]) == "[CLS] x [SEP] [SEP]"
    assert list(blank.counts.values()) == [1]


def test_tokens_of_one_character():
    """A Korean syllable is three tokens of the same character. As the example has it, the answer begins with the last
    one in the window, and ends with the first."""
    tokens = [*SPECIAL, "x", "\u1112", "##\u1161", "##\u11ab"]
    tokenizer = wordpiece({token: number for number, token in enumerate(tokens)})
    record = Question("one", "x", "\ud55c", (Answer("\ud55c", 0),))
    samples = SpanWindows([record], tokenizer, sequence_length=6, config=TaskConfig(doc_stride=1), training=True)
    assert [samples.characters(number)[1].tolist() for number in (0, 1)] == [[[0, 1]] * 2] * 2
    assert spans(samples) == [(4, 3), (4, 3)]


def test_questions_are_cut():
    samples = windows([Question("one", "x y z", "a b", (Answer("b", 2),))], 9, 2, question_tokens=2)
    assert words(samples[0]) == "[CLS] x y [SEP] a b [SEP]" and spans(samples) == [(5, 5)]
    assert samples.counts == {"questions truncated to 2 tokens": 1} and samples.characters(0)[0] == 4


@given(st.integers(1, 6), st.integers(0, 30), st.integers(13, 40), st.integers(1, 3))
def test_windows_cover_the_context(question, context, length, stride):
    """Each but the last is full, and begins where the one before has so many tokens left."""
    record = Question("one", "x " * question, "a " * context, ())
    samples = windows([record], length, stride)
    found = [samples.characters(number)[1][:, 0] // 2 for number in range(len(samples))]
    room = length - 3 - question
    assert all(len(tokens) == room for tokens in found[:-1]) and len(found[-1]) <= room
    for before, after in itertools.pairwise(found):
        assert (after[:stride] == before[-stride:]).all() and before[-1] < after[-1]
    assert np.array_equal(np.unique(np.concatenate(found)), np.arange(context))


@pytest.mark.parametrize(("question", "stride", "length"), [("x " * 6, 1, 9), ("x " * 3, 3, 9), ("x " * 4, 2, 9)])
def test_no_room(question, stride, length):
    fits = Question("fits", question, "a" if len(question) < 12 else "", ())
    windows([fits], length, stride)
    pattern = (
        r"^question long has .*; valid: .*--task\.doc-stride.*--task\.question-tokens.*--model\.sequence-length 9$"
    )
    with pytest.raises(UserError, match=pattern):
        windows([fits, Question("long", question, CONTEXT, ())], length, stride)
    assert len(windows([Question("long", question, CONTEXT, ())], length, 1, question_tokens=2)) > 1


WINDOWS = [(SQUAD1, 128, 32, slice(0, 400)), (SQUAD2, 200, 128, slice(300, 500))]
WINDOWS += [
    pytest.param(file, length, length // 4 if length < 100 else 128, slice(None), marks=pytest.mark.full)
    for file, length in ((SQUAD1, 384), (SQUAD1, 96), (SQUAD2, 96))
]


@pytest.mark.peer
@pytest.mark.parametrize(("file", "length", "stride", "part"), WINDOWS)
def test_windows_as_transformers_makes_them(test_data, file, length, stride, part):
    """Every window's tokens, types, characters and label, these as the example finds them, by its two loops.

    Where an answer begins with the last token of a window, the example's loop goes on over [SEP] and the padding, whose
    characters are 0: its label is behind the window then, ours that last token.
    """
    transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")
    theirs = transformers.BertTokenizerFast(vocab=str(test_data / "bert-uncased" / "vocab.txt"))
    records = squad(test_data / file)[part]
    config = TaskConfig(doc_stride=stride)
    samples = SpanWindows(records, real_tokenizer(test_data), sequence_length=length, config=config, training=True)
    expected = theirs(
        [record.text.lstrip() for record in records],
        [record.context for record in records],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length",
    )
    assert samples.owners.tolist() == expected["overflow_to_sample_mapping"] and len(samples) > len(records)
    behind = 0
    for number, owner in enumerate(samples.owners):
        sample, offsets = samples[number], expected["offset_mapping"][number]
        assert sample["tokens"].tolist() == expected["input_ids"][number]
        assert sample["token_types"].tolist() == expected["token_type_ids"][number]
        assert int(sample["length"]) == sum(expected["attention_mask"][number])
        of_context = [place for place, which in enumerate(expected.sequence_ids(number)) if which == 1]
        first, last = of_context[0], of_context[-1]
        place, characters = samples.characters(number)
        assert place == first and [tuple(pair) for pair in characters.tolist()] == offsets[first : last + 1]
        start = end = 0
        if records[owner].answers:
            answer = records[owner].answers[0]
            begin, stop = answer.start, answer.start + len(answer.text)
            if offsets[first][0] <= begin and offsets[last][1] >= stop:
                start, end = first, last
                while start < len(offsets) and offsets[start][0] <= begin:
                    start += 1
                while offsets[end][1] >= stop:
                    end -= 1
                start, end = start - 1, end + 1
        if start > last:
            assert offsets[last][0] <= begin and start == length - 1
            behind, start = behind + 1, last
        assert (int(sample["start"]), int(sample["end"])) == (start, end)
    if part == slice(None):
        assert (behind > 0) == (length == 96)  # few enough that labels are else the example's


def test_characters_of_odd_text(test_data):
    """Accents, characters that vanish, Chinese, emoji: every token has characters, and they are its own."""
    tokenizer: Tokenizer = real_tokenizer(test_data)
    text = "\u200bNaïve fiance\u0301\x00s\x0c 中文 👍🏽 ze\ufeffro \u0130stanbul 한국 End."
    ((ids, offsets),) = tokenizer.encode_batch_with_offsets([text])
    assert ids == tokenizer.encode(text)
    assert all(end > start for start, end in offsets) and offsets == sorted(offsets)
    places = {tokenizer.decode([token]): text[start:end] for token, (start, end) in zip(ids, offsets, strict=True)}
    expected = {"naive": "Naïve", "中": "中", "zero": "ze\ufeffro", "istanbul": "\u0130stanbul", "end": "End", ".": "."}
    assert expected.items() <= places.items() and text[slice(*offsets[-2])] == "End"
