"""The two exceptions whose messages are meant for the person who started the program."""

import contextlib
import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

_INSTALLED = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<frozen")
_OURS = "jaxequal", "megajax"
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
    """Say what failed where in code of the user, and what would be valid, in place of any exception but a
    `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        first, *more = str(error).strip().partition("\n\n")[0].splitlines() or [""]
        first = " ".join([first, *map(str.strip, more)]) if first.endswith(":") else first
        raise UserError(f"{what}: {type(error).__name__}: {first}{_whence(error)}; valid: {valid}") from None


def _whence(error: BaseException) -> str:
    """The innermost line of the user's own code that an error is from."""
    lines = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_INSTALLED)
        and frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS
    ]
    return "".join(lines[-1:])


def brief(public: T) -> T:
    """A public function, or a class with its public methods, whose errors of this module are raised without the frames
    inside it, which tell the user nothing; `JAX_TRACEBACK_FILTERING=off` keeps them."""
    if isinstance(public, type):
        for name, method in vars(public).copy().items():
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(public, name, brief(method))
        return public

    @functools.wraps(public)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return public(*args, **options)
        except _OneLine as error:
            if os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
                raise
            error.__notes__ = [note for note in getattr(error, "__notes__", ()) if "JAX has removed" not in note]
            raise error.with_traceback(None) from None

    return call  # type: ignore[return-value]


class RunError(_OneLine, RuntimeError):
    """What cannot go on though nobody made a mistake: a primitive without a rule, a loss that is not finite. Commands
    exit with code 1."""
