"""Prompts from the command line, and continuations on their way to the terminal."""

from pathlib import Path

from megajax.data.tokenizer import Tokenizer
from megajax.errors import UserError

_CONTEXT = 8  # ids
UNDECODED = "\ufffd"  # what the tokenizer makes of bytes that are no character, or not a whole one yet


def read_prompts(given: list[str], file: str) -> list[str]:
    """The prompts that were given one by one, or the lines of a file that are not blank.

    Raises:
        UserError: neither or both were given; the file cannot be read or holds no prompt; one is not UTF-8.
    """
    if bool(given) == bool(file):
        raise UserError(f"--prompt and --prompt-file are {'both' if file else 'not'} given; valid: one of them")
    for number, prompt in enumerate(given, start=1):
        try:
            prompt.encode()  # an argument that is not UTF-8 has surrogates
        except UnicodeEncodeError:
            raise UserError(f"--prompt {prompt!r} (number {number}); valid: text in UTF-8") from None
    if not file:
        return given
    try:
        text = Path(file).read_bytes().decode()
    except OSError as error:
        raise UserError(f"--prompt-file {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {file}: not UTF-8 text (at byte {error.start})") from None
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"--prompt-file {file}: no prompt in it; valid: a text with a prompt on every line")
    return prompts


class TextStream:
    """Text of ids that come some at a time, in whole characters.

    Args:
        before: ids that stand before them: what a token looks like may depend on the one before it.
    """

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        self._tokenizer = tokenizer
        self._before = before[-_CONTEXT:]
        self._ids: list[int] = []  # since the last place where no character was cut
        self._shown = 0  # characters of theirs that were returned

    def add(self, ids: list[int]) -> str:
        """The text that is complete with `ids`; bytes that may become a character with the next ones are kept."""
        self._ids += ids
        text = self._text()
        whole = text.rstrip(UNDECODED)
        new, self._shown = whole[self._shown :], len(whole)
        if whole == text:
            self._before, self._ids, self._shown = (self._before + self._ids)[-_CONTEXT:], [], 0
        return new

    def end(self) -> str:
        """What is left."""
        return self._text()[self._shown :]

    def _text(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._before + self._ids)[len(decode(self._before)) :]


def continuation_text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of ids that follow those of a prompt."""
    stream = TextStream(tokenizer, prompt)
    return stream.add(ids) + stream.end()


class Screen:
    """Several texts that grow at once, written one after the other: the first unfinished one is shown as it grows.

    Args:
        starts: how each text starts.
        ids: of that.
    """

    def __init__(self, tokenizer: Tokenizer, starts: list[str], ids: list[list[int]]) -> None:
        self._waiting = list(starts)
        self._streams = [TextStream(tokenizer, start) for start in ids]
        self._current = 0
        self._finished = [False] * len(starts)
        self._begin()

    def add(self, number: int, ids: list[int], *, finished: bool) -> None:
        """More of a text, and whether that was all."""
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
        print(self._waiting[self._current], end="", flush=True)
        self._waiting[self._current] = ""
