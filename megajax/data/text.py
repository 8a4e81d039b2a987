"""Documents of plain text from files, JSONL files, folders and the Python standard library."""

import codecs
import json
import mmap
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megajax.data.tokenizer import END_OF_TEXT
from megajax.errors import UserError

STANDARD_LIBRARY = "python-stdlib"
"""Name that stands for the `.py` files of the running Python's standard library."""

DOCUMENT_CHARACTERS = 4096
"""Characters after which a single text file is cut at the next blank line."""

_VALID_PATHS = (
    "give UTF-8 text as a file, a .jsonl file or a folder of them, a prepared PREFIX (of PREFIX.bin and PREFIX.idx), "
    f"or the word {STANDARD_LIBRARY}"
)
_NOT_LIBRARY_CODE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
_BLOCK_BYTES = 1 << 20


@dataclass
class TextReport:
    """What one pass over a text source read."""

    files: int = 0
    documents: int = 0
    num_bytes: int = 0  # of UTF-8, in the documents
    skipped_files: int = 0  # files of a folder that are not UTF-8


class TextDocuments:
    """The documents of a text source; every iteration reads the source once more, from its start.

    - A folder: all files below it, except hidden ones, in the order of their paths. Each file is one document; files
      that are not UTF-8 are skipped and counted in `report.skipped_files`.
    - A `.jsonl` file, named or in a folder: one document per line, `{"text": …}`. A broken line is an error.
    - `python-stdlib`: the `.py` files of the running Python's standard library, without tests and installed packages.
    - Any other file is plain text. Where it contains `<|endoftext|>`, that separates its documents. Otherwise it is cut
      in several documents, so that a split by document is possible: each ends at the first blank line after 4096
      characters (in a short file: after a sixteenth of it), or, where no blank line follows within three times as many,
      at a line end or a space. Nothing is lost: the pieces joined are the file.

    Documents of white space only are left out.

    Args:
        path: a file, a folder, or `python-stdlib`.
        cut: False to keep a single text file whole, as one document.
        flag: the flag that named the path, for error messages.

    Raises:
        UserError: the path is missing or neither file nor folder. While iterating: a file cannot be read; a named text
            file is not UTF-8; a line of JSONL is broken; there is no text at all.
    """

    def __init__(self, path: str | Path, *, cut: bool = True, flag: str = "--data.path") -> None:
        self.path = str(path)
        self.report = TextReport()
        """Counts of the latest iteration."""
        self._cut = cut
        self._flag = flag
        if not self.path:
            raise UserError(f"{flag} is not given; {_VALID_PATHS}")
        root = Path(path)
        try:
            if self.path == STANDARD_LIBRARY:
                root = Path(sysconfig.get_path("stdlib"))
                self._files = [file for file in _files(root, skip=_NOT_LIBRARY_CODE) if file.suffix == ".py"]
            elif root.is_dir():
                self._files = _files(root)
            elif root.is_file():
                self._files = [root]
            elif root.exists():
                raise UserError(f"{flag}: {path} is neither a file nor a folder")
            else:
                raise UserError(f"{flag}: {path} does not exist; {_VALID_PATHS}")
            self._is_file = self._files == [root]
            self.size = sum(file.stat().st_size for file in self._files)
            """Bytes of all files."""
        except OSError as error:
            self._unreadable(error)

    def __iter__(self) -> Iterator[str]:
        self.report = report = TextReport()
        try:
            for text in self._texts(report):
                if text and not text.isspace():
                    report.documents += 1
                    report.num_bytes += len(text.encode())
                    yield text
        except OSError as error:
            self._unreadable(error)
        if not report.documents:
            skipped = f" ({report.skipped_files} files are not UTF-8)" if report.skipped_files else ""
            raise UserError(f"{self._flag}: {self.path} contains no text{skipped}; {_VALID_PATHS}")

    def _texts(self, report: TextReport) -> Iterator[str]:
        for file in self._files:
            report.files += 1
            if file.suffix.lower() == ".jsonl":
                yield from _jsonl(file)
            elif self._is_file:
                yield from _single_file(file, self._flag, self._cut)
            else:
                try:
                    yield file.read_bytes().decode().removeprefix("\ufeff")
                except UnicodeDecodeError:
                    report.files -= 1
                    report.skipped_files += 1

    def _unreadable(self, error: OSError) -> NoReturn:
        raise UserError(f"{self._flag}: cannot read {error.filename or self.path}: {error.strerror}") from None


def _files(root: Path, skip: Iterable[str] = ()) -> list[Path]:
    """Regular files below `root`, hidden ones and the folders named in `skip` left out, in the order of their paths."""

    def fail(error: OSError) -> NoReturn:
        raise error

    files = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)


def _jsonl(file: Path) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                text = record["text"]
                text.encode()  # escapes such as \ud800 are valid JSON but no text
            except json.JSONDecodeError as error:
                problem = f"not JSON: {error.msg} at column {error.colno}"
            except (ValueError, RecursionError) as error:
                problem = str(error)
            except (KeyError, TypeError, AttributeError):
                problem = 'no text under the key "text"'
            else:
                yield text
                continue
            raise UserError(f'{file}:{number}: {problem}; each line must be {{"text": …}} in UTF-8')


def _single_file(file: Path, flag: str, cut: bool) -> Iterator[str]:
    blocks = _decoded(file, flag)
    if not cut:
        yield "".join(blocks)
    elif _contains(file, END_OF_TEXT.encode()):
        yield from _separated(blocks, END_OF_TEXT)
    else:
        yield from _pieces(blocks, target=min(DOCUMENT_CHARACTERS, file.stat().st_size // 16 + 1))


def _contains(file: Path, wanted: bytes) -> bool:
    if file.stat().st_size == 0:
        return False
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(wanted) >= 0


def _decoded(file: Path, flag: str) -> Iterator[str]:
    """The text of a UTF-8 file in blocks, without a byte order mark; for other files an error with the offset."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with file.open("rb") as handle:
        while True:
            block = handle.read(_BLOCK_BYTES)
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                position = offset - undecoded + error.start
                raise UserError(
                    f"{flag}: {file} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at offset {position}); "
                    "convert it to UTF-8, for example with iconv"
                ) from None
            yield text.removeprefix("\ufeff") if offset == 0 else text
            if not block:
                return
            offset += len(block)


def _separated(blocks: Iterable[str], separator: str) -> Iterator[str]:
    pending = ""
    for block in blocks:
        *complete, pending = (pending + block).split(separator)
        for text in complete:
            yield text.strip("\r\n")
    yield pending.strip("\r\n")


def _pieces(blocks: Iterable[str], target: int) -> Iterator[str]:
    """Cuts a text in pieces of about `target` characters, at most four times as many."""
    longest = 4 * target
    pending, start = "", 0
    for block in blocks:
        pending, start = pending[start:] + block, 0
        while len(pending) - start >= longest:
            end = _end_of_piece(pending, start + target, start + longest)
            yield pending[start:end]
            start = end
    while start < len(pending):
        end = _end_of_piece(pending, start + target, start + longest)
        yield pending[start:end]
        start = end


def _end_of_piece(text: str, earliest: int, latest: int) -> int:
    """Where to cut between two positions: after blank lines if there are any, else after a line, else after a word."""
    blank_lines = _BLANK_LINES.search(text, earliest, latest)
    if blank_lines:
        return blank_lines.end()
    for separator in "\n", " ":
        position = text.find(separator, earliest, latest)
        if position >= 0:
            return position + 1
    return latest
