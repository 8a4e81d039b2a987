"""The rules in a `tokenizer.json`, which change texts before and after its vocabulary is applied, are a program of
unknown origin: they are tried in a process with limits of memory and time."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.host import limited

_RULES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_ASCII = "".join(map(chr, range(32, 127)))
_STRING = 1000  # characters; longer strings are tables
_MOST = 1 << 16  # characters to try
_RUN, _RUNS = 40, 256  # length and number of runs of one character, which expressions such as (a+)+$ take very long for
_GROWTH = 64  # tokens, or decoded characters, for each character of a text
_passed: set[str] = set()  # rules and texts


def check_rules(content: Mapping[str, Any], file: Path) -> None:
    """Raise `UserError` unless a tokenizer's rules need memory and time in proportion to a text."""
    rules = {rule: content.get(rule) for rule in _RULES}
    named = "".join(text for text in _strings([rules, content.get("added_tokens")]) if len(text) < _STRING)
    characters = "".join(dict.fromkeys(_ASCII + named[:_MOST]))
    texts = [characters, named[:_MOST], "".join(each * _RUN for each in ("\n" + characters)[:_RUNS])]
    key = json.dumps([rules, texts])
    if key not in _passed:
        limited.call(f"{__name__}:probe", rules, texts, str(file), what=f"{file}: the tokenizer")
        _passed.add(key)


def probe(rules: dict[str, Any], texts: list[str], file: str) -> None:
    """Called by `check_rules` in the other process: encode and decode texts with these rules and with characters as
    tokens."""
    from tokenizers import pre_tokenizers

    alphabet = ["<unk>", *sorted({*pre_tokenizers.ByteLevel.alphabet()}.union(*texts))]
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": vocabulary, "merges": []}
    tokenizer = core(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **rules}), Path(file))
    for text in texts:
        with package_errors(Path(file)):
            ids = tokenizer.encode(text, add_special_tokens=True).ids
            size = max(len(ids), len(tokenizer.decode(ids, skip_special_tokens=False)))
        if size > _GROWTH * (len(text) + len(_ASCII)):
            problem = f"its rules turn {len(text)} characters into {size}"
            raise UserError(f"{file}: {problem}; valid: rules that turn a character into at most {_GROWTH}")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(each)


def core(text: str, file: Path) -> Any:
    """The tokenizer of the package `tokenizers` in the text of a file."""
    from tokenizers import Tokenizer

    with package_errors(file):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("a")
        return tokenizer


@contextlib.contextmanager
def package_errors(file: Path) -> Iterator[None]:
    """Turn errors of the package `tokenizers` into one line."""
    try:
        yield
    except BaseException as error:  # errors inside the package are not derived from Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file}: not a tokenizer: {reason}; valid: a file written by the tokenizers library") from None
