"""What the folder of a run's corpus says of itself: where the corpus came from, and the digests of its files.

Digests are also in the report that `megajax prepare` leaves beside a dataset. Corpora of before have none.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megajax import reading
from megajax.data.digests import check_files, file_digest, root
from megajax.data.files import file_atomically, write_atomically
from megajax.data.tokenizers import TOKENIZER_FILES
from megajax.errors import UserError

TOKENS, _INDEX, _TOKENIZER = "tokens", "index", "tokenizer/"  # names of digests; the last one before a file's name


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
        sentences: of documents that are cut in sentences; else 0.
        single_sentence_documents: those of them with one.
        tokenizer_seconds: what training the tokenizer took.
        encoding_seconds: what tokenizing took.
        digests: of tokens, index and the tokenizer's files; of Megatron-LM's own datasets the tokenizer's only.
    """

    source: str
    tokenizer_source: str
    dataset: str
    vocab_size: int
    documents: int
    tokens: int
    text_bytes: int = 0
    skipped_files: int = 0
    sentences: int = 0
    single_sentence_documents: int = 0
    tokenizer_seconds: float = 0.0
    encoding_seconds: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)


def tokenizer_part(digests: Mapping[str, str]) -> dict[str, str]:
    """The digests of a tokenizer's files, by their names."""
    return {name.removeprefix(_TOKENIZER): found for name, found in digests.items() if name.startswith(_TOKENIZER)}


def write_report(folder: Path, report: CorpusReport) -> None:
    """Write the report of a corpus."""
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
    """Whether a value may be the digests of a report."""
    known = {TOKENS, _INDEX, *(_TOKENIZER + name for name in TOKENIZER_FILES)}
    return isinstance(value, dict) and value.keys() <= known and all(isinstance(each, str) for each in value.values())


def digests_of(index_file: Path, blocks: npt.NDArray[np.uint8] | None, tokenizer_folder: Path) -> dict[str, str]:
    """The digests for a report, of what there is.

    Where `blocks`, the digests of the blocks of its tokens, is None, neither tokens nor index have a digest.
    """
    found = {} if blocks is None else {TOKENS: root(blocks), _INDEX: file_digest(index_file)}
    files = _tokenizer_files(tokenizer_folder)
    return found | {_TOKENIZER + name: file_digest(tokenizer_folder / name) for name in files}


def _tokenizer_files(folder: Path) -> list[str]:
    return [name for name in TOKENIZER_FILES if reading.is_file(folder / name)]


def check_tokenizer(folder: Path, digests: Mapping[str, str], advice: str) -> None:
    """Compare the files of a tokenizer with their digests by name; nothing is checked where there are none."""
    if not digests:
        return
    check_files({folder / name: expected for name, expected in digests.items()}, advice)
    others = set(_tokenizer_files(folder)) - digests.keys()
    if others:
        raise UserError(f"{folder / min(others)}: was not there when the tokenizer was written; {advice}")


def write_blocks(folder: Path, blocks: npt.NDArray[np.uint8]) -> None:
    """Write the digests of a corpus's blocks beside its report."""
    file = folder / "tokens.digests"
    try:
        with file_atomically(file) as new:
            new.write_bytes(blocks.tobytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}; valid: a writable place with room") from None


def read_blocks(folder: Path, report: CorpusReport, advice: str) -> npt.NDArray[np.uint8] | None:
    """What `write_blocks` wrote; None where the report has no digest of tokens."""
    if TOKENS not in report.digests:
        return None
    file = folder / "tokens.digests"
    try:
        content = reading.read_bytes(file, 16 * (report.tokens // (1 << 15) + 1))  # of 8 bytes a token, the most
        blocks = np.frombuffer(content, np.uint8).reshape(-1, 16)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; {advice}") from None
    except ValueError:
        raise UserError(f"{file}: not what was written; {advice}") from None
    if root(blocks) != report.digests[TOKENS]:
        raise UserError(f"{file}: not what was written; {advice}")
    return blocks


def check_index(file: Path, digests: Mapping[str, str], advice: str) -> None:
    """Compare an index with its digest, if there is one."""
    if _INDEX in digests:
        check_files({file: digests[_INDEX]}, advice)
