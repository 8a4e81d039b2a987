"""Tokenizers that are kept whole beside those of `transformers`: ids, texts, chats, and what is written again."""

from pathlib import Path
from typing import Any

import pytest
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
from megajax.data.chat import Chat, ChatTemplate
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import train_tokenizer, wordpiece

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
