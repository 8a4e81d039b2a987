"""The kinds of text sources, and how to find the files of a source."""

import ast
import contextlib
import inspect
import itertools
import os
import re
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from megajax.core.errors import Damaged, UserError
from megajax.data.text import streams
from megajax.data.text.hub_split import SCHEME as HUB
from megajax.data.text.hub_split import HubSplit
from megajax.host import reading, remote
from megajax.host.paths import apart, check_path, scheme
from megajax.host.remote import RemoteFile

Input = Path | RemoteFile | HubSplit  # a file, or something that is read like one

STANDARD_LIBRARY = "python-stdlib"  # the .py files of the running Python's standard library
DOCSTRINGS = "python-docstrings"  # the prose in these files
WORDS = (STANDARD_LIBRARY, DOCSTRINGS)

# By the suffix of a name, without that of a compression: files that would be read as text, or left out, without a word.
_OTHER_FORMATS = {
    **dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz"), ("an archive of files", "a folder with its files")),
    ".arrow": ("Arrow's, as Dataset.save_to_disk writes it", "Parquet, as Dataset.to_parquet writes it"),
}
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TOPICS = "pydoc_data", "topics.py"
_BLANK_LINES = re.compile(r"\n\s*\n")


def check_input(path: str, flag: str) -> None:
    """Check that a path or URL is well formed, whether or not it exists."""
    if path in WORDS:
        return
    if scheme(path) == HUB:
        HubSplit.parse(path, flag)
    elif scheme(path):
        remote.file_system(path, flag)
    else:
        check_path(path, flag)


def find_inputs(path: str, flag: str) -> tuple[list[Input], bool]:
    """The files of a source, in order, and whether the source is a single file instead of a folder."""
    files, is_file = _find(path, flag)
    check_formats(files, flag)
    return files, is_file


def _find(path: str, flag: str) -> tuple[list[Input], bool]:
    if not path:
        raise UserError(f"{flag} is not given; {valid_paths(flag)}")
    if path in WORDS:
        with readable(library_folder(), flag):
            library = files_below(library_folder(), _SKIPPED_FOLDERS, follow=False)
        return [file for file in library if file.suffix == ".py"], False
    if scheme(path) == HUB:
        return [HubSplit.parse(path, flag)], True
    if scheme(path):
        remotes, is_file = remote.find(path, flag)
        if path.endswith((".bin", ".idx")) or (not remotes and remote.find(f"{path}.idx", flag)[1]):
            raise UserError(
                f"{flag} {path}: a prepared dataset is mapped into memory, so it must be on a file "
                "system; valid: a local copy"
            )
        if not remotes:
            raise UserError(f"{flag}: {path} does not exist; {valid_paths(flag)}")
        return [*remotes], is_file
    root = Path(path)
    kind = reading.kind(root)
    if kind == "a folder":
        with readable(root, flag):
            return [*files_below(root)], False
    if kind == "a file":
        return [root], True
    several = "" if flag.startswith("--data.") else apart(path, os.path.exists)  # of which each is one path
    raise UserError(f"{flag}: {path} {f'is {kind}' if kind else 'does not exist'}; {valid_paths(flag)}{several}")


def absolute(path: str) -> str:
    """The absolute path of a source; words and URLs stay as they are."""
    return path if path in ("", *WORDS) or scheme(path) else str(Path(path).absolute())


def size_of(file: Input) -> int:
    """Size of a file in bytes, or 0 if unknown."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def check_formats(files: Iterable[Input], flag: str) -> None:
    """Refuse files in formats that are not read, by their names."""
    for file in files:
        if not isinstance(file, HubSplit) and (found := _OTHER_FORMATS.get(streams.inner_suffix(file))):
            raise UserError(f"{flag}: {file} is {found[0]}; valid: {found[1]}")


def identity(file: Input) -> list[Any]:
    """What identifies the contents of a file, as JSON values."""
    if isinstance(file, Path):
        return [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
    if isinstance(file, RemoteFile):
        return [file.url, file.size, file.version]
    return [file.url, *file.identity]


def valid_paths(flag: str) -> str:
    """What a flag for texts accepts, in words."""
    prepared = "a prepared PREFIX (of PREFIX.bin and PREFIX.idx), " if flag.startswith("--data") else ""
    files = "a .jsonl, .json, .csv or .parquet file or a folder (.gz, .zst, .bz2 and .xz too)"
    elsewhere = "any of these at gs:// or s3://, hf://NAME"
    return f"valid: a UTF-8 text file, {files}, {elsewhere}, {prepared}or the word {' or '.join(WORDS)}"


@contextlib.contextmanager
def readable(path: object, flag: str) -> Iterator[None]:
    """Turn everything that goes wrong while reading a file or folder in the `with` block into `UserError`."""
    try:
        yield
    except reading.TooLong as error:
        raise UserError(f"{flag}: {path}: {error}") from None
    except streams.Undecodable as error:
        raise Damaged(f"{flag}: {path}", f"truncated or damaged: {error}", "the complete file") from None
    except OSError as error:
        problem = f"cannot read {error.filename or path}: {error.strerror or error}"
        raise UserError(f"{flag}: {problem}; valid: files to read") from None


def read_folders(path: str, flag: str) -> list[Path]:
    """The folder of a source, and folders elsewhere that links below it lead to; empty if it is not a folder."""
    if path in WORDS or scheme(path) or not reading.is_folder(path):
        return []
    with readable(path, flag):
        return _walk(Path(path))[1]


def files_below(root: Path, skip: Collection[str] = (), *, follow: bool = True) -> list[Path]:
    """Regular files below `root`, except hidden ones and the folders named in `skip`, sorted by path.

    With `follow`, links to folders are followed, but each folder is read once: at its own place, or else through the
    first link. Raises `OSError` if a folder cannot be read or, with `follow`, a link is broken.
    """
    files, _ = _walk(root, skip, follow=follow)
    for path in sorted(filter(Path.is_symlink, files)) if follow else ():
        try:
            path.stat()
        except OSError as error:
            problem = f"a link to {os.readlink(path)}: {error.strerror}"
            raise OSError(error.errno, problem, str(path)) from None
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)


def _walk(root: Path, skip: Collection[str] = (), *, follow: bool = True) -> tuple[list[Path], list[Path]]:
    """Everything below `root` that is not a folder; and `root` with all followed links to folders."""

    def fail(error: OSError) -> NoReturn:
        raise error

    files: list[Path] = []
    read: set[str] = set()
    tops, all_tops = [root], [root]
    while tops:
        links: list[Path] = []
        for folder, subfolders, names in itertools.chain.from_iterable(os.walk(top, onerror=fail) for top in tops):
            real = os.path.realpath(folder)
            seen = real in read
            read.add(real)
            subfolders[:] = [name for name in subfolders if not (seen or name.startswith(".") or name in skip)]
            links += [path for name in subfolders if (path := Path(folder, name)).is_symlink()]
            files += [Path(folder, name) for name in names if not (seen or name.startswith("."))]
        tops = sorted(links, key=lambda link: link.parts) if follow else []
        all_tops += tops
    return files, all_tops


def library_folder() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


def prose(file: Path, source: bytes) -> list[str]:
    """The prose in a source file, as documents.

    One document has the docstrings of the module, its classes and functions, in order and separated by blank lines,
    without repeated docstrings and paragraphs with interactive examples (`>>>`). In the file with pydoc's topics (the
    language reference) every topic is a document. There are none if this Python cannot parse the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if file.parts[-2:] == _TOPICS:
        values = [value for node in ast.walk(tree) if isinstance(node, ast.Dict) for value in node.values]
        texts = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        return [text for value in texts if (text := _without_examples(value))]
    found: dict[str, None] = {}
    _collect(tree, found)
    return ["\n\n".join(found)] if found else []


def _without_examples(text: str) -> str:
    return "\n\n".join(part for part in _BLANK_LINES.split(text) if ">>>" not in part).strip()


def _collect(node: ast.AST, texts: dict[str, None]) -> None:
    text = None
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node, clean=False)
    if text and (words := _without_examples(inspect.cleandoc(text))):
        texts[words] = None
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            _collect(child, texts)
