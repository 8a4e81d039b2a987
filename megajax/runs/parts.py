"""What a run directory consists of, each part under its own name, and the mark that makes it one."""

from pathlib import Path

from megajax import reading
from megajax.data.files import is_marked
from megajax.errors import UserError

MARK = "run.json"  # written before anything else
IMPORTED = "imported.json"  # what a model in another format was, of which the weights are (`convert/origin.py`)
_PARTS = {
    "config.toml": "a file",
    "metrics.jsonl": "a file",
    "loss.png": "a file",
    MARK: "a file",
    IMPORTED: "a file",
    "run.lock": "a file",
    "processes": "a folder",
    "data": "a folder",
    "checkpoints": "a folder",
    "tensorboard": "a folder",
    "tracking.json": "a file",
    "wandb": "a folder",
    "mlflow": "a folder",
    "profile": "a folder",
}


def check_parts(run_dir: Path) -> None:
    """Check that what a run writes in its directory is there as it wrote it, or not there: a link would lead to what is
    somebody else's, and old checkpoints are removed.

    Raises:
        UserError: a part is a link, or a file in the place of a folder.
    """
    for name, wanted in _PARTS.items():
        part = run_dir / name
        there = "a link" if part.is_symlink() else reading.kind(part)
        if there not in ("", wanted):
            raise UserError(
                f"--run-dir {run_dir}: {part} is {there}; valid: {wanted}, or another --run-dir (the run directory "
                "itself may be a link)"
            )


def check_outside_runs(path: Path, name: str) -> None:
    """Check that a file or folder to make does not lie among the parts of a run, or in a folder that will be removed.

    Args:
        path: what is to be made.
        name: of its flag or argument, for error messages.

    Raises:
        UserError: it does.
    """
    place = path.parent.resolve() / path.name
    for run_dir in place.parents:
        if is_marked(run_dir):
            raise UserError(f"{name} {path} lies in {run_dir}, which megajax removes; valid: a place outside")
        part = place.relative_to(run_dir).parts[0]
        if part.partition(".partial")[0] in _PARTS and marked_format(run_dir) is not None:
            raise UserError(f"{name} {path} lies in the run directory {run_dir}, as its {part}; valid: a place outside")


def marked_format(run_dir: Path) -> int | None:
    """The format that the mark of a folder names, None where there is no mark."""
    try:
        content = reading.parse_json(reading.read_bytes(run_dir / MARK).decode())
    except (OSError, ValueError):  # a UserError is one, too
        return None
    number = content.get("format") if isinstance(content, dict) and content.get("program") == "megajax" else None
    return number if type(number) is int and number >= 1 else None
