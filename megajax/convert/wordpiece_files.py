"""BERT's tokenizer in Hugging Face's format: `tokenizer.json`, or `vocab.txt`."""

import json
from pathlib import Path
from typing import Any

from megajax import reading
from megajax.convert.tokenizer_files import SETTINGS, SINGLE, check_plain, read_object, write_objects
from megajax.data.tokenizer import Tokenizer
from megajax.data.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer
from megajax.errors import UserError

_PLAIN_FILE = "vocab.txt"
_PLAIN = {  # the valid values of a tokenizer like BERT's; None: the field may be missing
    "normalizer.type": ("BertNormalizer",),
    "normalizer.clean_text": (True,),
    "normalizer.handle_chinese_chars": (True,),
    "pre_tokenizer.type": ("BertPreTokenizer",),
    "model.type": ("WordPiece", None),
    "model.unk_token": ("[UNK]",),
    "model.continuing_subword_prefix": ("##",),
    "model.max_input_chars_per_word": (100,),
}
_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")  # of SPECIAL_TOKENS, in their order
_OWN_LINE = frozenset("\n\r")  # none of it in a token, each of which is a line of the file


def read_wordpiece(folder: Path) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of a folder, and its added tokens that ours leaves out; None and no tokens where there is none.

    Raises:
        UserError: it is damaged, or not a WordPiece as BERT's.
    """
    single, plain, settings = (folder / name for name in (SINGLE, _PLAIN_FILE, SETTINGS))
    added: list[str] = []
    if reading.is_file(single):
        tokenizer, added = _read_single(single)
        file = single
    elif reading.is_file(plain):
        tokenizer, file = WordPieceTokenizer.read(plain), plain
    elif other := next((name for name in ("vocab.json", "merges.txt") if reading.is_file(folder / name)), ""):
        raise UserError(f"{folder}: {other} without {SINGLE} or {_PLAIN_FILE}; valid: BERT's tokenizer, or none")
    else:
        return None, []
    missing = [token for token in SPECIAL_TOKENS if token not in special_ids(tokenizer)]
    if missing:
        raise UserError(f"{file}: no {', '.join(missing)}; valid: a vocabulary with {', '.join(SPECIAL_TOKENS)}")
    if reading.is_file(settings):
        _check_case(settings, read_object(settings), _lower_case(tokenizer))
    return tokenizer, added


def write_wordpiece(tokenizer: Tokenizer, length: int, folder: Path) -> None:
    """Write all files by which `transformers` finds a tokenizer; `length` is that of the model's sequences."""
    from tokenizers import Tokenizer as Core
    from tokenizers.processors import TemplateProcessing

    tokenizer.save(folder)
    ids, core = special_ids(tokenizer), Core.from_str(tokenizer.to_json())
    if {"[CLS]", "[SEP]"} <= ids.keys():
        core.post_processor = TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
        )
    (folder / SINGLE).write_text(core.to_str(pretty=True), encoding="utf-8")
    special = {role: token for role, token in zip(_ROLES, SPECIAL_TOKENS, strict=True) if token in ids}
    lower_case = _lower_case(tokenizer)
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case, "model_max_length": length, **special}
    write_objects(folder, {SETTINGS: settings, "special_tokens_map.json": special})


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens that a vocabulary has.

    Raises:
        UserError: it is no WordPiece.
    """
    if not isinstance(tokenizer, WordPieceTokenizer):
        raise UserError("the run's tokenizer is a byte-level BPE; valid: a WordPiece vocabulary, as BERT's")
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    return {token: vocabulary[token] for token in SPECIAL_TOKENS if token in vocabulary}


def _lower_case(tokenizer: Tokenizer) -> bool:
    return json.loads(tokenizer.to_json())["normalizer"]["lowercase"]


def _read_single(file: Path) -> tuple[WordPieceTokenizer, list[str]]:
    content = read_object(file)
    check_plain(file, content, _PLAIN, "BERT's")
    try:
        added = {str(token["content"]) for token in content.get("added_tokens") or []}
        vocabulary = dict(content["model"]["vocab"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{file}: not a tokenizer of the library tokenizers; valid: what its save wrote") from None
    tokenizer = WordPieceTokenizer(_checked(vocabulary, file))
    lower_case = _lower_case(tokenizer)
    for name, valid in (("lowercase", (lower_case,)), ("strip_accents", (None, lower_case))):
        check_plain(file, content, {f"normalizer.{name}": valid}, _cased(lower_case))
    return tokenizer, sorted(added - set(SPECIAL_TOKENS))


def _checked(vocabulary: dict[str, Any], file: Path) -> dict[str, int]:
    """The vocabulary, which can be written as lines.

    Raises:
        UserError: it cannot.
    """
    if not all(type(number) is int for number in vocabulary.values()) or sorted(vocabulary.values()) != list(
        range(len(vocabulary))
    ):
        raise UserError(f"{file}: no vocabulary; valid: one JSON object of token: id, ids from 0 on without a gap")
    try:
        "".join(vocabulary).encode()
    except UnicodeEncodeError as error:  # escapes such as \ud800 are valid JSON but no text
        raise UserError(f"{file}: a token is no text ({error.reason}); valid: text in Unicode") from None
    if bad := [token for token in vocabulary if not token or _OWN_LINE & set(token)]:
        raise UserError(f"{file}: {bad[0]!r} is no token; valid: text of one line")
    missing = [token for token in ("[UNK]", "[SEP]") if token not in vocabulary]
    if missing:
        raise UserError(f"{file}: no {' and no '.join(missing)} token; valid: a vocabulary with both")
    return vocabulary


def _check_case(file: Path, settings: dict[str, Any], lower_case: bool) -> None:
    valid: dict[str, tuple[object, ...]] = {
        "do_lower_case": (lower_case, None),
        "strip_accents": (None, lower_case),
        "tokenize_chinese_chars": (True, None),
    }
    check_plain(file, settings, valid, _cased(lower_case))


def _cased(lower_case: bool) -> str:
    return f"the vocabulary has {'no' if lower_case else 'an'} upper-case letter"
