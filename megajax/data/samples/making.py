"""Make a tokenized corpus in the run directory from a user's text."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.core.errors import UserError
from megajax.data.samples.masking import WordPieces
from megajax.data.text.chunks import count_sentences
from megajax.data.text.corpus import (
    Corpus,
    CorpusReport,
    fitting,
    has_corpus,
    has_only_tokenizer,
    load_fitting,
    open_corpus,
    read_report,
    write_report,
)
from megajax.data.text.digests import digests_of
from megajax.data.text.encoding import encode_documents
from megajax.data.text.indexed import (
    IndexedDataset,
    IndexedWriter,
    dataset_files,
    open_given,
    prepared_prefix,
    tokenizer_folder,
)
from megajax.data.text.inputs import WORDS, read_folders
from megajax.data.text.records import TextDocuments
from megajax.data.text.tokenizer import Tokenizer
from megajax.data.text.tokenizers import (
    Kind,
    is_on_hub,
    is_tokenizer_folder,
    named_tokenizer,
    train_tokenizer,
    training_part,
)
from megajax.host import reading
from megajax.host.files import folder_atomically, put_back
from megajax.host.paths import scheme
from megajax.host.phases import phase


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
    """Make the corpus of a run, or open it if it exists. One process calls this, then all may call `open_corpus`.

    A prepared dataset (`path` is PREFIX, and PREFIX.bin and PREFIX.idx exist) is used in place, with the tokenizer from
    `tokenizer_path`, else from PREFIX.tokenizer, else from its own folder, else with none. Any other source (see
    `TextFiles`) is tokenized into `output_dir/tokens.bin` and `tokens.idx`. The tokenizer is saved as
    `output_dir/tokenizer` in all cases; if one is there without a corpus, it belongs to imported weights and is used.
    Later calls use what exists without reading the source; a failed call leaves everything as it was.

    Args:
        path: a source of text, or PREFIX; `flag` names it.
        tokenizer_path: folder of a tokenizer, or the name of a model on the hub; empty: use the one in `output_dir`, or
            train one of this `kind`.
        vocab_size: number of ids that the model knows, before padding, and the most that a tokenizer may have.
        check: raises `UserError` if the corpus is not what the caller needs; it is then removed.
        sentences: split documents into sentences, one sequence each, without end of text; else each is one sequence.
    """
    folder = Path(output_dir)
    put_back(folder)
    if has_corpus(folder):
        _check_same_source(folder, path, tokenizer_path, flag)
        return open_corpus(folder, vocab_size)
    if any(read.resolve() in folder.resolve().parents for read in read_folders(path, flag)):
        raise UserError(
            f"{flag} {path}: this folder is read as data, and {folder} lies in it; valid: a --run-dir outside it"
        )
    tokenizer = _choose_tokenizer(folder / "tokenizer", tokenizer_path, vocab_size)
    with folder_atomically(folder, ours=has_only_tokenizer) as new:
        if prefix := prepared_prefix(path, flag=flag):
            with phase(f"reading {prefix}"):
                tokens, blocks = open_given(prefix, vocab_size, sentences=sentences, flag=flag)
                places = filter(is_tokenizer_folder, (tokenizer_folder(prefix), prefix.parent))
                if not tokenizer and (beside := next(places, None)):
                    tokenizer = load_fitting(beside, vocab_size)
            source = dataset = _absolute(str(prefix))
            figures: dict[str, Any] = {"vocab_size": vocab_size}
        else:
            prefix, source, dataset = new / "tokens", _absolute(path), ""
            documents = TextDocuments(path, flag=flag)
            tokenizer, blocks, figures = _tokenize(documents, tokenizer, vocab_size, prefix, sentences, kind)
            tokens = IndexedDataset(prefix)
        if sentences:
            counts = count_sentences(tokens)
            figures |= {"sentences": counts.sentences, "single_sentence_documents": counts.single}
        if tokenizer:
            tokenizer.save(new / "tokenizer")
        report = CorpusReport(
            source=source,
            tokenizer_source=_tokenizer_source(tokenizer_path),
            dataset=dataset,
            documents=tokens.num_documents,
            tokens=tokens.num_tokens,
            digests=digests_of(dataset_files(prefix)[0], blocks, new / "tokenizer"),
            **figures,
        )
        write_report(new, report, blocks)
        check(open_corpus(new, vocab_size))
    return open_corpus(folder, vocab_size)


def _choose_tokenizer(folder: Path, tokenizer_path: str, vocab_size: int) -> Tokenizer | None:
    """The given tokenizer, or the one already in `folder`; None if there is neither."""
    existing = load_fitting(folder, vocab_size) if reading.names(folder) else None
    requested = fitting(named_tokenizer(tokenizer_path), tokenizer_path, vocab_size) if tokenizer_path else None
    if existing and requested and existing != requested:
        raise UserError(
            f"--tokenizer.path {tokenizer_path}: not the tokenizer of the weights ({folder}); valid: that one, or none"
        )
    return requested or existing


def _tokenize(
    documents: TextDocuments, tokenizer: Tokenizer | None, vocab_size: int, prefix: Path, sentences: bool, kind: Kind
) -> tuple[Tokenizer, npt.NDArray[np.uint8], dict[str, Any]]:
    """Write the tokens of a text; returns its tokenizer, the digests of the tokens' blocks, and report figures."""
    started = time.perf_counter()
    if tokenizer is None:
        with phase(f"training a tokenizer on {documents.path}"):
            tokenizer = train_tokenizer(training_part(documents, documents.size), vocab_size, kind)
    trained = time.perf_counter()
    if sentences:
        WordPieces.of(tokenizer, f"--tokenizer.path: the tokenizer of {documents.path}")  # fail before any work
    with phase(f"tokenizing {documents.path}"), IndexedWriter(prefix, tokenizer.size) as writer:
        for sequences in encode_documents(documents, tokenizer, sentences=sentences):
            writer.add_document(*sequences)
    figures = {
        "vocab_size": tokenizer.size,
        "text_bytes": documents.num_bytes,
        "skipped_files": documents.skipped_files,
        "dominated": documents.dominated,
        "tokenizer_seconds": trained - started,
        "encoding_seconds": time.perf_counter() - trained,
    }
    return tokenizer, writer.digests, figures


def _absolute(path: str) -> str:
    """The absolute path; words and URLs stay as they are."""
    return path if path in ("", *WORDS) or scheme(path) else str(Path(path).resolve())


def _tokenizer_source(path: str) -> str:
    return path if is_on_hub(path) else _absolute(path)


def is_made_from(folder: Path, path: str) -> bool:
    """Whether the corpus in this folder was made from the source `path`."""
    report = read_report(folder)
    return report.source == _source(report, path)


def _source(report: CorpusReport, path: str) -> str:
    """A path as the report of a corpus would name it."""
    source = _absolute(path)
    if report.dataset and report.dataset != source:  # PREFIX.bin and PREFIX.idx name the dataset too
        source = str(prepared_prefix(source) or source)
    return source


def _check_same_source(folder: Path, path: str, tokenizer_path: str, path_flag: str) -> None:
    report = read_report(folder)
    for flag, made_from, requested in (
        (path_flag, report.source, _source(report, path)),
        ("--tokenizer.path", report.tokenizer_source, _tokenizer_source(tokenizer_path)),
    ):
        if made_from != requested:
            raise UserError(
                f"{flag} {requested!r}: {folder} was made from {made_from!r}; valid: that source, or a new --run-dir"
            )
