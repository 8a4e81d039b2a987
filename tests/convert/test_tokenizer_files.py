"""Tokenizers beside models: of every kind, with ids that the model lacks, contradicted by their settings, of another
kind than the model, written with a run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hugging_face import random_tensors, write_model
from hugging_face_bert import bert_tensors, write_bert
from refusals import refusal
from saved_tokenizers import write_pair, write_vocabulary
from tiny import tiny_config

from megajax.convert.families import exchange_for
from megajax.convert.importing import import_hf, open_source
from megajax.convert.tokenizer_files import write_tokenizer
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import load_tokenizer, train_tokenizer
from megajax.errors import UserError

TEXTS = ["some words of some text, and words of others"]
BYTE_PAIR, WORDPIECE = train_tokenizer(TEXTS, 280), train_tokenizer(TEXTS, 100, "wordpiece")


def gpt2(folder: Path, vocab_size: int) -> Path:
    tensors = random_tensors() | {"wte.weight": np.zeros((vocab_size, 24), np.float32)}
    return write_model(folder, tensors, vocab_size=vocab_size)


def bert(folder: Path, vocab_size: int = 101) -> Path:
    tensors = bert_tensors("post")
    cut = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
    return write_bert(
        folder, "post", tensors | {name: tensors[name][:vocab_size].copy() for name in cut}, vocab_size=vocab_size
    )


def other_words(prefix: str = "##", lowercases: str = "Lowercase") -> str:
    """A WordPiece that normalizes texts by another rule than BERT's."""
    content = json.loads(WORDPIECE.files["tokenizer.json"])
    content["model"]["continuing_subword_prefix"] = prefix
    return json.dumps(content | {"normalizer": {"type": lowercases} if lowercases else None})


def test_more_ids_than_the_model(tmp_path: Path) -> None:
    for write, tokenizer, few in ((gpt2, BYTE_PAIR, 260), (bert, WORDPIECE, 20)):
        folder = tmp_path / write.__name__
        tokenizer.save(write(folder, few))
        assert re.search(rf"the tokenizer has {tokenizer.size} ids, vocab_size .* is {few}", refusal(folder))
        content = json.loads(tokenizer.files["tokenizer.json"])
        more = [{**content["added_tokens"][0], "id": 300 + n, "content": f"<new{n}>"} for n in range(2)]
        (folder / "tokenizer.json").write_text(
            json.dumps(content | {"added_tokens": [*content["added_tokens"], *more]})
        )
        settings = {"pad_token": "<new1>", "added_tokens_decoder": {"301": {"content": "<new1>"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"padding_side": "left"}))
        source = open_source(write(folder, 301 if write is gpt2 else 101))
        assert source.added_tokens == (["<new1>"] if write is gpt2 else ["<new0>", "<new1>"])
        assert source.tokenizer is not None and "<new1>" not in "".join(source.tokenizer.files.values())
        assert json.loads(source.tokenizer.files["tokenizer_config.json"])["padding_side"] == "left"
        assert source.tokenizer.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
        import_hf(source, tmp_path / f"run-{write.__name__}")
        assert load_tokenizer(tmp_path / f"run-{write.__name__}" / "data" / "tokenizer") == source.tokenizer


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
    folder = gpt2(tmp_path, 300) if kind == "gpt2" else bert(tmp_path)
    tokenizer = BYTE_PAIR if kind == "gpt2" else WORDPIECE
    (folder / "tokenizer_config.json").write_text(settings)
    for alone in (False, True):
        if alone and kind == "bert":
            (folder / "tokenizer.json").unlink()
            write_vocabulary(folder, tokenizer)
        elif alone:
            (folder / "tokenizer.json").unlink()
            write_pair(folder, tokenizer)
        else:
            (folder / "tokenizer.json").write_text(tokenizer.files["tokenizer.json"])
        if words:
            assert words in refusal(folder)
        else:
            assert open_source(folder).tokenizer == tokenizer


@pytest.mark.parametrize(
    ("kind", "files", "words"),
    [
        (
            "bert",
            {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n"},
            "no [MASK]; valid: a WordPiece vocabulary with [PAD]",
        ),
        ("bert", {"tokenizer.json": BYTE_PAIR.files["tokenizer.json"]}, "cuts no words in pieces; valid: a WordPiece"),
        ("bert", {"tokenizer.json": other_words(prefix="@@")}, 'continuing_subword_prefix of tokenizer.json is "@@"'),
        ("bert", {"merges.txt": ""}, "merges.txt without tokenizer.json; valid: tokenizer.json, which"),
        ("gpt2", {"vocab.json": "{}"}, "vocab.json without tokenizer.json; valid: tokenizer.json, which"),
        ("gpt2", {"tokenizer.model": ""}, "tokenizer.model without tokenizer.json; valid: tokenizer.json, which"),
        ("gpt2", {"tokenizer.json": '{"model": null}'}, "no tokenizer: "),
    ],
)
def test_of_another_kind_or_not_whole(kind: str, files: dict[str, str], words: str, tmp_path: Path) -> None:
    folder = gpt2(tmp_path, 300) if kind == "gpt2" else bert(tmp_path)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert words in refusal(folder)


def test_a_byte_level_tokenizer_is_not_exported_with_a_bert() -> None:
    """Before anything is read of the checkpoint."""
    model = tiny_config(family="bert").model
    with pytest.raises(UserError, match="the run's tokenizer: the tokenizer cuts no words in pieces; valid: a WordPie"):
        exchange_for(model, "", "it").settings(model, (), BYTE_PAIR)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (WORDPIECE.files["tokenizer.json"], ("BertTokenizer", True)),
        (other_words(), ("PreTrainedTokenizerFast", None)),
        (other_words(lowercases=""), ("PreTrainedTokenizerFast", None)),
    ],
)
def test_settings_of_a_wordpiece_that_came_without(text: str, wanted: tuple[str, bool | None], tmp_path: Path) -> None:
    """BertTokenizer of transformers has a normalizer of its own; other ones need the class that takes all of the
    file."""
    write_tokenizer(Tokenizer(text), 64, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings.get("do_lower_case")) == wanted and settings["mask_token"] == "[MASK]"
