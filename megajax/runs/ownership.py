"""Whose a run directory is: training takes only one of this program, or an empty one."""

import json
import os
import re
from pathlib import Path
from typing import Any

from megajax.data.corpus import has_only_tokenizer
from megajax.data.files import is_marked, write_atomically
from megajax.errors import UserError
from megajax.presets import read_toml
from megajax.runs.formats import FORMAT

MARK = "run.json"  # written before anything else


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


def marked_format(run_dir: Path) -> int | None:
    """The format that the mark of a folder names, None where there is no mark."""
    content = _json(run_dir / MARK)
    if isinstance(content, dict) and content.get("program") == "megajax" and isinstance(content.get("format"), int):
        return content["format"]
    return None


def run_format(run_dir: Path) -> int | None:
    """The format of the run in a folder, None where there is no run."""
    if os.path.lexists(run_dir / MARK):
        return marked_format(run_dir)
    return 1 if _is_unmarked_run(run_dir) else None


def _is_unmarked_run(folder: Path) -> bool:
    """Whether a folder is of format 1, which had no mark: all that training would touch there must be a run's."""
    parts = {"config.toml": _is_config, "metrics.jsonl": _is_metrics, "checkpoints": _is_checkpoints, "data": _is_data}
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


_TABLES = {"model", "mesh", "pipeline", "train", "optimizer", "data", "tokenizer", "checkpoint", "sample"}
_VALUES = {"seed", "precision", "run_dir", "resume", "simulate_devices"}


def _is_config(file: Path) -> bool:
    """Whether a file is a configuration with every value, as training leaves one, not one that somebody wrote."""
    try:
        content = read_toml(file)
    except UserError:
        return False
    return content.keys() >= _TABLES | _VALUES and all(isinstance(content[name], dict) for name in _TABLES)


def _is_metrics(file: Path) -> bool:
    """Whether every whole line of a file is one of metrics.jsonl."""

    def is_record(line: bytes) -> bool:
        try:
            record = json.loads(line)
        except ValueError:
            return False
        return isinstance(record, dict) and "step" in record and bool(record.keys() & {"loss", "validation_loss"})

    return file.is_file() and all(map(is_record, file.read_bytes().split(b"\n")[:-1]))


def _is_checkpoints(folder: Path) -> bool:
    """Whether a folder holds nothing but checkpoints, whole, set aside or half written."""

    def is_checkpoint(entry: Path) -> bool:
        if not entry.is_dir():
            return False
        inside = {part.name for part in entry.iterdir()}
        parts = {"state", "digest", "_CHECKPOINT_METADATA", "commit_success.txt"}
        return ".orbax-checkpoint-tmp" in entry.name or (bool(_CHECKPOINT.fullmatch(entry.name)) and inside <= parts)

    return folder.is_dir() and all(map(is_checkpoint, folder.iterdir()))


_CHECKPOINT = re.compile(r"\d+|damaged-\d+-\d+")


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


_CORPUS = re.compile(r"source-\d+|validation-[A-Za-z0-9_-]+")
_TOKENIZER = {name + suffix for name in ("vocab.json", "merges.txt", "vocab.txt") for suffix in ("", ".partial")}
_HALF = {name + suffix for name in ("tokens.bin", "tokens.idx", "report.json") for suffix in ("", ".partial")}


def _is_half_a_corpus(folder: Path) -> bool:
    """Whether a folder holds no more than what was there while a corpus was made."""
    return folder.is_dir() and _names(folder) <= _HALF | {"tokenizer"} and _names(folder / "tokenizer") <= _TOKENIZER


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
