"""From a user's text to a tokenized corpus in the run directory."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megajax.data.files import folder_atomically, put_back, write_atomically
from megajax.data.indexed import IndexedDataset, IndexedWriter, dataset_files
from megajax.data.records import STANDARD_LIBRARY
from megajax.data.text import TextDocuments, in_parts
from megajax.data.tokenizer import Tokenizer
from megajax.data.tokenizers import (
    BPE_FILES,
    WORDPIECE_FILES,
    is_tokenizer_folder,
    load_tokenizer,
    train_tokenizer,
)
from megajax.data.tokens import TokenDocuments
from megajax.errors import UserError

TRAINING_BYTES = 64 << 20  # of text that a tokenizer is trained on; of a larger corpus documents at even distances
_BATCH_CHARACTERS = 4 << 20  # text tokenized in one go


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """Where a corpus came from and what it took to make; `report.json` in its folder.

    Attributes:
        source: absolute path, or python-stdlib.
        tokenizer_source: absolute path of a given tokenizer; empty if it was trained, imported or there is none.
        dataset: PREFIX of a dataset that was given tokenized; empty if the tokens lie in the folder.
        vocab_size: all ids are below this.
        text_bytes: of the text in UTF-8; 0 for a dataset that was given tokenized.
        skipped_files: files of a folder that are not UTF-8.
        tokenizer_seconds: what training the tokenizer took.
        encoding_seconds: what tokenizing took.
    """

    source: str
    tokenizer_source: str
    dataset: str
    vocab_size: int
    documents: int
    tokens: int
    text_bytes: int = 0
    skipped_files: int = 0
    tokenizer_seconds: float = 0.0
    encoding_seconds: float = 0.0


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
    check: Callable[[TokenDocuments], object] = lambda tokens: None,
    flag: str = "--data.path",
) -> Corpus:
    """Make the corpus of a run, or find it made. One process calls this, then all may `open_corpus`.

    A prepared dataset (`path` is PREFIX, and PREFIX.bin and PREFIX.idx exist) is used where it lies, with the tokenizer
    of `tokenizer_path`, else of PREFIX.tokenizer, else of its own folder, else none. Any other source (see
    `TextDocuments`) is read and tokenized to `output_dir/tokens.bin` and `tokens.idx`. The tokenizer is in
    `output_dir/tokenizer` in all cases; one that lies there before, with no corpus yet, is that of imported weights and
    is used. Later calls use what is there, without a look at the source; a call that fails leaves what was there.

    Args:
        path: text file, `.jsonl` file, folder, `python-stdlib` or PREFIX.
        tokenizer_path: folder of a tokenizer; empty: that in `output_dir`, else train one with up to `vocab_size` ids.
        vocab_size: ids that the model knows, before padding.
        output_dir: folder of the run's corpus, made if missing.
        check: raises `UserError` where the tokens are not what the caller needs; the corpus is then not kept.
        flag: the flag that named the path, for error messages.

    Raises:
        UserError: the source or the tokenizer cannot be used; the tokenizer or a token id is too large for
            `vocab_size`; `output_dir` holds another tokenizer, the corpus of another source or something that is no
            corpus, or cannot be written.
    """
    folder = Path(output_dir)
    put_back(folder)
    if has_corpus(folder):
        _check_same_source(folder, path, tokenizer_path, flag)
        return open_corpus(folder, vocab_size)
    tokenizer = _choose_tokenizer(folder / "tokenizer", tokenizer_path, vocab_size)
    with folder_atomically(folder, ours=has_only_tokenizer) as new:
        if prefix := prepared_prefix(path, flag=flag):
            _adopt(prefix, tokenizer, tokenizer_path, vocab_size, new)
        else:
            _tokenize(TextDocuments(path, flag=flag), tokenizer, tokenizer_path, vocab_size, new)
        check(open_corpus(new, vocab_size).tokens)
    return open_corpus(folder, vocab_size)


def open_corpus(output_dir: str | Path, vocab_size: int) -> Corpus:
    """Open what `make_corpus` made; reads only, on any process.

    Raises:
        UserError: a file is missing, damaged or was changed; the tokenizer or a token id is too large for `vocab_size`.
    """
    folder = Path(output_dir)
    report = _read_report(folder)
    has_tokenizer = is_tokenizer_folder(folder / "tokenizer")
    tokenizer = _load_tokenizer(folder / "tokenizer", vocab_size) if has_tokenizer else None
    tokens = IndexedDataset(report.dataset or folder / "tokens")
    if tokens.num_tokens != report.tokens:
        raise UserError(f"{tokens.name} has {tokens.num_tokens} tokens, it had {report.tokens} when {folder} was made")
    if not report.dataset:
        tokens.name = report.source  # what the user knows it by
    if report.vocab_size > vocab_size:
        tokens.check_vocabulary(vocab_size)
    return Corpus(tokens, tokenizer, report)


def evaluation_tokens(path: str, tokenizer: Tokenizer, *, flag: str = "--data") -> TokenDocuments:
    """Tokens of any text or prepared dataset, for `EvaluationSamples`. A single text file is one document.

    Raises:
        UserError: the text or the dataset cannot be used.
    """
    prefix = prepared_prefix(path, flag=flag)
    if prefix is None:
        documents = TextDocuments(path, cut=False, flag=flag)
        return TokenDocuments.from_documents(_encode(documents, tokenizer), path)
    tokens = IndexedDataset(prefix)
    tokens.check_vocabulary(tokenizer.size)
    return tokens


def prepared_prefix(path: str, *, flag: str = "--data.path") -> Path | None:
    """The dataset PREFIX that a path names, as PREFIX, PREFIX.bin or PREFIX.idx; None if it names no dataset.

    Raises:
        UserError: only one of the two files exists.
    """
    named = Path(path)
    prefix = named.with_suffix("") if named.suffix in (".bin", ".idx") else named
    index_file, tokens_file = dataset_files(prefix)
    if index_file.is_file() and tokens_file.is_file():
        return prefix
    if (named == prefix and named.exists()) or not (index_file.is_file() or tokens_file.is_file()):
        return None
    raise UserError(f"{flag}: a prepared dataset is both {tokens_file} and {index_file}, only one of them exists")


def tokenizer_folder(prefix: str | Path) -> Path:
    """PREFIX.tokenizer, where `megajax prepare` leaves the tokenizer of a dataset."""
    return Path(f"{prefix}.tokenizer")


def has_corpus(output_dir: str | Path) -> bool:
    """Whether `make_corpus` made a corpus there."""
    return Path(output_dir, "report.json").is_file()  # written last


def has_only_tokenizer(output_dir: str | Path) -> bool:
    """Whether a folder has a tokenizer, that of imported weights, and nothing else."""
    folder = Path(output_dir)
    files = {name for names in BPE_FILES + WORDPIECE_FILES for name in names}
    return (
        [entry.name for entry in folder.iterdir()] == ["tokenizer"]
        and is_tokenizer_folder(folder / "tokenizer")
        and ({entry.name for entry in (folder / "tokenizer").iterdir()} <= files)
    )


def _choose_tokenizer(own: Path, tokenizer_path: str, vocab_size: int) -> Tokenizer | None:
    """The tokenizer that is given or lies in the folder `own` already, None where there is neither."""
    there = _load_tokenizer(own, vocab_size) if is_tokenizer_folder(own) else None
    given = _load_tokenizer(tokenizer_path, vocab_size) if tokenizer_path else None
    if there and given and there != given:
        raise UserError(f"--tokenizer.path {tokenizer_path}: not the tokenizer of the weights, {own}; leave it out")
    return given or there


def _adopt(prefix: Path, tokenizer: Tokenizer | None, tokenizer_path: str, vocab_size: int, folder: Path) -> None:
    """Record a dataset that was given tokenized."""
    beside = next((place for place in (tokenizer_folder(prefix), prefix.parent) if is_tokenizer_folder(place)), None)
    if tokenizer is None and beside:
        tokenizer = _load_tokenizer(beside, vocab_size)
    tokens = IndexedDataset(prefix)
    if tokenizer:
        tokenizer.save(folder / "tokenizer")
    tokens.check_vocabulary(vocab_size)
    report = CorpusReport(
        source=_absolute(str(prefix)),
        tokenizer_source=_absolute(tokenizer_path),
        dataset=_absolute(str(prefix)),
        vocab_size=vocab_size,
        documents=tokens.num_documents,
        tokens=tokens.num_tokens,
    )
    _write_report(folder, report)


def _tokenize(
    documents: TextDocuments, tokenizer: Tokenizer | None, tokenizer_path: str, vocab_size: int, folder: Path
) -> None:
    started = time.perf_counter()
    if tokenizer is None:
        tokenizer = train_tokenizer(evenly(documents, TRAINING_BYTES / max(documents.size, 1)), vocab_size)
    trained = time.perf_counter()
    num_tokens = 0
    with IndexedWriter(folder / "tokens", tokenizer.size) as writer:
        for ids in _encode(documents, tokenizer):
            writer.add_document(ids)
            num_tokens += len(ids)
    tokenizer.save(folder / "tokenizer")
    report = CorpusReport(
        source=_absolute(documents.path),
        tokenizer_source=_absolute(tokenizer_path),
        dataset="",
        vocab_size=tokenizer.size,
        documents=writer.num_documents,
        tokens=num_tokens,
        text_bytes=documents.report.num_bytes,
        skipped_files=documents.report.skipped_files,
        tokenizer_seconds=trained - started,
        encoding_seconds=time.perf_counter() - trained,
    )
    _write_report(folder, report)


def _encode(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.int32]]:
    """Ids of each document, int32 [length], end-of-text last."""
    for texts in in_parts(documents, _BATCH_CHARACTERS):
        for ids in tokenizer.encode_batch(texts):
            yield np.array([*ids, tokenizer.end_of_text], np.int32)


def evenly(documents: Iterable[str], share: float) -> Iterator[str]:
    """A share of the documents at even distances; all of them if it is 1 or more."""
    for number, text in enumerate(documents):
        if share >= 1 or int((number + 1) * share) > int(number * share):
            yield text


def _load_tokenizer(folder: str | Path, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer.size > vocab_size:
        raise UserError(
            f"--tokenizer.path: the tokenizer in {folder} has {tokenizer.size} ids; --model.vocab-size {vocab_size} "
            "must be at least that"
        )
    return tokenizer


def _absolute(path: str) -> str:
    return path if path in ("", STANDARD_LIBRARY) else str(Path(path).resolve())


def _write_report(folder: Path, report: CorpusReport) -> None:
    write_atomically(folder / "report.json", json.dumps(asdict(report), indent=1) + "\n")


def _read_report(folder: Path) -> CorpusReport:
    file = folder / "report.json"
    try:
        return CorpusReport(**json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        raise UserError(f"{file}: not the report of a corpus; delete {folder} to make the corpus again") from None


def _check_same_source(folder: Path, path: str, tokenizer_path: str, path_flag: str) -> None:
    report = _read_report(folder)
    source = _absolute(path)
    if report.dataset and report.dataset != source:  # PREFIX.bin and PREFIX.idx name it too
        source = str(prepared_prefix(source) or source)
    for flag, made_from, given in (
        (path_flag, report.source, source),
        ("--tokenizer.path", report.tokenizer_source, _absolute(tokenizer_path)),
    ):
        if made_from != given:
            raise UserError(f"{flag} {given!r}: {folder} was made from {made_from!r}; use that, or another --run-dir")
