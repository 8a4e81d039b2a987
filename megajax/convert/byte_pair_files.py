"""GPT-2's tokenizer in Hugging Face's format: `tokenizer.json`, or `vocab.json` and `merges.txt`."""

from pathlib import Path
from typing import Any

from megajax import reading
from megajax.convert.tokenizer_files import SETTINGS, SINGLE, check_plain, read_object, write_objects, write_saved
from megajax.data.bpe import BytePairTokenizer, check_vocabulary
from megajax.data.saved_tokenizer import SavedTokenizer
from megajax.data.tokenizer import END_OF_TEXT, Tokenizer
from megajax.data.tokenizers import is_tokenizer_folder, load_tokenizer
from megajax.errors import UserError

_PLAIN = {  # the valid values of a byte-level tokenizer like GPT-2's; None: the field may be missing
    "normalizer": (None,),
    "pre_tokenizer.type": ("ByteLevel",),
    "pre_tokenizer.add_prefix_space": (False,),
    "pre_tokenizer.use_regex": (True, None),
    "model.type": ("BPE", None),
    "model.dropout": (None, 0.0),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
    "model.byte_fallback": (False, None),
    "model.ignore_merges": (False, None),
}


def read_byte_pair(folder: Path) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of a folder, and its added tokens that ours leaves out; None and no tokens where there is none.

    Raises:
        UserError: it is damaged, or not a byte-level BPE as GPT-2's.
    """
    _check_no_prefix_space(folder / SETTINGS)
    if reading.is_file(folder / SINGLE):
        return _read_single(folder / SINGLE)
    if is_tokenizer_folder(folder):
        return load_tokenizer(folder), []
    for name, other in (("vocab.json", "merges.txt"), ("merges.txt", "vocab.json")):
        if reading.is_file(folder / name):
            raise UserError(f"{folder}: {name} without {other}; valid: both, {SINGLE}, or no tokenizer")
    return None, []


def write_byte_pair(tokenizer: Tokenizer, length: int, folder: Path) -> None:
    """Write all files by which `transformers` finds a tokenizer; `length` is that of the model's sequences."""
    if isinstance(tokenizer, SavedTokenizer):
        write_saved(tokenizer, length, folder)
        return
    tokenizer.save(folder)
    (folder / SINGLE).write_text(tokenizer.to_json(), encoding="utf-8")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    settings: dict[str, Any] = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    if not isinstance(tokenizer, BytePairTokenizer):
        special = {"eos_token": "[SEP]", "unk_token": "[UNK]"}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"model_max_length": length, **special}
    write_objects(folder, {SETTINGS: settings, "special_tokens_map.json": special})


def _read_single(file: Path) -> tuple[Tokenizer, list[str]]:
    content = read_object(file)
    check_plain(file, content, _PLAIN, "GPT-2's")
    try:
        added = {str(token["content"]): token["id"] for token in content.get("added_tokens") or []}
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in content["model"]["merges"]]
        vocabulary = dict(content["model"]["vocab"])
        known = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in merges)
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{file}: not a tokenizer of the library tokenizers; valid: what its save wrote") from None
    if not known:
        raise UserError(f"{file}: merges of unknown tokens; valid: pairs of tokens that form a third of the vocabulary")
    if END_OF_TEXT in added:
        vocabulary[END_OF_TEXT] = added.pop(END_OF_TEXT)
    return BytePairTokenizer(check_vocabulary(vocabulary, file), merges), sorted(added)


def _check_no_prefix_space(file: Path) -> None:
    if reading.is_file(file) and read_object(file).get("add_prefix_space"):
        raise UserError(f"{file}: add_prefix_space is true; valid: false, as GPT-2's")
