"""How `AutoTokenizer` of `transformers` reads an exported tokenizer, so that texts get the same ids there as here.

A class named after a model takes vocabulary and merges from `tokenizer.json`, and has its own rules for the rest.
Another one takes all of the file.
"""

import json
from typing import Any

from megajax.core.errors import UserError
from megajax.data.text.added_tokens import CONFIG, DECODER, DEFAULTS
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizer_settings import SINGLE

MISTRAL = "fix_mistral_regex"  # a field of `CONFIG` that replaces the rule for words of some Mistrals

_WHOLE = "PreTrainedTokenizerFast"  # the class that takes all of tokenizer.json
_WHOLE_NAMES = ("PreTrainedTokenizer", "TokenizersBackend")  # its names without the ending `Fast`
# The class of a `model_type` if tokenizer_config.json names none.
_CLASSES = {
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    "gpt2": "GPT2Tokenizer",
    "olmoe": "GPTNeoXTokenizer",
    "bert": "BertTokenizer",
    "megatron-bert": "BertTokenizer",
}
_FIXED = ("qwen2", "qwen3_5_moe_text")  # types that have this class whatever is named, unless `auto_map` names another
_MODULE, _OWN = "whole_tokenizer", "WholeTokenizer"
_CODE = f'''"""For transformers with trust_remote_code: take tokenizer.json as it is (without, that is done anyway)."""

from transformers import {_WHOLE}


class {_OWN}({_WHOLE}):
    pass
'''
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BPE = {"type": "BPE"}  # the rest as by default: nothing is unknown, no prefixes, no dropout
_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]  # of a BERT


def readable(tokenizer: Tokenizer, settings: dict[str, Any], model_type: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The `settings` for `CONFIG` with which the tokenizer's `tokenizer.json` is taken as it is, unchanged if possible,
    and further files by name."""
    settings = {field: value for field, value in settings.items() if field != MISTRAL}  # words as in tokenizer.json
    name = _class(settings, model_type)
    if "auto_map" not in settings and (name in _WHOLE_NAMES or _is_built(name, tokenizer, settings)):
        return settings, {}
    end = tokenizer.token(tokenizer.end_of_text)
    written: dict[str, Any] = {"eos_token": end} if end in tokenizer.special_tokens else {}
    written |= tokenizer.named_tokens | settings | {"tokenizer_class": _WHOLE}
    if name == "LlamaTokenizer":
        written.setdefault("padding_side", "left")
    if tokenizer.is_wordpiece:
        written.setdefault("model_input_names", _INPUTS)
    written.pop("auto_map", None)
    if model_type not in _FIXED:
        return written, {}
    return written | {"auto_map": {"AutoTokenizer": [None, f"{_MODULE}.{_OWN}"]}}, {f"{_MODULE}.py": _CODE}


def _class(settings: dict[str, Any], model_type: str) -> str:
    named = settings.get("tokenizer_class")
    if model_type in _FIXED or not isinstance(named, str):
        return _CLASSES.get(model_type, _WHOLE_NAMES[0])
    return named.removesuffix("Fast")


def _is_built(name: str, tokenizer: Tokenizer, settings: dict[str, Any]) -> bool:
    """Whether a class with rules of its own gives the same ids and texts."""
    content = json.loads(tokenizer.files[SINGLE])
    rules = _rules(name, settings)
    if not rules or content["model"].get("type") != rules["model"]["type"]:
        return False
    decoder = (
        {"type": "WordPiece", "prefix": "##", "cleanup": True} if name == "BertTokenizer" else {"type": "ByteLevel"}
    )
    there = all(role in settings or token in tokenizer.vocabulary for role, token in DEFAULTS[name].items())
    if not there or not decoder.items() <= tokenizer.part("decoder").items():
        return False
    if name == "Qwen2Tokenizer" and tokenizer.has_special_flags:  # it makes special tokens plain
        return False
    added = [] if DECODER in settings else sorted(content.get("added_tokens") or (), key=lambda token: token["id"])
    model = rules["model"] | {part: content["model"][part] for part in ("vocab", "merges") if part in content["model"]}
    built = json.dumps(content | rules | {"model": model, "added_tokens": added})
    try:
        named = json.dumps(settings | {"tokenizer_class": name})
        return tokenizer.with_files({SINGLE: built, CONFIG: named}) == tokenizer
    except UserError:  # ids of added tokens that do not follow the others
        return False


def _rules(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What a class has in the place of parts of tokenizer.json; empty for classes not known here."""
    bytes_ = _BYTE_LEVEL | {"add_prefix_space": settings.get("add_prefix_space") is True}
    if name == "GPT2Tokenizer":
        return {"model": _BPE, "normalizer": None, "pre_tokenizer": bytes_}
    if name == "Qwen2Tokenizer":
        words = {"type": "Split", "pattern": {"Regex": _QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
        parts = {"type": "Sequence", "pretokenizers": [words, bytes_ | {"use_regex": False}]}
        return {"model": _BPE, "normalizer": {"type": "NFC"}, "pre_tokenizer": parts}
    if name == "BertTokenizer":
        normalizer = {"type": "BertNormalizer", "clean_text": True, "strip_accents": settings.get("strip_accents")}
        normalizer["handle_chinese_chars"] = settings.get("tokenize_chinese_chars", True)
        normalizer["lowercase"] = settings.get("do_lower_case", True)
        unknown, most = settings.get("unk_token") or "[UNK]", {"max_input_chars_per_word": 100}
        model = {"type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##"} | most
        return {"model": model, "normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}}
    return {}
