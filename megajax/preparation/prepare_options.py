"""The options of `megajax prepare`; every field is a flag."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megajax.core.options import AT_LEAST_ZERO, NOT_EMPTY, between
from megajax.core.traits import IS_PATH


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options for the steps of a preparation."""

    text_key: Annotated[str, "key of the text in JSON lines, or column in Parquet", NOT_EMPTY] = "text"
    tokenizer: Annotated[
        str,
        "tokenizer folder; or bpe or wordpiece to train one on the cleaned text, with --vocab-size",
        NOT_EMPTY,
        IS_PATH,
    ] = "bpe"
    vocab_size: Annotated[int, "vocabulary size of a trained tokenizer", between(1, 100_000_000)] = 50257
    fix_unicode: Annotated[bool, "repair mis-decoded characters (ftfy)"] = True
    clean_newlines: Annotated[bool, "remove trailing white space and repeated blank lines"] = True
    split_sentences: Annotated[
        bool, "split documents into sentences, one sequence each, as BERT needs; requires WordPiece"
    ] = False
    min_tokens: Annotated[int, "drop documents with fewer tokens than this; 0: keep all", AT_LEAST_ZERO] = 128
    duplicates: Annotated[
        Literal["near", "exact", "keep"],
        "drop later copies of a document: near-duplicates as well, identical copies only, or none",
    ] = "near"
    jaccard: Annotated[
        float,
        "near-duplicates share more than this fraction of character 5-grams (Jaccard similarity)",
        between(0.3, 0.99),
    ] = 0.7
    decontaminate_how: Annotated[
        Literal["passage", "document", "report"],
        "on an 8-gram shared with a test set: cut it out with 200 characters on both sides, drop "
        "the document, or only report it",
    ] = "passage"
    test_key: Annotated[str, "key of the text in test sets in JSONL", NOT_EMPTY] = "text"
    max_broken: Annotated[int, "most broken lines and documents to skip before failing", AT_LEAST_ZERO] = 100
    max_document: Annotated[int, "largest document in MiB; larger ones count as broken", between(1, 1 << 16)] = 256
