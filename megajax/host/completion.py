"""Completion in a shell: `eval "$(register-python-argcomplete megajax)"` in its start-up file.

The shell then calls `megajax` without arguments whenever the Tab key is pressed, and the words so far are in the
environment. A command makes its parser as always, which answers with what fits instead of parsing.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

_START = "_ARGCOMPLETE"  # the number of the word that is the program


def asked() -> bool:
    """Whether a shell asks for a completion."""
    return _START in os.environ and "COMP_LINE" in os.environ


def offer(action: argparse.Action, names: Callable[[], Iterable[str]], files: tuple[str, ...] | None = None) -> None:
    """Complete an argument by names, and by files with these endings."""

    def complete(prefix: str, **_: Any) -> list[str]:
        found = [name for name in names() if name.startswith(prefix)]
        if files is None:
            return found
        from argcomplete.completers import FilesCompleter

        return [*found, *FilesCompleter(files)(prefix)]

    action.completer = complete  # type: ignore[attr-defined]


def command(names: Iterable[str], otherwise: argparse.ArgumentParser) -> str:
    """The word after the program, which is the program from now on; where it is none of `names`, or is being written,
    it is completed by the argument of the parser `otherwise`, and the process ends."""
    from argcomplete.lexers import split_line

    line = os.environ["COMP_LINE"]
    words = split_line(line, int(os.environ.get("COMP_POINT", len(line))))[3]
    start = int(os.environ[_START])
    found = words[start] if len(words) > start else ""
    if found not in names:
        answer(otherwise)
    os.environ[_START] = str(start + 1)
    return found


def answer(parser: argparse.ArgumentParser) -> None:
    """Complete the words by a parser's flags and arguments, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False)
