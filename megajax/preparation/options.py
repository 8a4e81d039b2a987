"""The options of `megajax prepare`. Every field is a flag."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.options import AT_LEAST_ZERO, NOT_EMPTY, between
from megajax.traits import IS_PATH


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Steps of the preparation."""

    text_key: Annotated[str, "key of the text in JSONL, and column in Parquet", NOT_EMPTY] = "text"
    tokenizer: Annotated[
        str,
        "folder of a tokenizer; or bpe or wordpiece: train one on the cleaned text, with --vocab-size",
        NOT_EMPTY,
        IS_PATH,
    ] = "bpe"
    vocab_size: Annotated[int, "ids of a tokenizer that is trained", between(1, 100_000_000)] = 50257
    fix_unicode: Annotated[bool, "repair wrongly decoded characters (ftfy)"] = True
    clean_newlines: Annotated[bool, "remove white space at line ends, and more than one blank line in a row"] = True
    split_sentences: Annotated[
        bool, "cut documents in sentences, as BERT needs them: a sequence each, no end of text; needs WordPiece"
    ] = False
    min_tokens: Annotated[int, "drop documents with fewer tokens; 0: none", AT_LEAST_ZERO] = 128
    duplicates: Annotated[
        Literal["near", "exact", "keep"], "drop later copies of a document: similar ones too, identical ones, or none"
    ] = "near"
    jaccard: Annotated[
        float, "documents are similar above this share of common character 5-grams", between(0.3, 0.99)
    ] = 0.7
    decontaminate_how: Annotated[
        Literal["passage", "document", "report"],
        "with an 8-gram of a test set: cut it out with 200 characters at both sides, drop the document, or only report",
    ] = "passage"
    test_key: Annotated[str, "key of the text in test sets in JSONL", NOT_EMPTY] = "text"
    max_broken: Annotated[
        int, "broken lines and documents that are passed over; one more is an error", AT_LEAST_ZERO
    ] = 100
    max_document: Annotated[int, "MiB of a document; a larger one counts as broken", between(1, 1 << 16)] = 256
