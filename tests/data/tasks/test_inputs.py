"""Pairs and exams: every token of a sample against the texts, and what is cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_records import SPECIAL, letters, read, real_tokenizer

from megajax.core.batch import IGNORED, choice_form, classes_form
from megajax.core.errors import UserError
from megajax.data.samples.loader import evaluation_batches
from megajax.data.tasks import inputs
from megajax.data.tasks.inputs import EncodedTexts, ExamInputs, PairInputs, cut_longest_first, with_option
from megajax.data.tasks.records import Exam, Pair
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import wordpiece

TOKENIZER = letters()
GLUE = [("mnli", "MNLI/dev_matched.tsv"), ("qqp", "QQP/dev.tsv")]


def words(row: np.ndarray) -> str:
    return TOKENIZER.decode(row.tolist())


def test_a_pair():
    records = [Pair("0", ("a b c", "d e"), 2), Pair("1", ("a", "b"), None), Pair("2", ("a b c d e f g", "x y z"), 0)]
    samples = PairInputs(records, TOKENIZER, sequence_length=9)
    assert words(samples[0]["tokens"]) == "[CLS] a b c [SEP] d e [SEP] [PAD]"
    assert samples[0]["token_types"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert [int(samples[number]["length"]) for number in range(3)] == [8, 5, 9]
    assert [int(samples[number]["label"]) for number in range(3)] == [2, IGNORED, 0]
    assert words(samples[2]["tokens"]) == "[CLS] a b c [SEP] x y z [SEP]"
    assert samples.counts == {"pairs truncated to 9 tokens": 1}
    assert samples.records is records and samples.form == classes_form()
    (batch,) = evaluation_batches(samples, rows=range(4), global_batch=4)
    assert batch["label"].tolist() == [2, IGNORED, 0, IGNORED] and batch["tokens"].dtype == np.int32


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 50))
def test_the_longer_text_is_cut(length_a, length_b, room):
    """A token at a time from the longer one; of equal ones the one that was longer at first is cut last."""
    a, b = length_a, length_b
    while a + b > room:
        a, b = (a - 1, b) if a > b or (a == b and length_a <= length_b) else (a, b - 1)
    found = cut_longest_first(np.array([length_a]), np.array([length_b]), room)
    assert (int(found[0][0]), int(found[1][0])) == (a, b)


@pytest.mark.parametrize(
    ("question", "expected"),
    [("a _ b", "a x b"), ("a ___ b _.", "a x b x."), ("what?", "what? x"), ("_", "x"), ("", " x")],
)
def test_an_option_in_its_question(question, expected):
    assert with_option(question, "x") == expected
    assert with_option(question, r"\1_\g") == expected.replace("x", r"\1_\g")  # as it stands


def test_an_exam():
    records = [Exam("0", "q\nr\x0cs t u v", "a _", ("b", "c d e f g h", "i"), 1), Exam("1", "z", "y", ("w", "x"), None)]
    samples = ExamInputs(records, TOKENIZER, sequence_length=10, option_tokens=4)
    first, second = samples[0], samples[1]
    assert [words(row) for row in first["tokens"]] == [
        "[CLS] a b [SEP] q r s t u [SEP]",
        "[CLS] a c d e [SEP] q r s [SEP]",
        "[CLS] a i [SEP] q r s t u [SEP]",
        " ".join(["[PAD]"] * 10),
    ]
    assert first["length"].tolist() == [10, 10, 10, 0] and second["length"].tolist() == [6, 6, 0, 0]
    assert first["token_types"].sum(1).tolist() == [6, 4, 6, 0]
    assert words(second["tokens"][1]) == "[CLS] y x [SEP] z [SEP] [PAD] [PAD] [PAD] [PAD]"
    assert (int(first["label"]), int(second["label"])) == (1, IGNORED)
    assert samples.counts == {
        "questions with an option truncated to 4 tokens": 1,
        "inputs whose article was truncated to 10 tokens": 3,
    }
    assert {name: array.shape for name, array in first.items()} == {
        name: shape[1:] for name, shape in choice_form(4).shapes(1, tokens=10).items()
    }
    short = ExamInputs(records, TOKENIZER, sequence_length=5, option_tokens=128)
    assert words(short[0]["tokens"][1]) == "[CLS] a c [SEP] [SEP]"


def test_texts_are_encoded_once(monkeypatch):
    monkeypatch.setattr(inputs, "_BATCH", 3)
    seen: list[str] = []

    class Watched(Tokenizer):
        def encode_batch(self, texts):
            seen.extend(texts)
            return super().encode_batch(texts)

    texts = ["a b", "", "c", "a b", "d e f", "", "g", "c"]
    found = EncodedTexts(texts, Watched(TOKENIZER.files["tokenizer.json"]))
    assert [TOKENIZER.decode(found[number].tolist()) for number in range(8)] == texts
    assert found.lengths.tolist() == [2, 0, 1, 2, 3, 0, 1, 1]
    assert seen == ["a b", "", "c", "d e f", "g"]
    placed = EncodedTexts(["a  b", "c"], TOKENIZER, with_characters=True)
    assert placed.characters(0).tolist() == [[0, 1], [3, 4]] and placed.characters(1).tolist() == [[0, 1]]
    assert len(EncodedTexts([], TOKENIZER).lengths) == 0


def test_what_does_not_do():
    with pytest.raises(UserError, match=r"--model\.sequence-length 4: too short .*; valid: 5 or more"):
        PairInputs([], TOKENIZER, sequence_length=4)
    with pytest.raises(UserError, match=r"--model\.sequence-length 4: too short"):
        ExamInputs([], TOKENIZER, sequence_length=4, option_tokens=128)
    without = wordpiece({token: number for number, token in enumerate([*SPECIAL[1:], "a"])})
    with pytest.raises(UserError, match=r"no \[PAD\]"):
        ExamInputs([], without, sequence_length=8, option_tokens=8)


@pytest.mark.peer
@pytest.mark.parametrize("length", [24, 31])
@pytest.mark.parametrize(("task", "file"), GLUE)
def test_pairs_as_transformers_cuts_them(test_data, task, file, length):
    transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")
    records = read(task, test_data / "glue" / file).entries[:800]
    theirs = transformers.BertTokenizerFast(vocab=str(test_data / "bert-uncased" / "vocab.txt"))
    texts = [[record.texts[which] for record in records] for which in (0, 1)]
    expected = theirs(*texts, truncation=True, max_length=length, padding="max_length")
    samples = PairInputs(records, real_tokenizer(test_data), sequence_length=length)
    assert len(samples) == len(records) == 800
    found = [samples[number] for number in range(len(samples))]
    for name, key in ("tokens", "input_ids"), ("token_types", "token_type_ids"):
        assert (np.stack([sample[name] for sample in found]) == np.array(expected[key])).all()
    assert [int(sample["length"]) for sample in found] == [sum(mask) for mask in expected["attention_mask"]]
    both = theirs(*texts)["input_ids"]
    assert samples.counts == {f"pairs truncated to {length} tokens": sum(len(ids) > length for ids in both)}
