"""Which folders are run directories: the names of what a run writes there, and the mark that makes it a run."""

import json
from pathlib import Path

from megajax.core.errors import UserError
from megajax.host import reading
from megajax.host.files import is_marked, write_atomically
from megajax.host.transcript import NAME, OLDER

FORMAT = 1  # of run directories and their checkpoints
MARK = "run.json"  # written before anything else
MARKED = json.dumps({"program": "megajax", "format": FORMAT}) + "\n"
IMPORTED = "imported.json"  # describes the original of imported weights (`convert/origin.py`)
FORMS = "forms.json"  # the forms of attention and products that were measured and chosen (`runs/forms.py`)
_PICTURES = ("loss.png", "experts.png")
OF_SAMPLES = ("order.json", "reference.npy")  # (`runs/order.py`, `training/reference.py`)
_FILES = ("config.toml", "metrics.jsonl", MARK, IMPORTED, FORMS, "run.lock", "tracking.json", NAME, OLDER)
_FOLDERS = ("processes", "data", "tokenizer", "checkpoints", "starts", "tensorboard", "wandb", "mlflow", "profile")
_ENTRIES = dict.fromkeys((*_FILES, *_PICTURES, *OF_SAMPLES), "a file") | dict.fromkeys(_FOLDERS, "a folder")


def mark(run_dir: Path) -> None:
    """Mark a folder as a run directory."""
    write_atomically(run_dir / MARK, MARKED)


def marked_format(run_dir: Path) -> int | None:
    """The format named in a folder's mark; None if it has none."""
    try:
        content = reading.parse_json(reading.read_bytes(run_dir / MARK).decode())
    except (OSError, ValueError):  # includes UserError
        return None
    number = content.get("format") if isinstance(content, dict) and content.get("program") == "megajax" else None
    return number if type(number) is int and number >= 1 else None


def check_format(run_format: int, name: str) -> None:
    """Refuse a format newer than ours."""
    if run_format > FORMAT:
        newer = f"was written by a newer version of megajax, in format {run_format}"
        raise UserError(f"{name} {newer}; valid: format {FORMAT}, or that version")


def entries(run_dir: Path) -> list[str]:
    """Sorted names in a folder, except an unfinished mark left by a killed process."""
    half = f"{MARK}.partial"
    return sorted(name for name in reading.names(run_dir) if name != half or not is_marked(run_dir / half))


def check_entries(run_dir: Path) -> None:
    """Check that every entry of a run is either absent or of the kind that a run writes. A link would lead to someone
    else's files, and old checkpoints are deleted."""
    for name, wanted in _ENTRIES.items():
        entry = run_dir / name
        kind = "a link" if entry.is_symlink() else reading.kind(entry)
        if kind not in ("", wanted):
            valid = f"{wanted}, or another --run-dir (the run directory itself may be a link)"
            raise UserError(f"--run-dir {run_dir}: {entry} is {kind}; valid: {valid}")


def check_outside_runs(path: Path, name: str) -> None:
    """Check that a new file or folder is neither among a run's entries nor in a folder that will be deleted; `name` is
    its flag or argument in error messages."""
    resolved = path.parent.resolve() / path.name
    for run_dir in resolved.parents:
        if is_marked(run_dir):
            raise UserError(f"{name} {path} lies in {run_dir}, which megajax deletes; valid: a place outside")
        entry = resolved.relative_to(run_dir).parts[0]
        if entry.partition(".partial")[0] in _ENTRIES and marked_format(run_dir) is not None:
            raise UserError(
                f"{name} {path} lies in the run directory {run_dir}, as its {entry}; valid: a place outside"
            )
