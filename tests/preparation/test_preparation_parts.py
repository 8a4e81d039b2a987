"""Cleaning, signatures and test-set grams against their definitions; and how many workers a machine gives."""

import os

import ftfy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.core.errors import UserError
from megajax.host.children import num_cores
from megajax.preparation.cleaning import clean
from megajax.preparation.contamination import TestSets, _placed_words, _words, decontaminated
from megajax.preparation.duplicates import HASHES, band_hashes, bands_for
from megajax.preparation.similarity import gram_set, jaccard, normalised


@given(st.text(alphabet=st.one_of(st.characters(codec="ascii"), st.sampled_from("éÃ©ﬁ’“…\u2028&<>;amp"))))
def test_repair_is_ftfy(text):
    repaired = ftfy.fix_text(text)
    assert clean(text, fix_unicode=True, clean_newlines=False) == ("" if repaired.isspace() else repaired)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("a \t\nb", "a\nb"),
        ("\n\na\n\n\n\n\nb\n", "a\n\nb"),
        ("a\n \n \n\nb", "a\n\nb"),
        ("  indented\n\tcode", "  indented\n\tcode"),
        (" \n\t", ""),
        ("", ""),
    ],
)
def test_newlines(text, expected):
    assert clean(text, fix_unicode=False, clean_newlines=True) == expected


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.95])
def test_bands_find_pairs_at_the_threshold(threshold):
    bands, rows = bands_for(threshold)
    recall = lambda rows: 1 - (1 - threshold**rows) ** (HASHES // rows)  # noqa: E731
    assert bands == HASHES // rows and (recall(rows) >= 0.95 or rows == 1) and recall(rows + 1) < 0.95


def test_bands_agree_as_often_as_they_should():
    """Share of equal band hashes of random pairs, against similarity to the power of the rows."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    rows = bands_for(0.7)[1]
    for changed in (0, 10, 30, 80):
        agree, expected = [], []
        for _ in range(60):
            one = rng.choice(letters, 1000)
            other = one.copy()
            places = rng.choice(1000, changed, replace=False)
            other[places] = rng.choice(letters, changed)
            texts = "".join(one), "".join(other)
            hashes = band_hashes(texts, 0.7)
            agree.append((hashes[:, 0] == hashes[:, 1]).mean())
            expected.append(jaccard(*map(gram_set, texts)) ** rows)
        assert np.mean(agree) == pytest.approx(np.mean(expected), abs=0.03)


@given(st.lists(st.text(max_size=30), max_size=6))
def test_hashes_of_a_text_do_not_depend_on_its_neighbours(texts):
    together = band_hashes(texts, 0.7)
    for number, text in enumerate(texts):
        assert (band_hashes([text], 0.7)[:, 0] == together[:, number]).all()


def test_texts_shorter_than_a_gram():
    hashes = band_hashes(["", "ab", "ab", "abc", "abcde"], 0.7)
    assert (hashes[:, 1] == hashes[:, 2]).all()
    assert all((hashes[:, 1] != hashes[:, other]).any() for other in (0, 3, 4))
    assert gram_set("ab") == {"ab"} and jaccard(gram_set("ab"), gram_set("abc")) == 0
    assert normalised("  Two\n\tWORDS\u00a0é ") == "two words é"


@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=14), max_size=4),
    st.lists(st.sampled_from("abcd"), max_size=30),
)
def test_grams_of_test_sets(documents, words):
    tests = TestSets.collect([[" ".join(words) for words in documents], ["no gram"]])
    grams = {tuple(words[start : start + 8]) for words in documents for start in range(len(words) - 7)}
    assert [len(members) for members in tests.members] == [len(grams), 0] and len(tests.grams) == len(grams)
    found = tests.found_in(" ".join(words).upper() + " !")
    assert len(found) == len(grams & {tuple(words[start : start + 8]) for start in range(len(words) - 7)})


@given(st.text(alphabet=st.sampled_from("abΣİ e\u0301\u0323ﬁ今\uff21¨\u1100\u1161\u11a8.-\u2003\n"), max_size=60))
def test_words_are_found_where_they_stand(text):
    placed = list(_placed_words(text))
    assert [word for word, _, _ in placed] == _words(text)
    for word, begin, end in placed:
        alone = [each.replace("ς", "σ") for each in _words(text[begin:end])]  # a sigma's form depends on what follows
        assert word.replace("ς", "σ") in alone and text[begin:end].strip() == text[begin:end]


def test_passages_are_cut_out_as_in_gpt3():
    """With 200 characters at both sides, whole words; pieces under 200 characters and what would be in over 10 go."""
    gram, text = "one two three four five six seven eight", "lorem ipsum " * 50
    tests = TestSets.collect([[gram]])
    cut = lambda text, how="passage": decontaminated(text, tests, how)[0]  # noqa: E731
    left, right = cut(f"{text}{gram.upper()}. {text}")
    assert text.startswith(left) and 200 <= len(text) - len(left) < 220
    assert text.strip().endswith(right) and 200 <= len(f". {text}") - len(right) < 220
    assert len(cut(f"{text}{gram} {gram} words {gram} {text}")) == 2, "grams that are near are one passage"
    assert cut(f"{text}{gram} {text[:399]}") == [left] and len(cut(f"{gram} {text}")) == 1
    assert cut(f"{gram} {text[:390]}") == [] and cut(text) == [text] and cut(gram, "report") == [gram]
    assert len(cut(f"{gram} {text}{text}" * 9)) == 9 and cut(f"{gram} {text}{text}" * 10) == []
    assert cut(f"{text}{gram}", "document") == []


def test_scripts_without_spaces_have_a_word_a_character():
    tests = TestSets.collect([["今天天气很好我们去公园", "ab 今天天气很好我", "seven words are not enough for that"]])
    assert len(tests.grams) == 4 + 1 and tests.too_short == [1]
    assert tests.found_in("他说：今天天气，很好我们！").tolist() == [0]


@pytest.mark.parametrize(
    ("test_set", "num_grams", "found"),
    [
        (
            "où l\u2019été fleurit ﬁnit l\u2019hiver déjà là ＡＢＣ",
            3,
            {"o\u0300u l e\u0301t\u00e9? fleurit finit: l hiver de\u0301ja\u0300 là abc": [1, 2]},
        ),
        (
            "One two, three four five -- six (seven) eight nine.",
            2,
            {"zero ONE TWO THREE; four\nfive six seven Eight ten": [0], "one two three four five six seven": []},
        ),
    ],
)
def test_forms_of_letters_punctuation_and_case_do_not_hide_a_gram(test_set, num_grams, found):
    tests = TestSets.collect([[test_set]])
    assert len(tests.grams) == num_grams
    assert {text: tests.found_in(text).tolist() for text in found} == found


@pytest.mark.parametrize(("cores", "expected"), [(6, 6), (None, 1)])
def test_cores_where_the_system_tells_no_affinity(monkeypatch: pytest.MonkeyPatch, cores, expected) -> None:
    """As on macOS: all cores, or one if nobody knows."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert num_cores() == expected


def test_compressed_test_sets_are_not_unpacked(tmp_path):
    with (tmp_path / "a.npz").open("wb") as file:
        TestSets.collect([["one two three four five six seven eight"]]).save(file)
    with np.load(tmp_path / "a.npz") as arrays:
        np.savez_compressed(tmp_path / "bomb.npz", **arrays)
    with pytest.raises(UserError, match=r"bomb.npz: damaged; valid: --overwrite, which starts over"):
        TestSets.load(tmp_path / "bomb.npz")
