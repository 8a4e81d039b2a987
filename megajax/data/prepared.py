"""Prepared datasets, PREFIX.bin and PREFIX.idx: Megatron-LM's, or those of `megajax prepare`, which have a report
beside them, PREFIX.report.json, with digests of their files."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from megajax.data.digests import TOKENS, are_digests, block_digests, check_index, check_tokenizer, root
from megajax.data.indexed import IndexedDataset, dataset_files, open_dataset
from megajax.errors import UserError
from megajax.host import reading
from megajax.host.paths import scheme

_REPORT_BYTES = 1 << 28  # of a report, which lists the input


def prepared_prefix(path: str, *, flag: str = "--data.path") -> Path | None:
    """The dataset PREFIX that a path names, as PREFIX, PREFIX.bin or PREFIX.idx; None if it names no dataset."""
    if scheme(path):  # text: a dataset is mapped into memory
        return None
    named = Path(path)
    prefix = named.with_suffix("") if named.suffix in (".bin", ".idx") else named
    index_file, tokens_file = dataset_files(prefix)
    there = reading.is_file(index_file), reading.is_file(tokens_file)
    if all(there):
        return prefix
    if (named == prefix and reading.kind(named)) or not any(there):
        return None
    raise UserError(f"{flag}: only one of {tokens_file} and {index_file} exists; valid: both, a prepared dataset")


def tokenizer_folder(prefix: str | Path) -> Path:
    """PREFIX.tokenizer, where `megajax prepare` leaves the tokenizer of a dataset."""
    return Path(f"{prefix}.tokenizer")


def check_sequences(tokens: IndexedDataset, prefix: Path, *, sentences: bool, flag: str) -> None:
    """Check whether documents are cut in sentences, which at least one document of several sequences shows."""
    cut = bool((np.diff(tokens.document_index) > 1).any())
    if sentences and not cut:
        raise UserError(
            f"{flag}: every document of {prefix} is one sequence; valid: documents cut in sentences, by "
            "megajax prepare --split-sentences"
        )
    if cut and not sentences:
        raise UserError(
            f"{flag}: the documents of {prefix} are cut in sentences, which only BERT reads; valid: a dataset made "
            "without --split-sentences"
        )


def open_prepared(prefix: Path) -> tuple[IndexedDataset, npt.NDArray[np.uint8] | None]:
    """A dataset, checked against the digests that `megajax prepare` wrote, and the digests of its blocks, [B, 16]; None
    in their place where there are none: the dataset is Megatron-LM's own."""
    expected = _digests(prefix)
    if not expected:
        return IndexedDataset(prefix), None
    index_file, tokens_file = dataset_files(prefix)
    advice = (
        "valid: the files that megajax prepare wrote (with --overwrite it makes them again), or without "
        f"{prefix}.report.json any others"
    )
    check_index(index_file, expected, advice)
    if reading.is_folder(tokenizer_folder(prefix)):
        check_tokenizer(tokenizer_folder(prefix), expected, advice)
    tokens = open_dataset(prefix, advice)
    blocks = block_digests(tokens.tokens)
    if root(blocks) != expected.get(TOKENS):
        raise UserError(f"{tokens_file}: not what was written; {advice}")
    return tokens, blocks


def _digests(prefix: Path) -> dict[str, str]:
    """The digests in the PREFIX.report.json of `megajax prepare`; empty if there is no such report."""
    file = Path(f"{prefix}.report.json")
    if not reading.kind(file):
        return {}
    report = reading.read_json(file, _REPORT_BYTES)
    digests = report.get("digests", {}) if isinstance(report, dict) and "plan" in report else {}
    if not are_digests(digests):
        raise UserError(f"{file}: its digests are damaged; valid: the report that megajax prepare wrote, or none")
    return digests
