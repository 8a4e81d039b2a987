"""Tokens that the files beside `tokenizer.json` declare, read as `transformers` does when it loads a tokenizer.

`tokenizer_config.json` names tokens by role (`eos_token` or another `…_token`), lists further special ones
(`extra_special_tokens`), and may list added tokens by id (`added_tokens_decoder`). Only without that last list do
`special_tokens_map.json` and `added_tokens.json` count.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megajax.core.errors import UserError

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER = "added_tokens_decoder"  # in `CONFIG`: added tokens by id
ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

_EXTRA, _OLDER, _SPECIFIC = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
# Tokens that a class of transformers has if the files name none for the role.
_END, _BERT = "<|endoftext|>", ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULTS: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END),
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
    "GPTNeoXTokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END) | {"pad_token": "<|padding|>"},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "BertTokenizer": {role: f"[{role.removesuffix('_token').upper()}]" for role in _BERT},
}


@dataclass(frozen=True)
class Token:
    """A token that texts are searched for before they are split into words; the fields of `tokenizers.AddedToken`."""

    content: str
    special: bool = True
    normalized: bool | None = None  # whether the normalized text is searched; None: unless the token is special
    lstrip: bool = False  # whether it takes the spaces before it
    rstrip: bool = False
    single_word: bool = False
    given: Literal["text", "object", "object in map"] = field(default="text", compare=False)  # how, in the files

    @property
    def flags(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FLAGS}


Named = dict[str, Token | None]  # by role or other name; None: expressly none


@dataclass
class Declared:
    """The tokens that the files beside a `tokenizer.json` declare."""

    roles: Named = field(default_factory=dict)  # tokens of `ROLES`
    others: Named = field(default_factory=dict)  # tokens of other names
    specific: Named = field(default_factory=dict)  # likewise, taking precedence
    extra: list[Token] | None = None
    older: list[Token] | None = None  # the older name of `extra`, which counts only without that
    added: dict[int, Token] = field(default_factory=dict)  # by id; only the order matters if the vocabulary has others
    is_whole: bool = False  # `added` takes the place of the list in tokenizer.json
    defaults: dict[str, str] = field(default_factory=dict)  # for missing roles, if the vocabulary has the token

    def named(self, core: Any) -> dict[str, Token]:
        """Tokens by role and by other names, for a tokenizer of the package `tokenizers`."""
        defaults = {role: Token(token) for role, token in self.defaults.items() if core.token_to_id(token) is not None}
        roles = {role: self.roles.get(role, defaults.get(role)) for role in ROLES}
        return {name: token for name, token in {**roles, **self.others, **self.specific}.items() if token}

    def add_to(self, core: Any) -> None:
        """Add the tokens to such a tokenizer, which gives new ones the next ids."""
        from tokenizers import AddedToken

        named = self.named(core).values()
        existing = {token_id: _as_token(token) for token_id, token in core.get_added_tokens_decoder().items()}
        added = [token for _, token in sorted({**self.added, **({} if self.is_whole else existing)}.items())]
        known = {token.content for token in (*existing.values(), *added)}
        extra = self.older if self.extra is None else self.extra
        new = [token for token in (*named, *(extra or ())) if token.content not in known]
        special = {token.content for token in named}
        once: dict[tuple[Token, bool], Token] = {}
        for token in (*added, *new):
            once.setdefault((_filled(token), token.given == "text"), token)
        marked = [dataclasses.replace(each, special=each.special or each.content in special) for each in once.values()]
        tokens = [_filled(token) for token in marked]
        if not set(existing.values()).issuperset(tokens):
            core.add_tokens([AddedToken(token.content, **token.flags) for token in tokens])


def read_declared(config: dict[str, Any], special: dict[str, Any], added: dict[str, Any], folder: Path) -> Declared:
    """What `CONFIG`, `SPECIAL` and `ADDED` in a folder declare; each is empty if there is no such file."""
    declared = _from_config(config, folder / CONFIG)
    if DECODER in config:
        declared.added, declared.is_whole = _by_id(config[DECODER], folder / CONFIG), True
    else:
        _take_map(declared, special, folder / SPECIAL)
        there = [token for token in (*declared.roles.values(), *(declared.extra or ())) if token]
        known = {token.content for token in there if token.given != "object"}  # as there
        declared.added = _from_added(added, known, folder / ADDED)
    name = config.get("tokenizer_class")
    declared.defaults = DEFAULTS.get(name.removesuffix("Fast"), {}) if isinstance(name, str) else {}
    return declared


def _from_config(content: dict[str, Any], file: Path) -> Declared:
    extra, older, specific = (_group(content.get(name), f"{file}: {name}") for name in (_EXTRA, _OLDER, _SPECIFIC))
    if not extra and older is not None:
        extra, older = older, None
    fields = {name: value for name, value in content.items() if name.endswith("_token") and name not in ROLES}
    texts = {name: _token(value, f"{file}: {name}") for name, value in fields.items() if isinstance(value, str)}
    typed = {name: _token(value, f"{file}: {name}") for name, value in fields.items() if _is_typed(value)}
    if isinstance(extra, dict):
        texts, extra = texts | extra, None
    if not texts and isinstance(specific, dict):
        texts = specific
    return Declared(_roles(content, file), {**typed}, {**texts}, extra, older if isinstance(older, list) else None)


def _take_map(declared: Declared, content: dict[str, Any], file: Path) -> None:
    """Let `SPECIAL` replace what `CONFIG` declares, or add to it."""
    declared.roles |= _roles(content, file, special=True)
    fields = {name: value for name, value in content.items() if name.endswith("_token") and name not in ROLES}
    for name, value in fields.items():
        if isinstance(value, str | dict):
            declared.others[name] = _token(value, f"{file}: {name}", special=True)
    extra, older = (_group(content.get(name), f"{file}: {name}", special=True) for name in (_EXTRA, _OLDER))
    if isinstance(extra, dict):
        declared.specific |= extra
        declared.extra = None
    elif extra is not None:
        declared.extra = list(dict.fromkeys([*(declared.extra or ()), *extra]))
    if isinstance(older, list):
        declared.older = older


def _from_added(content: dict[str, Any], special: set[str], file: Path) -> dict[int, Token]:
    """The tokens of `ADDED`, an object of token: id; `special` are the contents of special ones."""
    tokens = {}
    for text, token_id in content.items():
        if type(token_id) is not int:
            raise UserError(f"{file}: {text[:40]!r} has no id; valid: an object of token: id")
        flags = {"special": text in special, "normalized": text not in special}
        tokens[token_id] = _token({"content": text, **flags}, str(file))
    return tokens


def _roles(content: dict[str, Any], file: Path, *, special: bool = False) -> Named:
    fields = {role: content[role] for role in ROLES if role in content}
    return {
        role: None if value is None else _token(value, f"{file}: {role}", special=special)
        for role, value in fields.items()
    }


def _by_id(value: Any, file: Path) -> dict[int, Token]:
    where = f"{file}: {DECODER}"
    if not isinstance(value, dict) or not all(name.isdecimal() and len(name) < 11 for name in value):
        raise UserError(f"{where} is not an object by id; valid: an object of id: token")
    if wrong := next((token_id for token_id, token in value.items() if not isinstance(token, dict)), ""):
        raise UserError(f"{where} has no content for {wrong}; valid: an object of id: token")
    return {int(token_id): _token(token, where) for token_id, token in value.items()}


def _group(value: Any, where: str, *, special: bool = False) -> list[Token] | dict[str, Token] | None:
    """Tokens in a list, or by name."""
    if isinstance(value, dict):
        return {name: _token(token, where, special=special) for name, token in value.items()}
    if value is not None and not isinstance(value, list):
        raise UserError(f"{where} is not a list; valid: a list of tokens, or an object of name: token")
    return value if value is None else [_token(token, where, special=special) for token in value]


def _is_typed(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _token(value: Any, where: str, *, special: bool = False) -> Token:
    """A token given by its text, which makes it special, or with its flags; `special` makes it so in any case."""
    fields = value if isinstance(value, dict) else {"content": value}
    flags = {name: fields[name] for name in _FLAGS if name in fields}
    content = fields.get("content")
    if not isinstance(content, str) or not content or any("\ud800" <= letter <= "\udfff" for letter in content):
        raise UserError(f"{where} is not a token; valid: the text of a token, or an object with it as content")
    if wrong := next((name for name, flag in flags.items() if type(flag) is not bool), ""):
        raise UserError(f"{where}: {wrong} of {content[:40]!r} is not true or false; valid: true or false")
    if fields is not value:
        return Token(content)
    flags["special"] = special or flags.get("special", False)
    return Token(content, **flags, given="object in map" if special else "object")


def _as_token(token: Any) -> Token:
    """The token that an `AddedToken` describes."""
    return Token(token.content, **{name: getattr(token, name) for name in _FLAGS}, given="object")


def _filled(token: Token) -> Token:
    return token if token.normalized is not None else dataclasses.replace(token, normalized=not token.special)
