"""The report of a run's corpus: where the corpus came from, and the digests of its files.

Digests are also in the report that `megajax prepare` leaves beside a dataset.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax.data.digests import check_files, file_digest, root
from megajax.data.files import write_atomically
from megajax.data.tokenizers import TOKENIZER_FILES
from megajax.errors import UserError
from megajax.host import reading

TOKENS, _INDEX, _TOKENIZER = "tokens", "index", "tokenizer/"  # names of digests; the last one before a file's name
_BLOCKS = "tokens.digests"  # file with the digests of the tokens' blocks


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """Where a corpus came from and what it took to make; `report.json` in its folder."""

    source: str  # absolute path, or python-stdlib
    tokenizer_source: str  # absolute path of a given tokenizer; empty if it was trained, imported or there is none
    dataset: str  # PREFIX of a dataset that was given tokenized; empty if the tokens lie in the folder
    vocab_size: int  # all ids are below this
    documents: int
    tokens: int
    text_bytes: int = 0  # of the text in UTF-8; 0 for a dataset that was given tokenized
    skipped_files: int = 0  # files of a folder that are not UTF-8
    sentences: int = 0  # of documents that are cut in sentences; else 0
    single_sentence_documents: int = 0
    tokenizer_seconds: float = 0.0  # what training the tokenizer took
    encoding_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)  # of Megatron-LM's own datasets the tokenizer's only


def write_report(folder: Path, report: CorpusReport, blocks: npt.NDArray[np.uint8] | None) -> None:
    """Write the report of a corpus, which is then complete, and the digests of its blocks, if there are any."""
    if blocks is not None:
        write_atomically(folder / _BLOCKS, blocks.tobytes())
    write_atomically(folder / "report.json", json.dumps(asdict(report), indent=1) + "\n")


def read_report(folder: Path) -> CorpusReport:
    """The report of a corpus."""
    file = folder / "report.json"
    try:
        content = reading.parse_json(reading.read_bytes(file).decode())
        report = CorpusReport(**content)
        if not all(_is_valid(getattr(report, each.name), each.type) for each in fields(report)):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise UserError(f"{file}: not the report of a corpus; valid: the file as it was, or no {folder}") from None
    return report


def _is_valid(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind is int:
        return type(value) is int and 0 <= value < 1 << 63
    return isinstance(value, str) and "\0" not in value if kind is str else are_digests(value)


def are_digests(value: Any) -> bool:
    """Whether a value has the form of the digests of a report."""
    known = {TOKENS, _INDEX, *(_TOKENIZER + name for name in TOKENIZER_FILES)}
    return isinstance(value, dict) and value.keys() <= known and all(isinstance(each, str) for each in value.values())


def digests_of(index_file: Path, blocks: npt.NDArray[np.uint8] | None, tokenizer_folder: Path) -> dict[str, str]:
    """The digests for a report: of tokens and index, unless the tokens' blocks have none, and of the tokenizer."""
    found = {} if blocks is None else {TOKENS: root(blocks), _INDEX: file_digest(index_file)}
    return found | {_TOKENIZER + file.name: file_digest(file) for file in _tokenizer_files(tokenizer_folder)}


def _tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if reading.is_file(folder / name)]


def check_tokenizer(folder: Path, digests: Mapping[str, str], advice: str) -> None:
    """Compare the files of a tokenizer with the digests of a report, if it has any of them.

    `advice` says what to do where a file is missing, has changed, or was not there.
    """
    files = {folder / name.removeprefix(_TOKENIZER): digests[name] for name in digests if name.startswith(_TOKENIZER)}
    check_files(files, advice)
    others = set(_tokenizer_files(folder)) - files.keys()
    if files and others:
        raise UserError(f"{min(others)}: was not there when the tokenizer was written; {advice}")


def check_index(file: Path, digests: Mapping[str, str], advice: str) -> None:
    """Compare an index with the digests of a report, if it is in them; `advice` says what to do if it has changed."""
    if _INDEX in digests:
        check_files({file: digests[_INDEX]}, advice)


def read_blocks(folder: Path, report: CorpusReport, advice: str) -> npt.NDArray[np.uint8] | None:
    """The digests of a corpus's blocks, [B, 16]; None where the report has no digest of tokens."""
    if TOKENS not in report.digests:
        return None
    file = folder / _BLOCKS
    try:
        content = reading.read_bytes(file, 16 * (report.tokens // (1 << 15) + 1))  # of 8 bytes a token, the most
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; {advice}") from None
    if len(content) % 16 or root(np.frombuffer(content, np.uint8)) != report.digests[TOKENS]:
        raise UserError(f"{file}: not what was written; {advice}")
    return np.frombuffer(content, np.uint8).reshape(-1, 16)
