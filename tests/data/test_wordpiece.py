"""BERT's published ids, learning a vocabulary, and what a broken one says."""

import pytest

from megajax.data.tokenizers import is_tokenizer_folder, load_tokenizer, train_tokenizer
from megajax.errors import UserError

CORPUS = [f"The quick brown fox number {n % 13} jumped over {n % 7} lazy dogs, unbelievably." for n in range(300)]


def test_ids_of_bert_uncased(test_data):
    tokenizer = load_tokenizer(test_data / "bert-uncased")
    assert (tokenizer.size, tokenizer.end_of_text) == (30522, 102)
    assert tokenizer.encode("Hello WORLD") == [7592, 2088]
    assert tokenizer.encode("one[SEP]two") == [2028, 102, 2048]
    assert tokenizer.decode(tokenizer.encode("Hello, WORLD! unaffable")) == "hello, world! unaffable"


def test_learned_and_saved(tmp_path):
    tokenizer = train_tokenizer(CORPUS, 150, "wordpiece")
    assert 100 < tokenizer.size <= 150 and tokenizer.end_of_text == 3
    assert tokenizer.decode(tokenizer.encode("The LAZY fox")) == "the lazy fox"
    assert tokenizer.encode_batch(["fox", "dogs"]) == [tokenizer.encode("fox"), tokenizer.encode("dogs")]
    tokenizer.save(tmp_path)
    assert is_tokenizer_folder(tmp_path)
    again = load_tokenizer(tmp_path)
    assert [again.encode(text) for text in CORPUS] == [tokenizer.encode(text) for text in CORPUS]
    assert [train_tokenizer(CORPUS, 150, "wordpiece").encode(text) for text in CORPUS] == [
        tokenizer.encode(text) for text in CORPUS
    ]


def test_upper_case_letters_in_the_vocabulary_are_kept(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[SEP]\nFox\nfox\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Fox fox FOX") == [3, 4, 1]
    tokenizer.save(tmp_path)  # from here on what tokenizer.json says decides
    assert load_tokenizer(tmp_path) == tokenizer


@pytest.mark.parametrize(
    "content, problem",
    [
        ("[UNK]\nfox\n", r"no \[SEP\] token"),
        ("[UNK]\n[SEP]\nfox\nfox\n", "'fox' stands there twice"),
        (b"\xff\n", "not UTF-8"),
        ("", r"no \[UNK\] and no \[SEP\] token"),
    ],
)
def test_broken_vocabulary(tmp_path, content, problem):
    (tmp_path / "vocab.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=problem):
        load_tokenizer(tmp_path)


def test_too_small_a_vocabulary():
    with pytest.raises(UserError, match="--vocab-size 20; valid: 100 or more"):
        train_tokenizer(CORPUS, 20, "wordpiece", flag="--vocab-size")
