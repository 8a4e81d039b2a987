"""Shell completion: put `eval "$(register-python-argcomplete megajax)"` in the shell's start-up file.

When Tab is pressed the shell then calls `megajax` without arguments, with the words typed so far in the environment. A
command makes its parser as usual, but the parser answers with completions instead of parsing.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

_START = "_ARGCOMPLETE"  # the index of the word that is the program


def asked() -> bool:
    """Whether a shell is asking for completions."""
    return _START in os.environ and "COMP_LINE" in os.environ


def offer(action: argparse.Action, names: Callable[[], Iterable[str]], files: tuple[str, ...] | None = None) -> None:
    """Complete an argument with names, and with files that have these endings."""

    def complete(prefix: str, **_: Any) -> list[str]:
        matches = [name for name in names() if name.startswith(prefix)]
        if files is None:
            return matches
        from argcomplete.completers import FilesCompleter

        return [*matches, *FilesCompleter(files)(prefix)]

    action.completer = complete  # type: ignore[attr-defined]


def command(names: Iterable[str], otherwise: argparse.ArgumentParser) -> str:
    """The word after the program, which then counts as the program. If it is not in `names`, or is still being typed,
    complete it from the argument of the parser `otherwise`, and end the process."""
    from argcomplete.lexers import split_line

    line = os.environ["COMP_LINE"]
    words = split_line(line, int(os.environ.get("COMP_POINT", len(line))))[3]
    start = int(os.environ[_START])
    word = words[start] if len(words) > start else ""
    if word not in names:
        answer(otherwise)
    os.environ[_START] = str(start + 1)
    return word


def answer(parser: argparse.ArgumentParser) -> None:
    """Complete the words with a parser's flags and arguments, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False)
