"""Prompts from the command line, and continuations as text that appears while it is generated."""

import sys
from collections.abc import Sequence

from megajax.core.errors import UserError
from megajax.data.text.tokenizer import Tokenizer
from megajax.host import reading
from megajax.host.paths import check_path
from megajax.host.transcript import printable

_FILE_BYTES = 1 << 24  # of a file with prompts
_CONTEXT = 8  # earlier ids that are decoded together with new ones
UNDECODED = "\ufffd"  # what the tokenizer decodes invalid or incomplete characters to


def read_prompts(texts: list[str], file: str) -> list[str]:
    """The prompts from the command line: those given one by one, or the non-blank lines of a file."""
    if bool(texts) == bool(file):
        raise UserError(f"--prompt and --prompt-file are {'both given' if file else 'missing'}; valid: one of them")
    for number, prompt in enumerate(texts, start=1):
        if not reading.is_unicode(prompt):
            raise UserError(f"--prompt {prompt!r} (number {number}); valid: text in UTF-8")
    if not file:
        return texts
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


class Until:
    """A text that arrives in pieces, up to the first stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # the end, which may be the beginning of a stop text
        self.stopped = False

    def add(self, text: str) -> str:
        """What can be shown after another piece. The stop text that is complete first counts, whatever the pieces are,
        and of several the longest."""
        if self.stopped:
            return ""
        self._held += text
        ends = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(ends)
        shown = min(ends)[1] if ends else len(self._held) - self._beginning()
        new, self._held = self._held[:shown], self._held[shown:]
        return new

    def end(self) -> str:
        """What was held back, if no more pieces follow."""
        return "" if self.stopped else self._held

    def _beginning(self) -> int:
        """How many characters at the end may belong to a stop text."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        begins = (size for size in range(longest, 0, -1) if any(s.startswith(self._held[-size:]) for s in self._stops))
        return next(begins, 0)


class TextStream:
    """The text of ids that arrive in pieces, without incomplete characters, up to the first of the stop texts."""

    def __init__(self, tokenizer: Tokenizer, before: list[int], stops: Sequence[str] = ()) -> None:
        self._until = Until(stops)
        self._tokenizer = tokenizer
        self._before = before[-_CONTEXT:]
        self._ids: list[int] = []  # ids since the text was last complete
        self._shown = 0  # characters of their text already returned

    def add(self, ids: list[int]) -> str:
        """The new text that `ids` complete; the bytes of an incomplete character, and what may be the beginning of a
        stop text, wait for later ids."""
        self._ids += ids
        text = self._text()
        complete = text.rstrip(UNDECODED)
        new, self._shown = complete[self._shown :], len(complete)
        if complete == text:
            self._before, self._ids, self._shown = (self._before + self._ids)[-_CONTEXT:], [], 0
        return self._until.add(new)

    def end(self) -> str:
        """The text that `add` has not returned, if no more ids follow."""
        return self._until.add(self._text()[self._shown :]) + self._until.end()

    @property
    def stopped(self) -> bool:
        """Whether there was a stop text."""
        return self._until.stopped

    def _text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._ids)[len(decode(self._before)) :]


def continuation_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int], stops: Sequence[str] = ()) -> str:
    """The text of ids that continue a prompt, up to the first of the stop texts."""
    stream = TextStream(tokenizer, prompt, stops)
    return stream.add(ids) + stream.end()


class Stops:
    """Says when continuations, which arrive in pieces, have a stop text; for `Decoder.stream`."""

    def __init__(self, tokenizer: Tokenizer, prompts: list[list[int]], stops: Sequence[str]) -> None:
        self._streams = [TextStream(tokenizer, prompt, stops) for prompt in prompts] if stops else []

    def __call__(self, index: int, ids: list[int]) -> int | None:
        """After how many of the new ids of a continuation a stop text is complete; None if it is not."""
        for count, token in enumerate(ids if self._streams else (), start=1):
            self._streams[index].add([token])
            if self._streams[index].stopped:
                return count
        return None


class Screen:
    """Prints several growing texts one after the other; the first unfinished one is shown as it grows."""

    def __init__(
        self, tokenizer: Tokenizer, starts: list[str], ids: list[list[int]], stops: Sequence[str] = ()
    ) -> None:
        self._waiting = list(starts)
        self._streams = [TextStream(tokenizer, start, stops) for start in ids]
        self._current = 0
        self._finished = [False] * len(starts)
        self._begin()

    def add(self, index: int, ids: list[int], *, finished: bool) -> None:
        """Append `ids` to text `index`; `finished`: these are its last ones."""
        stream = self._streams[index]
        self._waiting[index] += stream.add(ids) + (stream.end() if finished else "")
        self._finished[index] = finished
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
