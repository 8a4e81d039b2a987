"""Tokenizers beside models: of every kind, with ids that the model lacks, contradicted by their settings, of another
kind than the model, written with a run."""

import json
import re
from pathlib import Path

import pytest
from hugging_face import random_tensors, refusal, write_model
from saved_tokenizers import write_pair, write_vocabulary
from tiny import tiny_config

from megajax.convert.families import exchange_for
from megajax.convert.importing import import_hf, open_source
from megajax.convert.tokenizer_files import write_tokenizer
from megajax.core.errors import UserError
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer

TEXTS = ["some words of some text, and words of others"]
BYTE_PAIR, WORDPIECE = train_tokenizer(TEXTS, 280), train_tokenizer(TEXTS, 100, "wordpiece")
TOKENIZERS = {"gpt2": BYTE_PAIR, "bert": WORDPIECE}
SIZES = {"gpt2": 301, "bert": 101}


def write(folder: Path, kind: str, vocab_size: int = 0) -> Path:
    vocab_size = vocab_size or SIZES[kind]
    return write_model(folder, kind, random_tensors(kind, vocab_size=vocab_size), vocab_size=vocab_size)


def other_words(prefix: str = "##", lowercases: str = "Lowercase") -> str:
    """A WordPiece that normalizes texts by another rule than BERT's."""
    content = json.loads(WORDPIECE.files["tokenizer.json"])
    content["model"]["continuing_subword_prefix"] = prefix
    return json.dumps(content | {"normalizer": {"type": lowercases} if lowercases else None})


@pytest.mark.parametrize(("kind", "few", "room"), [("gpt2", 260, 1), ("bert", 20, 0)])
def test_more_ids_than_the_model(kind: str, few: int, room: int, tmp_path: Path) -> None:
    """Tokens that tokenizer.json adds, and those that the files beside it add."""
    folder, tokenizer = tmp_path / "hf", TOKENIZERS[kind]
    tokenizer.save(write(folder, kind, few))
    assert re.search(rf"the tokenizer has {tokenizer.size} ids, vocab_size .* is {few}", refusal(folder))
    content = json.loads(tokenizer.files["tokenizer.json"])
    more = [{**content["added_tokens"][0], "id": tokenizer.size + n, "content": f"<new{n}>"} for n in range(2)]
    (folder / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], *more]}))
    settings = {"pad_token": "<new1>", "additional_special_tokens": ["<new3>"], "image_token": "<new4>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))
    (folder / "added_tokens.json").write_text(json.dumps({"<new2>": 700}))
    source = open_source(write(folder, kind, tokenizer.size + room))
    assert source.added_tokens == [f"<new{n}>" for n in range(room, 5)]
    assert source.tokenizer is not None and source.tokenizer.size == tokenizer.size + room
    assert not any(token in "".join(source.tokenizer.files.values()) for token in source.added_tokens)
    assert json.loads(source.tokenizer.files["tokenizer_config.json"])["padding_side"] == "left"
    assert source.tokenizer.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    import_hf(source, tmp_path / "run")
    assert load_tokenizer(tmp_path / "run" / "data" / "tokenizer") == source.tokenizer


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("gpt2", '{"add_prefix_space": true}', "add_prefix_space is true; valid: false"),
        ("bert", '{"do_lower_case": false}', "do_lower_case is false; valid: true, as the tokenizer itself"),
        ("bert", '{"strip_accents": false}', "strip_accents is false; valid: true"),
        ("bert", '{"tokenize_chinese_chars": false}', "tokenize_chinese_chars is false; valid: true"),
        ("bert", "[]", "not a JSON object"),
        ("bert", '{"do_lower_case": true, "strip_accents": null}', ""),
    ],
)
def test_settings_that_contradict_the_tokenizer(kind: str, settings: str, words: str, tmp_path: Path) -> None:
    """Also where it is a vocabulary alone, of whose settings the file says nothing."""
    folder, tokenizer = write(tmp_path, kind), TOKENIZERS[kind]
    (folder / "tokenizer_config.json").write_text(settings)
    (folder / "tokenizer.json").write_text(tokenizer.files["tokenizer.json"])
    for alone in (False, True):
        if alone:
            (folder / "tokenizer.json").unlink()
            (write_pair if kind == "gpt2" else write_vocabulary)(folder, tokenizer)
        if words:
            assert words in refusal(folder)
        else:
            assert open_source(folder).tokenizer == tokenizer


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_settings_of_a_rule_that_has_none(part: str, tmp_path: Path) -> None:
    """Fields that the package `tokenizers` ignores decide nothing."""
    folder, kind = write(tmp_path, "gpt2"), {"normalizer": "NFC", "pre_tokenizer": "Whitespace"}[part]
    ignored = {"strip_accents": None, "lowercase": 3, "handle_chinese_chars": None, "add_prefix_space": None}
    content = json.loads(BYTE_PAIR.files["tokenizer.json"]) | {part: {"type": kind, **ignored}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"strip_accents": true, "add_prefix_space": false}')
    source = open_source(folder)
    assert source.tokenizer is not None and source.tokenizer.part(part) == {"type": kind}


def test_the_rule_that_transformers_replaces_in_a_large_mistral(tmp_path: Path) -> None:
    content = json.loads(BYTE_PAIR.files["tokenizer.json"])
    content["model"]["vocab"] |= {f"<{n}>": n + BYTE_PAIR.size for n in range(100_000)}
    sizes = {"vocab_size": 110_000, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
    write_model(tmp_path, "mistral", random_tensors("mistral", **sizes), **sizes)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"fix_mistral_regex": true, "eos_token": "<|endoftext|>"}')
    assert "fix_mistral_regex is true; valid: false, or a tokenizer.json with that rule" in refusal(tmp_path)
    write_tokenizer(load_tokenizer(tmp_path), 64, tmp_path, "mistral")
    assert open_source(tmp_path).tokenizer == load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "files", "words"),
    [
        ("bert", {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n"}, "no [MASK]; valid: a WordPiece vocabulary with [P"),
        ("bert", {"tokenizer.json": BYTE_PAIR.files["tokenizer.json"]}, "does not split words into pieces; valid"),
        ("bert", {"tokenizer.json": other_words(prefix="@@")}, 'continuing_subword_prefix of tokenizer.json is "@@"'),
        ("bert", {"merges.txt": ""}, "merges.txt without tokenizer.json; valid: tokenizer.json, as"),
        ("gpt2", {"vocab.json": "{}"}, "vocab.json without tokenizer.json; valid: tokenizer.json, as"),
        ("gpt2", {"tokenizer.model": ""}, "tokenizer.model without tokenizer.json; valid: tokenizer.json, as"),
        ("gpt2", {"tiktoken.model": ""}, "tiktoken.model without tokenizer.json; valid: tokenizer.json, as"),
        ("gpt2", {"tokenizer.json": '{"model": null}'}, "not a tokenizer: "),
    ],
)
def test_of_another_kind_or_not_whole(kind: str, files: dict[str, str], words: str, tmp_path: Path) -> None:
    folder = write(tmp_path, kind)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert words in refusal(folder)


def test_a_byte_level_tokenizer_is_not_exported_with_a_bert() -> None:
    """Before anything is read of the checkpoint."""
    model = tiny_config(family="bert").model
    with pytest.raises(UserError, match="the run's tokenizer: the tokenizer does not split words into pieces; valid"):
        exchange_for(model, "", "it").settings(model, (), BYTE_PAIR)
