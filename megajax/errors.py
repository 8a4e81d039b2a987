"""The two exceptions whose messages are meant for the person who started the run."""


class _OneLine(Exception):
    """The message becomes one line: characters that are not printable, as in some file names, are escaped."""

    def __init__(self, message: str) -> None:
        escaped = (c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in message)
        super().__init__("".join(escaped))


class UserError(_OneLine, ValueError):
    """Something the user can fix: a flag, a preset, a file.

    The message is one line that names the flag or file and says what would be valid. The entry points print it on
    standard error and exit with code 2.
    """


class RunError(_OneLine, RuntimeError):
    """A run that cannot continue though nobody made a mistake, such as a loss that is not finite. Exit code 1."""
