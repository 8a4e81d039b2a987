"""What `megajax prepare` can be asked for; every field is a flag."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.errors import UserError
from megajax.options import options


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Steps of the preparation."""

    text_key: Annotated[str, "key of the text in JSONL, and column in Parquet"] = "text"
    tokenizer: Annotated[
        str, "folder of a tokenizer; or bpe or wordpiece: train one on the cleaned text, with --vocab-size"
    ] = "bpe"
    vocab_size: Annotated[int, "ids of a tokenizer that is trained"] = 50257
    fix_unicode: Annotated[bool, "repair wrongly decoded characters (ftfy)"] = True
    clean_newlines: Annotated[bool, "remove white space at line ends, and more than one blank line in a row"] = True
    min_tokens: Annotated[int, "drop documents with fewer tokens; 0: none"] = 128
    duplicates: Annotated[
        Literal["near", "exact", "keep"], "drop later copies of a document: similar ones too, identical ones, or none"
    ] = "near"
    jaccard: Annotated[float, "documents are similar above this share of common character 5-grams"] = 0.7
    contaminated: Annotated[
        Literal["remove", "report"],
        "documents with an 8-gram of a test set: drop them, or only report the overlap",
    ] = "remove"
    test_key: Annotated[str, "key of the text in test sets in JSONL"] = "text"
    max_broken: Annotated[int, "broken lines of JSONL that are passed over; one more is an error"] = 100


def check(given: PrepareOptions) -> None:
    """Raises `UserError` where a value is out of range."""
    ranges = {
        "vocab_size": (1, 2**31 - 1, "1 or more"),
        "min_tokens": (0, 2**31 - 1, "0 or more"),
        "max_broken": (0, 2**63, "0 or more"),
        "jaccard": (0.3, 0.99, "0.3 to 0.99"),
    }
    for key, (least, most, valid) in ranges.items():
        value = getattr(given, key)
        if not least <= value <= most:
            raise UserError(f"{options(PrepareOptions)[key].flag} {value}; valid: {valid}")
    for key in "text_key", "test_key", "tokenizer":
        if not getattr(given, key):
            raise UserError(f"{options(PrepareOptions)[key].flag} is empty")
