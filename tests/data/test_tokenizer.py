"""GPT-2's published ids, training, and what a broken tokenizer folder says."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved_tokenizers import write_pair

from megajax.data.tokenizer import END_OF_TEXT
from megajax.data.tokenizers import is_tokenizer_folder, load_tokenizer, train_tokenizer
from megajax.errors import UserError

CORPUS = [f"def function_{n % 7}(argument):\n    return argument + {n}  # größer\n" for n in range(200)]
SMALL = train_tokenizer(CORPUS, 300)


@pytest.fixture(scope="module")
def gpt2(test_data):
    return load_tokenizer(test_data / "gpt2-bpe")


def test_gpt2_ids(gpt2):
    assert (gpt2.size, gpt2.end_of_text) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello world<|endoftext|>Hello") == [15496, 995, 50256, 15496]
    assert gpt2.encode(" Hello") == [18435]
    assert gpt2.encode("") == []
    assert gpt2.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"


def test_gpt2_on_real_text(gpt2, test_data):
    text = (test_data / "wikitext-103" / "wiki.test.tokens").read_text()
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert max(ids) < 50256
    assert len(text) / len(ids) == pytest.approx(4.4, abs=0.3)  # characters per token of English


def test_saved_files_give_the_same_ids(gpt2, tmp_path):
    gpt2.save(tmp_path / "new" / "folder")
    again = load_tokenizer(tmp_path / "new" / "folder")
    text = "Byte-pair encoding, naïve: 12345 ≠ 54321\n\n\tdone"
    assert again.encode(text) == gpt2.encode(text)
    assert (again.size, again.end_of_text) == (gpt2.size, gpt2.end_of_text)
    assert os.listdir(tmp_path / "new" / "folder") == ["tokenizer.json"] and again == gpt2


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_every_text_comes_back(text):
    assert SMALL.decode(SMALL.encode(text)) == text


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8")), max_size=5))
def test_batch_is_one_by_one(texts):
    assert SMALL.encode_batch(texts) == [SMALL.encode(text) for text in texts]


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8")), min_size=1, max_size=5))
def test_bytes_of_ids_are_those_of_the_texts(texts):
    ids = [token for text in SMALL.encode_batch(texts) for token in [*text, SMALL.end_of_text]]
    assert SMALL.num_bytes(np.array(ids)) == len("".join(texts).encode())


def test_trained_layout():
    assert SMALL.size == 300
    assert SMALL.end_of_text == 299
    assert SMALL.encode(END_OF_TEXT) == [299]
    assert max(SMALL.encode("".join(chr(code) for code in range(0x800)))) < 299
    assert len(SMALL.encode(CORPUS[0])) < len(CORPUS[0]) / 2


def test_a_small_corpus_yields_a_smaller_vocabulary():
    tokenizer = train_tokenizer(["ab ab"], 1000)
    assert tokenizer.size == 258  # 256 bytes, "ab", end of text
    assert tokenizer.end_of_text == 257


def test_nothing_but_bytes():
    tokenizer = train_tokenizer(CORPUS, 257)
    assert tokenizer.size == 257
    assert len(tokenizer.encode("größer")) == 8


def test_training_is_deterministic_across_processes_and_cores(tmp_path):
    script = (
        "import sys; from megajax.data.records import TextDocuments\n"
        "from megajax.data.tokenizers import train_tokenizer\n"
        "train_tokenizer(list(TextDocuments('python-stdlib'))[::25], 1500).save(sys.argv[1])"
    )
    for threads in "1", "4":
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run([sys.executable, "-c", script, str(tmp_path / threads)], env=environment, check=True)
    assert (tmp_path / "1" / "tokenizer.json").read_bytes() == (tmp_path / "4" / "tokenizer.json").read_bytes()


def test_vocabulary_too_small_to_train():
    with pytest.raises(UserError, match=r"--model\.vocab-size 256; valid: 257 or more"):
        train_tokenizer(CORPUS, 256)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"--tokenizer\.path: .*nowhere is not a folder; valid: a folder with v"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"--tokenizer\.path: .* has no tokenizer; valid: a folder with vocab\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match=r"--tokenizer\.path: .* has vocab\.json without merges\.txt; valid"):
        load_tokenizer(tmp_path)
    assert not is_tokenizer_folder(tmp_path)


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


def _without(vocabulary, *tokens):
    return {token: number for token, number in vocabulary.items() if token not in tokens}


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda v: json.dumps(v)[:-5], "not JSON"),
        (lambda v: b"\xff", "not UTF-8"),
        (lambda v: "[]", "no vocabulary; valid: one JSON object"),
        (lambda v: json.dumps(v | {"x": "1"}), "no vocabulary; valid: one JSON object"),
        (lambda v: json.dumps(v | {"x": -1}), "no vocabulary; valid: one JSON object"),
        (lambda v: json.dumps(v | {"xyzzy": 0}), "two tokens have the same id"),
        (lambda v: json.dumps(_without(v, "a", "Ġ")), "2 of the 256 bytes have no token"),
        (lambda v: json.dumps(_without(v, END_OF_TEXT)), r"no <\|endoftext\|> token"),
    ],
    ids=["truncated", "encoding", "list", "string-id", "negative-id", "same-id", "missing-bytes", "no-end-of-text"],
)
def test_broken_vocabulary(tmp_path, change, problem):
    write_pair(tmp_path, SMALL)
    file = tmp_path / "vocab.json"
    content = change(json.loads(file.read_text()))
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"vocab\.json: {problem}") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["a", "a b c", "q zzz", "Q Z"])
def test_broken_merges(tmp_path, line):
    write_pair(tmp_path, SMALL)
    with (tmp_path / "merges.txt").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"merges\.txt:45: no merge; valid: two tokens"):
        load_tokenizer(tmp_path)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be written"):
        SMALL.save(tmp_path / "file")
