"""Prompts from the command line, and continuations as text that appears while it is generated."""

import sys

from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError
from megajax.host import reading
from megajax.host.paths import check_path
from megajax.host.transcript import printable

_FILE_BYTES = 1 << 24  # of a file with prompts
_CONTEXT = 8  # earlier ids that are decoded together with new ones
UNDECODED = "\ufffd"  # what the tokenizer decodes invalid or incomplete characters to


def read_prompts(given: list[str], file: str) -> list[str]:
    """The prompts from the command line: those given one by one, or the non-blank lines of a file."""
    if bool(given) == bool(file):
        raise UserError(f"--prompt and --prompt-file are {'both given' if file else 'missing'}; valid: one of them")
    for number, prompt in enumerate(given, start=1):
        if not reading.is_unicode(prompt):
            raise UserError(f"--prompt {prompt!r} (number {number}); valid: text in UTF-8")
    if not file:
        return given
    check_path(file, "--prompt-file")
    try:
        text = reading.read_bytes(file, _FILE_BYTES).decode()
    except OSError as error:
        raise UserError(f"--prompt-file {file}: cannot be read: {error.strerror}; valid: a readable text") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {file}: not UTF-8 text (at byte {error.start}); valid: UTF-8") from None
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"--prompt-file {file}: no prompt in it; valid: a text file with one prompt per line")
    return prompts


class TextStream:
    """The text of ids that arrive in pieces, without incomplete characters."""

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._before = before[-_CONTEXT:]
        self._ids: list[int] = []  # ids since the text was last complete
        self._shown = 0  # characters of their text already returned

    def add(self, ids: list[int]) -> str:
        """The new text that `ids` complete; the bytes of an incomplete character wait for later ids."""
        self._ids += ids
        text = self._text()
        complete = text.rstrip(UNDECODED)
        new, self._shown = complete[self._shown :], len(complete)
        if complete == text:
            self._before, self._ids, self._shown = (self._before + self._ids)[-_CONTEXT:], [], 0
        return new

    def end(self) -> str:
        """The text that `add` has not returned, if no more ids follow."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._ids)[len(decode(self._before)) :]


def continuation_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of ids that continue a prompt."""
    stream = TextStream(tokenizer, prompt)
    return stream.add(ids) + stream.end()


class Screen:
    """Prints several growing texts one after the other; the first unfinished one is shown as it grows."""

    def __init__(self, tokenizer: Tokenizer, starts: list[str], ids: list[list[int]]) -> None:
        self._waiting = list(starts)
        self._streams = [TextStream(tokenizer, start) for start in ids]
        self._current = 0
        self._finished = [False] * len(starts)
        self._begin()

    def add(self, number: int, ids: list[int], *, finished: bool) -> None:
        """Append `ids` to text `number`; `finished`: these are its last ones."""
        stream = self._streams[number]
        self._waiting[number] += stream.add(ids) + (stream.end() if finished else "")
        self._finished[number] = finished
        while self._current < len(self._waiting):
            self._show()
            if not self._finished[self._current]:
                return
            print(flush=True)
            self._current += 1
            self._begin()

    def _begin(self) -> None:
        if self._current < len(self._waiting):
            if len(self._waiting) > 1:
                print(f"--- {self._current + 1} of {len(self._waiting)}")
            self._show()

    def _show(self) -> None:
        text = self._waiting[self._current]
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
        self._waiting[self._current] = ""
