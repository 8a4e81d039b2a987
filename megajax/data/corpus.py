"""A tokenized corpus in the run directory, as `data/making.py` made it."""

from dataclasses import dataclass
from pathlib import Path

from megajax.data.digests import CheckedTokens
from megajax.data.encoding import encode_documents
from megajax.data.indexed import IndexedDataset, dataset_files, open_dataset
from megajax.data.prepared import check_sequences, open_prepared, prepared_prefix
from megajax.data.report import (
    CorpusReport,
    check_index,
    check_tokenizer,
    read_blocks,
    read_report,
)
from megajax.data.text import TextDocuments
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import (
    TOKENIZER_FILES,
    is_tokenizer_folder,
    load_tokenizer,
)
from megajax.data.tokens import SequenceDocuments
from megajax.errors import UserError
from megajax.host import reading


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus."""

    tokens: IndexedDataset
    tokenizer: Tokenizer | None  # None if the dataset was given tokenized and without one
    report: CorpusReport


def open_corpus(output_dir: str | Path, vocab_size: int) -> Corpus:
    """Open what `make_corpus` made. Any process may call this; nothing is written."""
    folder = Path(output_dir)
    report = read_report(folder)
    prefix = Path(report.dataset or folder / "tokens")
    index_file, tokens_file = dataset_files(prefix)
    again = f"or, {report.source} being unchanged, no {folder}: then the corpus is made again"
    advice = f"valid: the file as it was, {again}"
    tokenizer = _own_tokenizer(folder, report, vocab_size, advice)
    if report.dataset:
        advice = "valid: the dataset as it was when the run began, or another --run-dir"
    check_index(index_file, report.digests, advice)
    tokens = open_dataset(prefix, advice)
    if tokens.num_tokens != report.tokens:
        raise UserError(
            f"{tokens.name} has {tokens.num_tokens} tokens, it had {report.tokens} when {folder} was made; {advice}"
        )
    blocks = read_blocks(folder, report, advice)
    tokens.checked = CheckedTokens(tokens.tokens, blocks, vocab_size, str(tokens_file), advice)
    if not report.dataset:
        tokens.name = report.source  # what the user knows it by
    if report.vocab_size > vocab_size:
        tokens.check_vocabulary(vocab_size)
    return Corpus(tokens, tokenizer, report)


def corpus_tokenizer(output_dir: str | Path) -> Tokenizer:
    """The tokenizer of a run's corpora, in `output_dir/tokenizer`, its files compared with their digests."""
    own = Path(output_dir, "tokenizer")
    corpora = (place for place in (Path(output_dir), Path(output_dir, "source-0")) if has_corpus(place))
    if corpus := next(corpora, None):
        check_tokenizer(own, read_report(corpus).digests, "valid: the file as it was")
    return load_tokenizer(own)


def _own_tokenizer(folder: Path, report: CorpusReport, vocab_size: int, advice: str) -> Tokenizer | None:
    own = folder / "tokenizer"
    check_tokenizer(own, report.digests, advice)
    if report.dataset and not reading.kind(own):
        return None
    return load_fitting(own, vocab_size)


def evaluation_tokens(
    path: str, tokenizer: Tokenizer | None, vocab_size: int, *, sentences: bool = False, flag: str = "--data"
) -> SequenceDocuments:
    """Tokens of any text or prepared dataset to evaluate on; with `sentences`, one sequence a sentence.

    A single text file is one document. Only a text needs the tokenizer.
    """
    if prefix := prepared_prefix(path, flag=flag):
        tokens, _ = open_prepared(prefix)
        check_sequences(tokens, prefix, sentences=sentences, flag=flag)
        tokens.check_vocabulary(vocab_size)
        return tokens
    assert tokenizer is not None, "text, and no tokenizer"
    documents = TextDocuments(path, cut=False, flag=flag)
    return SequenceDocuments.from_sequences(encode_documents(documents, tokenizer, sentences=sentences), path)


def has_corpus(output_dir: str | Path) -> bool:
    """Whether `make_corpus` made a corpus there."""
    return bool(reading.kind(Path(output_dir, "report.json")))  # written last


def has_only_tokenizer(output_dir: str | Path) -> bool:
    """Whether a folder holds nothing but a tokenizer, as after an import of weights."""
    folder = Path(output_dir)
    return (
        reading.names(folder) == {"tokenizer"}
        and is_tokenizer_folder(folder / "tokenizer")
        and reading.names(folder / "tokenizer") <= set(TOKENIZER_FILES)
    )


def load_fitting(folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a folder; it must have at most `vocab_size` ids."""
    return fitting(load_tokenizer(folder), folder, vocab_size)


def fitting(tokenizer: Tokenizer, folder: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer itself, unless it has more ids than `vocab_size`, which is an error."""
    if tokenizer.size > vocab_size:
        raise UserError(
            f"--tokenizer.path: the tokenizer in {folder} has {tokenizer.size} ids; valid: at most "
            f"--model.vocab-size {vocab_size}, or a larger one"
        )
    return tokenizer
