"""The two exceptions whose message is meant for the person who started the run."""


class _OneLine(Exception):
    """The message becomes one line: what is not printable, as a name in a file may be, is written out."""

    def __init__(self, message: str) -> None:
        escaped = (c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in message)
        super().__init__("".join(escaped))


class UserError(_OneLine, ValueError):
    """Something the user can put right: a flag, a preset, a file.

    The message is one line that names the flag or file and says what would be valid. The entry points print it on
    standard error and exit with code 2.
    """


class RunError(_OneLine, RuntimeError):
    """A run that cannot go on though nobody made a mistake, such as a loss that is not finite. Exit code 1."""
