"""The two exceptions whose messages are meant for the person who started the program."""

import contextlib
from collections.abc import Iterator

_MOST = 2000  # characters of a message


def shortened(message: str) -> str:
    """A message without its middle if it is very long, as those that quote a whole file's value are."""
    if len(message) <= _MOST:
        return message
    kept = _MOST // 2 - 50
    return f"{message[:kept]} … ({len(message) - 2 * kept} characters left out) … {message[-kept:]}"


class _OneLine(Exception):
    """The message becomes one line that is not very long: characters that are not printable, as in some file names, are
    escaped."""

    def __init__(self, message: str) -> None:
        cut = shortened(message)
        escaped = (c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in cut)
        super().__init__("".join(escaped))


class UserError(_OneLine, ValueError):
    """Something the user can fix: an argument, a flag, a file.

    The message is one line that names it and says what would be valid. Commands print it on standard error and exit
    with code 2.
    """


@contextlib.contextmanager
def told(what: str, valid: str) -> Iterator[None]:
    """Say what failed in code of the user, and what would be valid, in place of any exception but a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        first, *more = str(error).strip().partition("\n\n")[0].splitlines() or [""]
        first = " ".join([first, *map(str.strip, more)]) if first.endswith(":") else first
        raise UserError(f"{what}: {type(error).__name__}: {first}; valid: {valid}") from error


class RunError(_OneLine, RuntimeError):
    """What cannot go on though nobody made a mistake: a primitive without a rule, a loss that is not finite. Commands
    exit with code 1."""
