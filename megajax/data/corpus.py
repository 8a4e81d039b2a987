"""From a user's text to a tokenized corpus in the run directory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megajax import reading
from megajax.data.chunks import count_sentences
from megajax.data.digests import CheckedTokens
from megajax.data.encoding import encode_documents
from megajax.data.files import folder_atomically, put_back
from megajax.data.indexed import IndexedDataset, IndexedWriter, dataset_files
from megajax.data.library import WORDS
from megajax.data.masking import WordPieces
from megajax.data.prepared import check_sequences, open_prepared, prepared_prefix, prepared_tokens, tokenizer_folder
from megajax.data.report import (
    CorpusReport,
    check_index,
    check_tokenizer,
    digests_of,
    read_blocks,
    read_report,
    tokenizer_part,
    write_blocks,
    write_report,
)
from megajax.data.text import TextDocuments
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import (
    TOKENIZER_FILES,
    Kind,
    is_on_hub,
    is_tokenizer_folder,
    load_tokenizer,
    named_tokenizer,
    train_tokenizer,
    training_part,
)
from megajax.data.tokens import SequenceDocuments
from megajax.errors import UserError
from megajax.paths import scheme
from megajax.phases import phase


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus.

    Attributes:
        tokenizer: None if the dataset was given tokenized and without one.
    """

    tokens: IndexedDataset
    tokenizer: Tokenizer | None
    report: CorpusReport


def make_corpus(
    path: str,
    tokenizer_path: str,
    vocab_size: int,
    output_dir: str | Path,
    check: Callable[[Corpus], object] = lambda corpus: None,
    flag: str = "--data.path",
    sentences: bool = False,
    kind: Kind = "bpe",
) -> Corpus:
    """Make the corpus of a run, or find it made. One process calls this, then all may `open_corpus`.

    A prepared dataset (`path` is PREFIX, and PREFIX.bin and PREFIX.idx exist) is used where it lies, with the tokenizer
    of `tokenizer_path`, else of PREFIX.tokenizer, else of its own folder, else none. Any other source (see
    `TextDocuments`) is read and tokenized to `output_dir/tokens.bin` and `tokens.idx`. The tokenizer is in
    `output_dir/tokenizer` in all cases; one that lies there before, with no corpus yet, is that of imported weights and
    is used. Later calls use what is there, without a look at the source; a call that fails leaves what was there.

    Args:
        path: text file, `.jsonl` file, folder, URL, a word for the standard library or PREFIX.
        tokenizer_path: folder of a tokenizer, or the name of a model on the hub; empty: that in `output_dir`, else
            train one with up to `vocab_size` ids.
        vocab_size: ids that the model knows, before padding.
        output_dir: folder of the run's corpus, made if missing.
        check: raises `UserError` where the corpus is not what the caller needs; it is then not kept.
        flag: the flag that named the path, for error messages.
        sentences: documents are cut in sentences, a sequence each, without an end of text; else each is one sequence.
        kind: of the tokenizer that is trained.

    Raises:
        UserError: the source or the tokenizer cannot be used; the tokenizer or a token id is too large for
            `vocab_size`; `output_dir` holds another tokenizer, the corpus of another source or something that is no
            corpus, or cannot be written; a prepared dataset has no sentences but should, or has and should not.
    """
    folder = Path(output_dir)
    put_back(folder)
    if has_corpus(folder):
        _check_same_source(folder, path, tokenizer_path, flag)
        return open_corpus(folder, vocab_size)
    if Path(path).is_dir() and Path(path).resolve() in folder.resolve().parents:
        raise UserError(f"{flag} {path}: all of this folder is read, and {folder} is in it; valid: a --run-dir outside")
    tokenizer = _choose_tokenizer(folder / "tokenizer", tokenizer_path, vocab_size)
    with folder_atomically(folder, ours=has_only_tokenizer) as new:
        if prefix := prepared_prefix(path, flag=flag):
            with phase(f"reading {prefix}"):
                _adopt(prefix, tokenizer, tokenizer_path, vocab_size, new, sentences, flag)
        else:
            _tokenize(TextDocuments(path, flag=flag), tokenizer, tokenizer_path, vocab_size, new, sentences, kind)
        check(open_corpus(new, vocab_size))
    return open_corpus(folder, vocab_size)


def open_corpus(output_dir: str | Path, vocab_size: int) -> Corpus:
    """Open what `make_corpus` made; reads only, on any process.

    Raises:
        UserError: a file is missing, damaged or was changed; the tokenizer or a token id is too large for `vocab_size`.
    """
    folder = Path(output_dir)
    report = read_report(folder)
    prefix = Path(report.dataset or folder / "tokens")
    index_file, tokens_file = dataset_files(prefix)
    again = f"or, {report.source} being unchanged, no {folder}: then the corpus is made again"
    advice = f"valid: the file as it was, {again}"
    tokenizer = _kept_tokenizer(folder, report, vocab_size, advice)
    if report.dataset:
        advice = "valid: the dataset as it was when the run began, or another --run-dir"
    check_index(index_file, report.digests, advice)
    try:
        tokens = IndexedDataset(prefix)
    except UserError as error:
        raise UserError(f"{error}; {advice}") from None
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


def kept_tokenizer(output_dir: str | Path) -> Tokenizer:
    """The tokenizer of a run's corpora, in `output_dir/tokenizer`, its files compared with their digests.

    Raises:
        UserError: there is none, or it is not what was written.
    """
    own = Path(output_dir, "tokenizer")
    corpora = (place for place in (Path(output_dir), Path(output_dir, "source-0")) if has_corpus(place))
    if corpus := next(corpora, None):
        check_tokenizer(own, tokenizer_part(read_report(corpus).digests), "valid: the file as it was")
    return load_tokenizer(own)


def _kept_tokenizer(folder: Path, report: CorpusReport, vocab_size: int, advice: str) -> Tokenizer | None:
    own = folder / "tokenizer"
    check_tokenizer(own, tokenizer_part(report.digests), advice)
    if report.dataset and not reading.kind(own):
        return None
    return _load_tokenizer(own, vocab_size)


def evaluation_tokens(
    path: str, tokenizer: Tokenizer, *, sentences: bool = False, flag: str = "--data"
) -> SequenceDocuments:
    """Tokens of any text or prepared dataset, to evaluate on; documents are cut in sentences if that is wanted. A
    single text file is one document.

    Raises:
        UserError: the text or the dataset cannot be used.
    """
    prefix = prepared_prefix(path, flag=flag)
    if prefix is None:
        documents = TextDocuments(path, cut=False, flag=flag)
        return SequenceDocuments.from_sequences(encode_documents(documents, tokenizer, sentences=sentences), path)
    return prepared_tokens(prefix, tokenizer.size, sentences=sentences, flag=flag)


def has_corpus(output_dir: str | Path) -> bool:
    """Whether `make_corpus` made a corpus there."""
    return bool(reading.kind(Path(output_dir, "report.json")))  # written last


def has_only_tokenizer(output_dir: str | Path) -> bool:
    """Whether a folder has a tokenizer, that of imported weights, and nothing else."""
    folder = Path(output_dir)
    return (
        reading.names(folder) == {"tokenizer"}
        and is_tokenizer_folder(folder / "tokenizer")
        and reading.names(folder / "tokenizer") <= set(TOKENIZER_FILES)
    )


def _choose_tokenizer(own: Path, tokenizer_path: str, vocab_size: int) -> Tokenizer | None:
    """The tokenizer that is given or lies in the folder `own` already, None where there is neither."""
    there = _load_tokenizer(own, vocab_size) if reading.names(own) else None
    given = _fitting(named_tokenizer(tokenizer_path), tokenizer_path, vocab_size) if tokenizer_path else None
    if there and given and there != given:
        raise UserError(
            f"--tokenizer.path {tokenizer_path}: not the tokenizer of the weights, {own}; valid: that, or none"
        )
    return given or there


def _adopt(
    prefix: Path,
    tokenizer: Tokenizer | None,
    tokenizer_path: str,
    vocab_size: int,
    folder: Path,
    sentences: bool,
    flag: str,
) -> None:
    """Record a dataset that was given tokenized."""
    tokens, blocks = open_prepared(prefix)
    check_sequences(tokens, prefix, sentences=sentences, flag=flag)
    beside = next((place for place in (tokenizer_folder(prefix), prefix.parent) if is_tokenizer_folder(place)), None)
    if tokenizer is None and beside:
        tokenizer = _load_tokenizer(beside, vocab_size)
    if blocks is not None:
        write_blocks(folder, blocks)
    if tokenizer:
        tokenizer.save(folder / "tokenizer")
    tokens.check_vocabulary(vocab_size)
    report = CorpusReport(
        source=_absolute(str(prefix)),
        tokenizer_source=_tokenizer_source(tokenizer_path),
        dataset=_absolute(str(prefix)),
        vocab_size=vocab_size,
        documents=tokens.num_documents,
        tokens=tokens.num_tokens,
        **_counts(tokens, sentences),
        digests=digests_of(dataset_files(prefix)[0], blocks, folder / "tokenizer"),
    )
    write_report(folder, report)


def _tokenize(
    documents: TextDocuments,
    tokenizer: Tokenizer | None,
    tokenizer_path: str,
    vocab_size: int,
    folder: Path,
    sentences: bool,
    kind: Kind,
) -> None:
    started = time.perf_counter()
    if tokenizer is None:
        with phase(f"training a tokenizer on {documents.path}"):
            tokenizer = train_tokenizer(training_part(documents, documents.size), vocab_size, kind)
    trained = time.perf_counter()
    if sentences:
        WordPieces.of(tokenizer, f"--tokenizer.path: the tokenizer of {documents.path}")  # before any work
    with phase(f"tokenizing {documents.path}"), IndexedWriter(folder / "tokens", tokenizer.size) as writer:
        for sequences in encode_documents(documents, tokenizer, sentences=sentences):
            writer.add_document(*sequences)
    tokenizer.save(folder / "tokenizer")
    write_blocks(folder, writer.digests)
    report = CorpusReport(
        source=_absolute(documents.path),
        tokenizer_source=_tokenizer_source(tokenizer_path),
        dataset="",
        vocab_size=tokenizer.size,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        **_counts(IndexedDataset(folder / "tokens"), sentences),
        text_bytes=documents.report.num_bytes,
        skipped_files=documents.report.skipped_files,
        tokenizer_seconds=trained - started,
        encoding_seconds=time.perf_counter() - trained,
        digests=digests_of(folder / "tokens.idx", writer.digests, folder / "tokenizer"),
    )
    write_report(folder, report)


def _counts(tokens: IndexedDataset, sentences: bool) -> dict[str, int]:
    """The part of a report about sentences."""
    if not sentences:
        return {}
    counts = count_sentences(tokens)
    return {"sentences": counts.sentences, "single_sentence_documents": counts.single}


def _load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    return _fitting(load_tokenizer(folder), folder, vocab_size)


def _fitting(tokenizer: Tokenizer, folder: str | Path, vocab_size: int) -> Tokenizer:
    if tokenizer.size > vocab_size:
        raise UserError(
            f"--tokenizer.path: the tokenizer in {folder} has {tokenizer.size} ids; valid: at most "
            f"--model.vocab-size {vocab_size}, or a larger one"
        )
    return tokenizer


def _absolute(path: str) -> str:
    """A path, whatever folder is the current one; words and URLs stay."""
    return path if path in ("", *WORDS) or scheme(path) else str(Path(path).resolve())


def _tokenizer_source(path: str) -> str:
    return path if is_on_hub(path) else _absolute(path)


def _check_same_source(folder: Path, path: str, tokenizer_path: str, path_flag: str) -> None:
    report = read_report(folder)
    source = _absolute(path)
    if report.dataset and report.dataset != source:  # PREFIX.bin and PREFIX.idx name it too
        source = str(prepared_prefix(source) or source)
    for flag, made_from, given in (
        (path_flag, report.source, source),
        ("--tokenizer.path", report.tokenizer_source, _tokenizer_source(tokenizer_path)),
    ):
        if made_from != given:
            raise UserError(f"{flag} {given!r}: {folder} was made from {made_from!r}; valid: that, or a new --run-dir")
