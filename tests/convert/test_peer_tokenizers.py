"""Tokenizers that are kept whole beside those of `transformers`: ids, texts, chats, and what is written again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hugging_face import CLASSES, ORDERS, write_model
from saved_tokenizers import (
    CHATML,
    KINDS,
    LLAMA3,
    MARKED,
    MISTRAL,
    QWEN3,
    TEXTS,
    write_pair,
    write_saved,
    write_vocabulary,
)

from megajax.convert.tokenizer_files import read_tokenizer, write_tokenizer
from megajax.data.text.chat import Chat, ChatTemplate
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import load_tokenizer, train_tokenizer, wordpiece

pytestmark = pytest.mark.peer
transformers = pytest.importorskip("transformers", reason="the extra `peer` is not installed")

ODD = [
    "",
    " ",
    "a",
    "  two  spaces",
    "ünïcödé 漢字 🙂 e\u0301",
    "12345 it's\r\n\n\tEnd.\n",
    "a<|im_end|>b</s> c<|eot_id|>",
]
CHAT = [
    {"role": "user", "content": " Which day? "},
    {"role": "assistant", "content": "Monday,\n\n  größer."},
    {"role": "user", "content": 'And "then"?'},
    {"role": "assistant", "content": "Tuesday."},
]


def both(folder: Path) -> tuple[Any, Tokenizer]:
    """The tokenizer of `transformers`, and ours."""
    tokenizer, left_out = read_tokenizer(folder, "bpe", 5000)
    assert tokenizer is not None and not left_out
    return transformers.AutoTokenizer.from_pretrained(folder), tokenizer


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "wordpiece cased"])
def test_a_tokenizer_of_one_file(kind: str, tmp_path: Path) -> None:
    """`transformers` writes tokenizer.json alone: the same ids here, cased and not, also of a token that is added."""
    text = "Some TEXT — with some Words, ünd some words again.\n\n\tEnd." * 3
    name, _, cased = kind.partition(" ")
    tokenizer = train_tokenizer([text], 280 if name == "bpe" else 100, name)
    if cased:
        tokenizer = wordpiece(tokenizer.vocabulary | {"Some": tokenizer.size, "TEXT": tokenizer.size + 1})
    (tmp_path / "ours").mkdir()
    if name == "bpe":
        write_pair(tmp_path / "ours", tokenizer)
        theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path / "ours")
    else:
        write_vocabulary(tmp_path / "ours", tokenizer)
        theirs = transformers.BertTokenizer.from_pretrained(tmp_path / "ours", do_lower_case=not cased)
    theirs.save_pretrained(tmp_path / "hf")
    assert not {"vocab.json", "vocab.txt"} & {file.name for file in (tmp_path / "hf").iterdir()}
    assert read_tokenizer(tmp_path / "hf", name, 300) == (tokenizer, [])
    assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids
    theirs.add_special_tokens({"additional_special_tokens": ["[MORE]"]})
    theirs.save_pretrained(tmp_path / "hf")
    again, left_out = read_tokenizer(tmp_path / "hf", name, 300)
    assert again is not None and not left_out  # the model has an id for it
    assert again.encode(text + "[MORE]") == theirs(text + "[MORE]", add_special_tokens=False).input_ids


def test_pairs_of_texts_in_a_wordpiece_that_is_exported(tmp_path: Path) -> None:
    text = "A naïve text, with a few words of it twice: a text, with words.\n\n" * 3
    tokenizer = train_tokenizer([text], 150, "wordpiece")
    write_tokenizer(tokenizer, 64, tmp_path, "bert")
    special = {token: tokenizer.encode(token) for token in ("[CLS]", "[SEP]", "[PAD]", "[MASK]")}
    first, second = tokenizer.encode(text), tokenizer.encode("Other words.")
    for kind in (transformers.AutoTokenizer, transformers.BertTokenizer):
        theirs = kind.from_pretrained(tmp_path)
        both = theirs(text, "Other words.")
        assert both.input_ids == [*special["[CLS]"], *first, *special["[SEP]"], *second, *special["[SEP]"]]
        assert both.token_type_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert [theirs.pad_token_id, theirs.mask_token_id] == special["[PAD]"] + special["[MASK]"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_what_is_written_again(kind: str, tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "theirs", kind)
    _, tokenizer = both(folder)
    (tmp_path / "again").mkdir()
    write_tokenizer(tokenizer, 64, tmp_path / "again", "llama")
    for place in folder, tmp_path / "again":
        theirs = transformers.AutoTokenizer.from_pretrained(place)
        for text in [*TEXTS, *ODD]:
            assert theirs(text).input_ids == [*tokenizer.begin, *tokenizer.encode(text)], text
            assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
            assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        assert theirs.eos_token_id == tokenizer.end_of_text and len(theirs) <= tokenizer.size
        own = ChatTemplate(tokenizer.chat_template, tokenizer.named_tokens, "it")
        for number in range(1, len(CHAT) + 1):
            wanted = theirs.apply_chat_template(CHAT[:number], tokenize=False)
            assert own.render(CHAT[:number], "x") == wanted
    for name in "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja":
        if (folder / name).exists():
            assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_a_tokenizer_without_settings(tmp_path: Path) -> None:
    folder = write_saved(tmp_path / "theirs", "mistral")
    (folder / "tokenizer_config.json").unlink()
    _, tokenizer = both(folder)
    assert tokenizer.decode([tokenizer.end_of_text]) == "</s>"  # by config.json
    (tmp_path / "again").mkdir()
    write_tokenizer(tokenizer, 64, tmp_path / "again", "llama")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert theirs(TEXTS[2]).input_ids == tokenizer.encode_prompt(TEXTS[2])
    assert theirs.eos_token_id == tokenizer.end_of_text


def test_the_class_that_cuts_texts_by_its_own_rule(tmp_path: Path) -> None:
    """LlamaTokenizer puts a rule for spaces of its own in the place of tokenizer.json's: texts without a space in the
    beginning have the same ids."""
    folder = write_saved(tmp_path, "mistral")
    settings = (folder / "tokenizer_config.json").read_text().replace("PreTrainedTokenizerFast", "LlamaTokenizer")
    (folder / "tokenizer_config.json").write_text(settings)
    theirs, tokenizer = both(folder)
    assert type(theirs).__name__ == "LlamaTokenizer"
    for text in [*TEXTS, "a", "ünïcödé 漢字 🙂", "a</s>b"]:
        assert theirs(text).input_ids == tokenizer.encode_prompt(text), text
    ours = [token for token in map(tokenizer.token, tokenizer.encode("  a")) if token == "▁"]
    assert len(ours) == theirs("  a").tokens().count("▁") + 1


def declare(folder: Path, kind: str, in_vocabulary: Sequence[str], normalizer: str | None, **files: Any) -> Path:
    """A tokenizer of a kind, with more tokens in its vocabulary, and with files beside it; `files` by their stems."""
    write_saved(folder, kind)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids |= {token: len(ids) + number for number, token in enumerate(in_vocabulary)}
    for token in content["added_tokens"]:
        token["id"] = ids.get(token["content"], token["id"] + len(in_vocabulary))
    content |= {"post_processor": None} | ({"normalizer": {"type": normalizer}} if normalizer else {})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    for name in "special_tokens_map", "generation_config", "config":
        (folder / f"{name}.json").unlink(missing_ok=True)
    files["tokenizer_config"] = settings | files.get("tokenizer_config", {})
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return folder


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", "content": content, **flags}


USER, NEW, LEFT = "<|user|>", "<|new|>", {"lstrip": True, "normalized": False}
SPOKEN = [f"{USER}Hello  {USER}  there{USER}s", f"The text {NEW}  words{NEW} <|USER|> <|NEW|>", f"a{NEW}{USER}b</s>"]
# Files beside tokenizer.json, by their stems.
SPELLINGS: dict[str, dict[str, Any]] = {
    "additional": {"tokenizer_config": {"additional_special_tokens": [USER, NEW]}},
    "additional with flags": {"tokenizer_config": {"additional_special_tokens": [typed(NEW, **LEFT), typed(USER)]}},
    "extra": {"tokenizer_config": {"extra_special_tokens": [NEW, typed(USER, rstrip=True, special=True)]}},
    "both": {"tokenizer_config": {"extra_special_tokens": [USER], "additional_special_tokens": [NEW]}},
    "extra by name": {"tokenizer_config": {"extra_special_tokens": {"user": USER, "new_token": typed(NEW, **LEFT)}}},
    "named and more": {
        "tokenizer_config": {"extra_special_tokens": {"user": USER}, "additional_special_tokens": [NEW]}
    },
    "other names": {"tokenizer_config": {"user_token": USER, "image_token": typed(NEW, single_word=True)}},
    "model's": {"tokenizer_config": {"model_specific_special_tokens": {"new": NEW, "user": USER}}},
    "roles": {"tokenizer_config": {"pad_token": NEW, "unk_token": typed(USER, **LEFT), "add_bos_token": True}},
    "decoder": {"tokenizer_config": {"added_tokens_decoder": {"9999": {"content": NEW}, "7": {"content": USER}}}},
    "decoder with flags": {
        "tokenizer_config": {
            "pad_token": USER,
            "added_tokens_decoder": {
                "10": {"content": USER, "rstrip": True, "special": False},
                "9": {"content": NEW, "single_word": True, "normalized": True, "special": True},
            },
        },
        "special_tokens_map": {"additional_special_tokens": ["text"]},  # not read, nor is the next
        "added_tokens": {"words": 3},
    },
    "map": {"special_tokens_map": {"pad_token": {"content": NEW, **LEFT}, "additional_special_tokens": [USER]}},
    "map and settings": {
        "tokenizer_config": {"pad_token": USER, "additional_special_tokens": [NEW]},
        "special_tokens_map": {"pad_token": None, "mask_token": "text", "additional_special_tokens": ["words"]},
    },
    "map of extra": {
        "tokenizer_config": {"extra_special_tokens": [USER]},
        "special_tokens_map": {"extra_special_tokens": [{"content": NEW, **LEFT}], "x_token": "text"},
    },
    "map by name": {"special_tokens_map": {"extra_special_tokens": {"new": NEW}, "user_token": {"content": USER}}},
    "added": {"added_tokens": {NEW: 7000, USER: 20}, "tokenizer_config": {"pad_token": NEW}},
    "added and special": {
        "added_tokens": {USER: 20, NEW: 19},
        "tokenizer_config": {"additional_special_tokens": [NEW]},
    },
    "split": {"tokenizer_config": {"additional_special_tokens": [USER, NEW], "split_special_tokens": True}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_tokens_declared_beside_the_tokenizer(spelling: str, tmp_path: Path) -> None:
    """In the vocabulary or new, with each of their flags, also where texts are normalized, and after they are saved."""
    kinds = [
        ("llama3", None, ()),
        ("qwen", "Lowercase", ()),
        ("qwen", "Lowercase", (USER,)),
        ("mistral", None, (USER, NEW)),
    ]
    for number, (kind, normalizer, words) in enumerate(kinds):
        folder = declare(tmp_path / str(number), kind, words, normalizer, **SPELLINGS[spelling])
        theirs, tokenizer = both(folder)
        for text in SPOKEN:
            assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids, (kind, words, text)
        assert tokenizer.vocabulary == theirs.get_vocab() and tokenizer.size == len(theirs)
        tokenizer.save(folder / "again")
        assert load_tokenizer(folder / "again") == tokenizer


def test_tokens_that_a_class_has_of_its_own(tmp_path: Path) -> None:
    """GPT2Tokenizer's end of text is special though the files do not say so."""
    tokenizer = train_tokenizer(TEXTS, 300)
    content = json.loads(tokenizer.files["tokenizer.json"]) | {"added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    settings = {"additional_special_tokens": [typed("<|b|>", lstrip=True, special=True)], "pad_token": "<|b|>"}
    for name in "GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizerFast":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
        theirs, own = both(tmp_path)
        assert own.encode("a<|endoftext|>b  <|b|>") == theirs("a<|endoftext|>b  <|b|>").input_ids


TELLING = [
    "In 2024, 12345 naïve cafe\u0301s",
    " a\n\n\n  b\t c ",
    "It's DON'T I'LL",
    "漢字 🙂<|endoftext|>x<|im_end|> y",
]
TELLING += ["", " ", "<|b|>  x  <|b|>", "größer  </s>def f_1(x):\n        return"]


def tokenizers_of_types() -> dict[str, Tokenizer]:
    """Tokenizers to export with language models: of published kinds, learned here, and with tokens declared."""
    found = {"own": train_tokenizer(TEXTS, 300)}
    settings = {"eos_token": "<|endoftext|>", "additional_special_tokens": [typed("<|b|>", lstrip=True)]}
    for name in "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer":
        files = {"tokenizer_config.json": json.dumps(settings | {"tokenizer_class": name})}
        found[f"own as {name}"] = found["own"].with_files(files)
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_exported_with_every_type(kind: str, tmp_path: Path) -> None:
    """AutoTokenizer gives the same ids and texts from the folder of a model of every type that is exported."""
    if kind in ORDERS:
        tokenizers = {"own": train_tokenizer(TEXTS, 150, "wordpiece")}
        own = json.loads(tokenizers["own"].files["tokenizer.json"])
        for name, change in {"cased": {"lowercase": False}, "accents": {"strip_accents": False}}.items():
            changed = json.dumps(own | {"normalizer": own["normalizer"] | change})
            tokenizers[name] = tokenizers["own"].with_files({"tokenizer.json": changed})
        named = {"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer"}'}
        tokenizers["named"] = tokenizers["cased"].with_files(named)
        tokenizers["words"] = tokenizers["own"].with_files({"tokenizer.json": json.dumps(own | {"normalizer": None})})
    else:
        tokenizers = tokenizers_of_types()
        tokenizers |= {name: load_tokenizer(write_saved(tmp_path / f"saved {name}", name)) for name in KINDS}
    for name, tokenizer in tokenizers.items():
        folder = write_model(tmp_path / name, kind, {})
        write_tokenizer(tokenizer, 64, folder, kind)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for text in [*TELLING, *TEXTS[:3], *ODD]:
            ids = tokenizer.encode(text)
            assert theirs(text, add_special_tokens=False).input_ids == ids, (name, text)
            assert theirs.decode(ids) == tokenizer.decode(ids)
        if kind in ORDERS:
            assert 1 in theirs("a", "b").token_type_ids
        again, _ = read_tokenizer(folder, "wordpiece" if kind in ORDERS else "bpe", 5000)
        assert again == tokenizer


def test_a_type_whose_class_is_fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Qwen's own tokenizer is exported as it came; another one with code that says which class reads it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = load_tokenizer(write_saved(tmp_path / "own", "qwen"))
    for name, tokenizer in {"qwen": own, "other": train_tokenizer(TEXTS, 300)}.items():
        folder = write_model(tmp_path / name, "qwen2", {})
        write_tokenizer(tokenizer, 64, folder, "qwen2")
        for trusts in False, True:
            theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)
            assert theirs("In 2024").input_ids == tokenizer.encode("In 2024")
            assert (type(theirs).__name__ == "Qwen2Tokenizer") == (name == "qwen")
        assert bool(list(folder.glob("*.py"))) == (name == "other")


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL, MARKED, QWEN3])
def test_chats(source: str, add_generation_prompt: bool, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(write_saved(tmp_path, "llama3"))
    own = ChatTemplate(source, theirs.special_tokens_map, "it")
    args = {"enable_thinking": False, "bos_token": "<b>"}
    for chat in CHAT[:1], CHAT[:3], CHAT:
        wanted = theirs.apply_chat_template(
            chat, chat_template=source, add_generation_prompt=add_generation_prompt, tokenize=False, **args
        )
        assert own.render(chat, "x", add_generation_prompt=add_generation_prompt, template_args=args) == wanted


def test_what_the_assistant_writes_by_markers(tmp_path: Path) -> None:
    theirs, tokenizer = both(write_saved(tmp_path, "qwen"))
    found = theirs.apply_chat_template(
        CHAT, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    answers = [number for number, message in enumerate(CHAT) if message["role"] == "assistant"]
    (conversation,) = ChatTemplate(MARKED, {}, "it").rendered([Chat(CHAT, "x")], [answers])
    ((ids, offsets),) = tokenizer.encode_batch_with_offsets([conversation.text])
    mask = [
        any(start < stop <= last and first <= start for first, last in conversation.spans) for start, stop in offsets
    ]
    assert ids == found["input_ids"] and mask == [bool(counted) for counted in found["assistant_masks"]]


@pytest.mark.parametrize("kind", ["qwen", "mistral"])
def test_conversations_of_the_harness(kind: str, tmp_path: Path) -> None:
    """As its own models write them: followed by the assistant's turn, or within it."""
    harness = pytest.importorskip("megajax.evaluation.harness", reason="the extra `eval` is not installed")
    theirs, tokenizer = both(write_saved(tmp_path, kind))
    model = object.__new__(harness.MegajaxLM)
    model._text, model._name, model._template_args = tokenizer, "runs/it", {}
    for turns in (CHAT[:1], CHAT[:2], CHAT):
        asks = turns[-1]["role"] == "user"
        options = {"tokenize": False, "add_generation_prompt": asks, "continue_final_message": not asks}
        assert model.apply_chat_template(turns, asks) == theirs.apply_chat_template(turns, **options)
    assert model.chat_template(True) == theirs.get_chat_template() and model.tokenizer_name == "runs__it"


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_harness_encodes(kind: str, tmp_path: Path) -> None:
    """Contexts begin as those of the harness's own models do."""
    harness = pytest.importorskip("megajax.evaluation.harness", reason="the extra `eval` is not installed")
    theirs, tokenizer = both(write_saved(tmp_path, kind))
    model = object.__new__(harness.MegajaxLM)
    model._text = tokenizer
    assert model.prefix_token_id == (theirs.eos_token_id if theirs.bos_token_id is None else theirs.bos_token_id)
    assert model.tok_encode("The text") == theirs("The text").input_ids
    assert model.tok_encode(" of", add_special_tokens=False) == theirs(" of", add_special_tokens=False).input_ids
    context, continuation = model._encode_pair("The text ", "of words")
    assert (context, context + continuation) == (theirs("The text").input_ids, theirs("The text of words").input_ids)
    begin = tokenizer.decode(tokenizer.begin)
    assert model.tok_encode(begin + "a") == theirs(begin + "a", add_special_tokens=False).input_ids
