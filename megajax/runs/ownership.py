"""Whose a run directory is: training takes only one of this program, or an empty one."""

import json
import os
import re
from pathlib import Path
from typing import Any

from megajax import reading
from megajax.data.corpus import has_only_tokenizer
from megajax.data.files import is_marked, write_atomically
from megajax.data.tokenizers import TOKENIZER_FILES
from megajax.errors import UserError
from megajax.preset_files import is_of_run, parse_toml, read_file
from megajax.runs.formats import FORMAT
from megajax.runs.metrics import is_metrics
from megajax.runs.parts import MARK, marked_format


def mark(run_dir: Path) -> None:
    """Say that a folder is the directory of a run in today's format.

    Raises:
        UserError: it cannot be written.
    """
    write_atomically(run_dir / MARK, json.dumps({"program": "megajax", "format": FORMAT}) + "\n")


def entries(run_dir: Path) -> list[str]:
    """Names of what is in a folder, sorted, without a mark that a killed process did not finish."""
    half = f"{MARK}.partial"
    return sorted(entry for entry in _names(run_dir) if entry != half or not is_marked(run_dir / half))


def run_format(run_dir: Path) -> int | None:
    """The format of the run in a folder, None where there is no run."""
    if os.path.lexists(run_dir / MARK):
        return marked_format(run_dir)
    return 1 if _is_unmarked_run(run_dir) else None


def _is_unmarked_run(folder: Path) -> bool:
    """Whether a folder is of format 1, which had no mark: all that training would touch there must be a run's."""
    parts = {"config.toml": _is_config, "metrics.jsonl": is_metrics, "checkpoints": _is_checkpoints, "data": _is_data}
    names = _names(folder)
    if not all(is_own(folder / name) for name, is_own in parts.items() if name in names):
        return False
    if "config.toml" in names:
        return bool(names & {"metrics.jsonl", "checkpoints"})
    # Killed before the configuration was written, which came late: then nothing else may be there.
    if not names <= {*parts, "tensorboard", "data.partial", "config.toml.partial", "metrics.jsonl.partial"}:
        return False
    if "data.partial" in names and not _is_half_a_corpus(folder / "data.partial"):
        return False
    return "data.partial" in names or ("data" in names and not has_only_tokenizer(folder / "data"))


def _is_config(file: Path) -> bool:
    """Whether a file is a configuration with every value, as training leaves one, not one that somebody wrote."""
    try:
        return is_of_run(parse_toml(read_file(str(file)), str(file)))
    except UserError:
        return False


def _is_checkpoints(folder: Path) -> bool:
    """Whether a folder holds nothing but checkpoints, whole, set aside or half written."""

    def is_checkpoint(entry: Path) -> bool:
        if not entry.is_dir():
            return False
        inside = {part.name for part in entry.iterdir()}
        parts = {"state", "digest", "_CHECKPOINT_METADATA", "commit_success.txt", "files.json"}
        return ".orbax-checkpoint-tmp" in entry.name or (bool(_CHECKPOINT.fullmatch(entry.name)) and inside <= parts)

    return folder.is_dir() and all(map(is_checkpoint, folder.iterdir()))


_CHECKPOINT = re.compile(r"[0-9]+|damaged-[0-9]+-[0-9]+")


def _is_data(folder: Path) -> bool:
    """Whether a folder holds a corpus, or several with their tokenizer, or the tokenizer of imported weights."""
    report = _json(folder / "report.json")
    if isinstance(report, dict) and report.keys() >= {"source", "tokenizer_source", "dataset", "vocab_size", "tokens"}:
        return True

    def is_part(entry: Path) -> bool:
        if entry.name == "tokenizer":
            return _names(entry) <= _TOKENIZER
        if entry.name.endswith(".partial"):
            return _is_half_a_corpus(entry)
        return bool(_CORPUS.fullmatch(entry.name)) and _is_data(entry)

    return folder.is_dir() and all(map(is_part, folder.iterdir()))


_CORPUS = re.compile(r"source-[0-9]+|validation-[A-Za-z0-9_-]+")
_TOKENIZER = {name + suffix for name in TOKENIZER_FILES for suffix in ("", ".partial")}
_HALF = {name + suffix for name in ("tokens.bin", "tokens.idx", "report.json") for suffix in ("", ".partial")}


def _is_half_a_corpus(folder: Path) -> bool:
    """Whether a folder holds no more than what was there while a corpus was made."""
    return folder.is_dir() and _names(folder) <= _HALF | {"tokenizer"} and _names(folder / "tokenizer") <= _TOKENIZER


def _names(folder: Path) -> set[str]:
    return reading.names(folder)


def _json(file: Path) -> Any:
    try:
        return reading.parse_json(reading.read_bytes(file).decode())
    except (OSError, ValueError):
        return None
