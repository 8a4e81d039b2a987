"""GPT-2's and BERT's published ids, training, and what a broken tokenizer folder says."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_tokenizers import write_pair

from megajax.core.errors import UserError
from megajax.data.text.tokenizer import END_OF_TEXT
from megajax.data.text.tokenizers import is_tokenizer_folder, load_tokenizer, train_tokenizer

CORPUS = [f"def function_{n % 7}(argument):\n    return argument + {n}  # größer\n" for n in range(200)]
SENTENCES = [f"The quick brown fox number {n % 13} jumped over {n % 7} lazy dogs, unbelievably." for n in range(300)]
SMALL = train_tokenizer(CORPUS, 300)


def test_gpt2_ids(gpt2_tokenizer, test_data):
    assert (gpt2_tokenizer.size, gpt2_tokenizer.end_of_text) == (50257, 50256)
    assert gpt2_tokenizer.encode("Hello world") == [15496, 995]
    assert gpt2_tokenizer.encode("Hello world<|endoftext|>Hello") == [15496, 995, 50256, 15496]
    assert gpt2_tokenizer.encode(" Hello") == [18435]
    assert gpt2_tokenizer.encode("") == []
    assert gpt2_tokenizer.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    text = (test_data / "wikitext-103" / "wiki.test.tokens").read_text()[:200_000]
    ids = gpt2_tokenizer.encode(text)
    assert gpt2_tokenizer.decode(ids) == text
    assert max(ids) < 50256
    assert len(text) / len(ids) == pytest.approx(4.4, abs=0.3)  # characters per token of English


def test_saved_files_give_the_same_ids(gpt2_tokenizer, tmp_path):
    gpt2_tokenizer.save(tmp_path / "new" / "folder")
    again = load_tokenizer(tmp_path / "new" / "folder")
    text = "Byte-pair encoding, naïve: 12345 ≠ 54321\n\n\tdone"
    assert again.encode(text) == gpt2_tokenizer.encode(text)
    assert (again.size, again.end_of_text) == (gpt2_tokenizer.size, gpt2_tokenizer.end_of_text)
    assert os.listdir(tmp_path / "new" / "folder") == ["tokenizer.json"] and again == gpt2_tokenizer


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8")), max_size=5))
def test_any_texts(texts):
    """They come back, one by one or together, and have as many bytes."""
    encoded = SMALL.encode_batch(texts)
    assert encoded == [SMALL.encode(text) for text in texts] and list(map(SMALL.decode, encoded)) == texts
    ids = [token for text in encoded for token in [*text, SMALL.end_of_text]]
    assert SMALL.num_bytes(np.array(ids, int)) == len("".join(texts).encode())


def test_trained_layout():
    assert (SMALL.size, SMALL.end_of_text, SMALL.encode(END_OF_TEXT)) == (300, 299, [299])
    assert max(SMALL.encode("".join(chr(code) for code in range(0x800)))) < 299
    assert len(SMALL.encode(CORPUS[0])) < len(CORPUS[0]) / 2
    of_a_small_corpus, of_bytes = train_tokenizer(["ab ab"], 1000), train_tokenizer(CORPUS, 257)
    assert (of_a_small_corpus.size, of_a_small_corpus.end_of_text) == (258, 257)  # 256 bytes, "ab", end of text
    assert of_bytes.size == 257 and len(of_bytes.encode("größer")) == 8


def test_training_is_deterministic_across_processes_and_cores(tmp_path):
    script = (
        "import sys; from megajax.data.text.records import TextDocuments\n"
        "from megajax.data.text.tokenizers import train_tokenizer\n"
        "train_tokenizer(list(TextDocuments('python-stdlib'))[::100], 1500).save(sys.argv[1])"
    )
    for threads in "1", "4":
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", script, str(tmp_path / threads)], env=environment, check=True)
    assert (tmp_path / "1" / "tokenizer.json").read_bytes() == (tmp_path / "4" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind, size, least", [("bpe", 256, 257), ("wordpiece", 99, 100)])
def test_vocabulary_too_small_to_train(kind, size, least):
    with pytest.raises(UserError, match=rf"--vocab-size {size}; valid: {least} or more"):
        train_tokenizer(CORPUS, size, kind, flag="--vocab-size")


def test_folder_without_tokenizer_and_one_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"--tokenizer\.path: .*nowhere is not a folder; valid: a folder with v"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"--tokenizer\.path: .* has no tokenizer; valid: a folder with vocab\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"--tokenizer\.path: .* has vocab\.json without merges\.txt; valid"):
        load_tokenizer(tmp_path)
    assert not is_tokenizer_folder(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be written"):
        SMALL.save(tmp_path / "file")


def test_two_files_and_one_file_are_the_same_tokenizer(tmp_path):
    """Also with what other versions of the package write beside what decides ids."""
    write_pair(tmp_path, SMALL)
    assert load_tokenizer(tmp_path) == SMALL
    content = json.loads(SMALL.files["tokenizer.json"])
    content["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    content["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    again = load_tokenizer(tmp_path)
    assert again == SMALL and (again.begin, again.end_of_text) == ([], 299)
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path) != SMALL


def _without(*tokens):
    return json.dumps({token: number for token, number in SMALL.vocabulary.items() if token not in tokens})


@pytest.mark.parametrize(
    "name, content, problem",
    [
        ("vocab.json", json.dumps(SMALL.vocabulary)[:-5], "not JSON"),
        ("vocab.json", "\udcff", "not UTF-8"),
        ("vocab.json", "[]", "no byte-level vocabulary; valid: one JSON object"),
        ("vocab.json", json.dumps(SMALL.vocabulary | {"x": "1"}), "no byte-level vocabulary"),
        *(("vocab.json", json.dumps(SMALL.vocabulary | {"x": n}), "no byte-level vocabulary") for n in (-1, 2**40)),
        ("vocab.json", json.dumps(SMALL.vocabulary | {"xyzzy": 0}), "no byte-level vocabulary"),
        ("vocab.json", _without("a", "Ġ"), "no byte-level vocabulary"),
        ("vocab.json", _without(END_OF_TEXT), "no byte-level vocabulary"),
        *(("merges.txt", line, "45: not a merge; valid: two tokens") for line in ("a", "a b c", "q zzz", "Q Z")),
        ("vocab.txt", "[UNK]\nfox\n", "no WordPiece vocabulary"),
        ("vocab.txt", "[UNK]\n[SEP]\nfox\nfox\n", "no WordPiece vocabulary"),
        ("vocab.txt", "\udcff\n", "not UTF-8"),
        ("vocab.txt", "", "no WordPiece vocabulary"),
    ],
    ids=map(str, range(17)),
)
def test_broken_files(tmp_path, name, content, problem):
    if name != "vocab.txt":
        write_pair(tmp_path, SMALL)
    with (tmp_path / name).open("a" if name == "merges.txt" else "w", errors="surrogateescape") as file:
        file.write(content)
    with pytest.raises(UserError, match=rf"{name}: ?{problem}") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_ids_of_bert_uncased(test_data):
    tokenizer = load_tokenizer(test_data / "bert-uncased")
    assert (tokenizer.size, tokenizer.end_of_text) == (30522, 102)
    assert tokenizer.encode("Hello WORLD") == [7592, 2088]
    assert tokenizer.encode("one[SEP]two") == [2028, 102, 2048]
    assert tokenizer.decode(tokenizer.encode("Hello, WORLD! unaffable")) == "hello, world! unaffable"


def test_a_learned_wordpiece_vocabulary(tmp_path):
    tokenizer = train_tokenizer(SENTENCES, 150, "wordpiece")
    assert 100 < tokenizer.size <= 150 and tokenizer.end_of_text == 3
    assert tokenizer.decode(tokenizer.encode("The LAZY fox")) == "the lazy fox"
    assert tokenizer.encode_batch(["fox", "dogs"]) == [tokenizer.encode("fox"), tokenizer.encode("dogs")]
    tokenizer.save(tmp_path)
    assert is_tokenizer_folder(tmp_path)
    expected = tokenizer.encode_batch(SENTENCES)
    for again in load_tokenizer(tmp_path), train_tokenizer(SENTENCES, 150, "wordpiece"):
        assert again.encode_batch(SENTENCES) == expected


def test_upper_case_letters_in_the_vocabulary_are_kept(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[SEP]\nFox\nfox\n")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Fox fox FOX") == [3, 4, 1]
    tokenizer.save(tmp_path)  # from here on what tokenizer.json says decides
    assert load_tokenizer(tmp_path) == tokenizer
