"""What a text source may be, and the files that one names."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from megajax import reading, remote
from megajax.data.hub_split import SCHEME as HUB
from megajax.data.hub_split import HubSplit
from megajax.data.library import SKIPPED_FOLDERS, WORDS, library_folder
from megajax.errors import UserError
from megajax.paths import check_path, scheme
from megajax.remote import RemoteFile

Input = Path | RemoteFile | HubSplit  # one file, or what is read like one


def check_input(path: str, flag: str) -> None:
    """Check that one can say whether text is at a path; whether it is does not matter.

    Raises:
        UserError: as `check_path`; what its scheme needs is not known or not installed.
    """
    if path in WORDS:
        return
    if scheme(path) == HUB:
        HubSplit.parse(path, flag)
    elif scheme(path):
        remote.check_scheme(path, flag)
    else:
        check_path(path, flag)


def find_inputs(path: str, flag: str) -> tuple[list[Input], bool]:
    """The files of a source, in order, and whether it names a file itself.

    Raises:
        UserError: nothing is there.
        OSError: a folder cannot be read.
    """
    if not path:
        raise UserError(f"{flag} is not given; {valid_paths(flag)}")
    if path in WORDS:
        return [file for file in _below(library_folder(), skip=SKIPPED_FOLDERS) if file.suffix == ".py"], False
    if scheme(path) == HUB:
        return [HubSplit.parse(path, flag)], True
    if scheme(path):
        return _remote(path, flag)
    root = Path(path)
    kind = reading.kind(root)
    if kind == "a folder":
        return [*_below(root)], False
    if kind == "a file":
        return [root], True
    raise UserError(f"{flag}: {path} {f'is {kind}' if kind else 'does not exist'}; {valid_paths(flag)}")


def _remote(url: str, flag: str) -> tuple[list[Input], bool]:
    found, is_file = remote.find(url, flag)
    datasets = [url] if url.endswith((".bin", ".idx")) else []
    if not found and remote.find(f"{url}.idx", flag)[1]:
        datasets = [url]
    if datasets:
        raise UserError(
            f"{flag} {url}: a prepared dataset is mapped into memory where it lies; valid: a copy on a file system"
        )
    if not found:
        raise UserError(f"{flag}: {url} does not exist; {valid_paths(flag)}")
    return [*found], is_file


def size_of(file: Input) -> int:
    """Bytes of a file, or 0: that is not known."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def identity(file: Input) -> list[Any]:
    """What changes when a file does, as JSON."""
    if isinstance(file, Path):
        return [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
    if isinstance(file, RemoteFile):
        return [file.url, file.size, file.version]
    return [file.url, *file.identity]


def valid_paths(flag: str) -> str:
    """What a flag of text takes, in words."""
    prepared = "a prepared PREFIX (of PREFIX.bin and PREFIX.idx), " if flag.startswith("--data") else ""
    files = "a .jsonl or .parquet file or a folder of them (.gz and .zst too)"
    elsewhere = "these at gs:// or s3://, hf://NAME"
    return f"valid: UTF-8 text as a file, {files}, {elsewhere}, {prepared}or the word {' or '.join(WORDS)}"


def raise_unreadable(flag: str, error: OSError, path: object) -> NoReturn:
    """Raise a `UserError` for an error of reading `path`."""
    raise UserError(
        f"{flag}: cannot read {error.filename or path}: {error.strerror or error}; valid: files to read"
    ) from None


def _below(root: Path, skip: Iterable[str] = ()) -> list[Path]:
    """Regular files below `root`, hidden ones and the folders named in `skip` left out, in the order of their paths."""

    def fail(error: OSError) -> NoReturn:
        raise error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)
