"""Tokenizers that are a `tokenizer.json`: ids, begin and ends, bytes, what is written again, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from saved_tokenizers import KINDS, TEXTS, write_saved

from megajax.core.errors import UserError
from megajax.data.samples.making import make_corpus
from megajax.data.text.corpus import corpus_tokenizer, open_corpus
from megajax.data.text.encoding import encode_documents
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import has_only_tokenizer_files, is_tokenizer_folder, load_tokenizer
from megajax.evaluation.pretrained import read_lambada

TEXT = TEXTS[3] + "  two  spaces, größer, 漢字\n\n\tEnd.\n"


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory) -> tuple[str, Path, Tokenizer]:
    folder = write_saved(tmp_path_factory.mktemp("saved") / "t", request.param)
    return request.param, folder, load_tokenizer(folder)


def test_what_begins_and_ends_texts(saved):
    kind, _, tokenizer = saved
    begin, ends = {
        "llama3": (["<|begin_of_text|>"], ["<|eot_id|>", "<|end_of_text|>"]),
        "qwen": ([], ["<|im_end|>"]),  # add_bos_token is true in its settings, which decide nothing
        "mistral": (["<s>"], ["</s>"]),  # and false in these
    }[kind]
    assert tokenizer.begin == [tokenizer.vocabulary[name] for name in begin]
    assert tokenizer.ends == [tokenizer.vocabulary[name] for name in ends]
    assert tokenizer.end_of_text == tokenizer.ends[0]
    assert tokenizer.named_tokens["eos_token"] == ends[0] and tokenizer.chat_template
    assert tokenizer.size == max(tokenizer.vocabulary.values()) + 1
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode_prompt(TEXT) == [*tokenizer.begin, *ids]
    assert tokenizer.encode_prompt("") == (tokenizer.begin or [tokenizer.end_of_text])
    written = tokenizer.decode(tokenizer.begin)
    assert tokenizer.encode_prompt(written + "a").count(tokenizer.begin[0] if begin else -1) == len(begin)


def test_documents_begin_and_end(saved):
    _, _, tokenizer = saved
    (document,), (empty,) = encode_documents([TEXT, ""], tokenizer)
    assert document.tolist() == [*tokenizer.begin, *tokenizer.encode(TEXT), tokenizer.end_of_text]
    assert empty.tolist() == [*tokenizer.begin, tokenizer.end_of_text] and document.dtype == np.int32
    assert tokenizer.num_bytes(document) == len(TEXT.encode())
    end = tokenizer.decode([tokenizer.end_of_text])  # written out in a text
    assert tokenizer.encode(f"a{end}").count(tokenizer.end_of_text) == 1


def test_saved_files_are_the_same_bytes(saved, tmp_path):
    kind, folder, tokenizer = saved
    tokenizer.save(tmp_path / "new")
    again = load_tokenizer(tmp_path / "new")
    assert again == tokenizer and again.ends == tokenizer.ends and again.chat_template == tokenizer.chat_template
    for name in {path.name for path in (tmp_path / "new").iterdir()} - {"generation_config.json"}:
        assert (tmp_path / "new" / name).read_bytes() == (folder / name).read_bytes()
    assert is_tokenizer_folder(tmp_path / "new") and has_only_tokenizer_files(tmp_path / "new")
    if kind == "llama3":
        assert json.loads((tmp_path / "new" / "generation_config.json").read_text()) == {"eos_token_id": again.ends}


def test_the_last_word_of_a_passage(saved, tmp_path):
    """A word after a text has one space before it, whatever a tokenizer puts before texts."""
    _, _, tokenizer = saved
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "The text of words"}))
    ((ids, first),) = read_lambada(str(tmp_path / "a.jsonl"), tokenizer)
    assert ids == [*tokenizer.begin, *tokenizer.encode("The text of words")]
    assert tokenizer.decode(ids[first:]).strip() == "words" and first < len(ids)


def test_a_corpus_of_a_run(tmp_path):
    write_saved(tmp_path / "t", "mistral")
    (tmp_path / "corpus.txt").write_text("".join(TEXTS))
    make_corpus(str(tmp_path / "corpus.txt"), str(tmp_path / "t"), 700, tmp_path / "data")
    corpus, kept = open_corpus(tmp_path / "data", 700), corpus_tokenizer(tmp_path / "data")
    assert corpus.tokens.document(1)[0] == kept.begin[0] and corpus.tokens.document(1)[-1] == kept.end_of_text
    assert {"tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"} <= corpus.report.digests.keys()
    kept.save(tmp_path / "imported" / "tokenizer")  # as weights that were imported have it
    again = make_corpus(str(tmp_path / "corpus.txt"), "", 700, tmp_path / "imported")
    assert again.tokenizer == kept and again.tokens.num_tokens == corpus.tokens.num_tokens
    (tmp_path / "data" / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": [1]}')
    with pytest.raises(UserError, match=r"generation_config.json: did not exist when the tokenizer was written"):
        corpus_tokenizer(tmp_path / "data")


def test_a_vocabulary_with_holes_and_another_end(tmp_path):
    """The end decides, too, whether tokenizers are the same."""
    write_saved(tmp_path, "qwen")
    first = load_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path) != first
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"][-1]["id"] = 1000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    number = tokenizer.vocabulary["<tool_call>"]
    assert tokenizer.size == number + 1
    assert tokenizer.num_bytes(np.array([number])) == len("<tool_call>")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer.json", {"model": None}, "not a tokenizer: "),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "no "),
        ("tokenizer.json", {"added_tokens": 3}, "not a tokenizer: "),
        ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}}, "Onig"),
        ("tokenizer.json", "\x80\x04pickle", "not JSON"),
        ("tokenizer.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", {"eos_token": 3}, "eos_token is not a token; valid: the text of a token"),
        ("tokenizer_config.json", {"pad_token": {"content": "a\ud800"}}, "pad_token is not a token; valid: the text"),
        ("tokenizer_config.json", {"additional_special_tokens": ["a", 3]}, "additional_special_tokens is not a token"),
        ("tokenizer_config.json", {"extra_special_tokens": "a"}, "extra_special_tokens is not a list; valid: a list"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder is not an object by id; valid"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": "a"}}, "added_tokens_decoder has no content for 1; v"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"1": {"content": "<s>", "lstrip": "no"}}},
            "added_tokens_decoder: lstrip of '<s>' is not true or false; valid: true or false",
        ),
        (
            "tokenizer_config.json",
            {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.5.0.0.json"]},
            'fast_tokenizer_files is ["tokenizer.json", "tokenizer.5.0.0.json"]; valid: tokenizer.json alone',
        ),
        ("special_tokens_map.json", {"image_token": {"lstrip": True}}, "image_token is not a token; valid: the text"),
        ("added_tokens.json", {"<a>": "7"}, "'<a>' has no id; valid: an object of token: id"),
        ("tokenizer_config.json", {"eos_token": None}, "no eos_token; valid: a token of tokenizer.json as eos_token"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is not a template; valid: a text"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("generation_config.json", {"eos_token_id": "3"}, "eos_token_id is not an id; valid: the id of a token"),
        ("generation_config.json", {"eos_token_id": [5000]}, "eos_token_id 5000 is not the id of a token; valid"),
    ],
)
def test_refused_files(tmp_path, name, change, message):
    write_saved(tmp_path, "mistral")
    (tmp_path / "config.json").unlink()
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / name
    if isinstance(change, dict):
        change = json.dumps((json.loads(file.read_text()) if file.exists() else {}) | change)
    file.write_text(change)
    with pytest.raises(UserError) as refusal:
        load_tokenizer(tmp_path)
    assert message in str(refusal.value) and str(tmp_path) in str(refusal.value) and "; valid: " in str(refusal.value)
