"""A tokenized corpus in the run directory, made by `data/samples/making.py`."""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import Damaged, UserError
from megajax.data.text.digests import (
    CHANGED,
    TOKENS,
    CheckedTokens,
    are_digests,
    as_blocks,
    check_index,
    check_tokenizer,
    root,
)
from megajax.data.text.encoding import encode_documents
from megajax.data.text.indexed import IndexedDataset, dataset_files, open_dataset, open_given, prepared_prefix
from megajax.data.text.records import TextDocuments
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import has_only_tokenizer_files, is_tokenizer_folder, load_tokenizer
from megajax.data.text.tokens import TokenDocuments
from megajax.host import reading
from megajax.host.files import write_atomically

_REPORT, _BLOCKS = "report.json", "tokens.digests"  # the second has the digests of the blocks of tokens


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """Where a corpus comes from and how it was made; `report.json` in its folder."""

    source: str  # absolute path, or python-stdlib
    tokenizer_source: str  # absolute path of the given tokenizer; empty if it was trained or imported, or there is none
    dataset: str  # PREFIX of a dataset given tokenized; empty if the tokens are in this folder
    vocab_size: int  # all ids are less than this
    documents: int
    tokens: int
    text_bytes: int = 0  # of the text in UTF-8; 0 for a dataset given tokenized
    skipped_files: int = 0  # files in a folder that are not UTF-8
    dominated: str = ""  # `TextFiles.dominated`
    sentences: int = 0  # in documents split into sentences; otherwise 0
    single_sentence_documents: int = 0
    tokenizer_seconds: float = 0.0  # time to train the tokenizer
    encoding_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)  # for Megatron-LM's own datasets only of the tokenizer


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus."""

    tokens: IndexedDataset
    tokenizer: Tokenizer | None  # None if the dataset was given tokenized and without a tokenizer
    report: CorpusReport


def write_report(folder: Path, report: CorpusReport, blocks: npt.NDArray[np.uint8] | None) -> None:
    """Write a corpus's report, which completes the corpus, and the digests of its blocks, if there are any."""
    if blocks is not None:
        write_atomically(folder / _BLOCKS, blocks.tobytes())
    write_atomically(folder / _REPORT, json.dumps(asdict(report), indent=1) + "\n")


def read_report(folder: Path) -> CorpusReport:
    """The report of a corpus."""
    file = folder / _REPORT
    try:
        content = reading.parse_json(reading.read_bytes(file).decode())
        report = CorpusReport(**content)
        if not all(_is_valid(getattr(report, each.name), each.type) for each in fields(report)):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise Damaged(file, "not the report of a corpus", f"the file as it was, or no {folder}") from None
    return report


def _is_valid(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 63
    return isinstance(value, str) and "\0" not in value if kind is str else are_digests(value)


def open_corpus(output_dir: str | Path, vocab_size: int) -> Corpus:
    """Open the corpus made by `make_corpus`. Any process may call this; nothing is written."""
    folder = Path(output_dir)
    report = read_report(folder)
    prefix = Path(report.dataset or folder / "tokens")
    index_file, tokens_file = dataset_files(prefix)
    again = f"or delete {folder} if {report.source} is unchanged, and the corpus is made again"
    advice = f"the file as it was, {again}"
    own = folder / "tokenizer"
    check_tokenizer(own, report.digests, advice)
    tokenizer = None if report.dataset and not reading.kind(own) else load_fitting(own, vocab_size)
    if report.dataset:
        advice = "the dataset as it was when the run began, or another --run-dir"
    check_index(index_file, report.digests, advice)
    tokens = open_dataset(prefix, advice)
    if tokens.num_tokens != report.tokens:
        raise Damaged(tokens.name, CHANGED, advice)
    blocks = _read_blocks(folder / _BLOCKS, report, advice)
    tokens.checked = CheckedTokens(tokens.tokens, blocks, vocab_size, str(tokens_file), advice)
    if not report.dataset:
        tokens.name = report.source  # the name that the user knows
    if report.vocab_size > vocab_size:
        tokens.check_vocabulary(vocab_size)
    return Corpus(tokens, tokenizer, report)


def _read_blocks(file: Path, report: CorpusReport, advice: str) -> npt.NDArray[np.uint8] | None:
    """The digests of a corpus's blocks, [B, 16]; None if the report has no digest of tokens."""
    if TOKENS not in report.digests:
        return None
    try:
        content = reading.read_bytes(file, 16 * (report.tokens // (1 << 15) + 1))  # tokens have at most 8 bytes
    except OSError:
        content = b"\0"
    if len(content) % 16 or root(as_blocks(content)) != report.digests[TOKENS]:
        raise Damaged(file, CHANGED, advice)
    return as_blocks(content)


def corpus_tokenizer(output_dir: str | Path) -> Tokenizer:
    """The tokenizer of a run's corpora, in `output_dir/tokenizer`; its files are compared with their digests."""
    folder = Path(output_dir, "tokenizer")
    corpora = (output for output in (Path(output_dir), Path(output_dir, "source-0")) if has_corpus(output))
    if corpus := next(corpora, None):
        check_tokenizer(folder, read_report(corpus).digests, "valid: the file as it was")
    return load_tokenizer(folder)


def evaluation_tokens(
    path: str, tokenizer: Tokenizer | None, vocab_size: int, *, sentences: bool = False, flag: str = "--data"
) -> TokenDocuments:
    """Tokens of any text or prepared dataset, for evaluation; with `sentences`, one sequence per sentence. A single
    text file is one document. Only texts need the tokenizer."""
    if prefix := prepared_prefix(path, flag=flag):
        return open_given(prefix, vocab_size, sentences=sentences, flag=flag)[0]
    assert tokenizer is not None, "text without a tokenizer"
    documents = TextDocuments(path, cut=False, flag=flag)
    return TokenDocuments.from_sequences(encode_documents(documents, tokenizer, sentences=sentences), path)


def has_corpus(output_dir: str | Path) -> bool:
    """Whether `make_corpus` has made a corpus in this folder."""
    return bool(reading.kind(Path(output_dir, _REPORT)))  # written last


def has_only_tokenizer(output_dir: str | Path) -> bool:
    """Whether a folder contains only a tokenizer, as after importing weights."""
    own = Path(output_dir, "tokenizer")
    return reading.names(output_dir) == {own.name} and is_tokenizer_folder(own) and has_only_tokenizer_files(own)


def load_fitting(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a folder, which must have at most `vocab_size` ids."""
    return fitting(load_tokenizer(folder), folder, vocab_size)


def fitting(tokenizer: Tokenizer, folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer itself; having more than `vocab_size` ids is an error."""
    if tokenizer.size > vocab_size:
        raise UserError(
            f"--tokenizer.path: the tokenizer in {folder} has {tokenizer.size} ids; valid: at most "
            f"--model.vocab-size {vocab_size}, or a larger one"
        )
    return tokenizer
