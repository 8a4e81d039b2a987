"""The two exceptions whose message is meant for the person who started the run."""


def _line(message: str) -> str:
    """A message as one line: what is not printable, as a name in a file may be, is written out."""
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in message)


class UserError(ValueError):
    """Something the user can put right: a flag, a preset, a file.

    The message is one line that names the flag or file and says what would be valid. The entry points print it on
    standard error and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_line(message))


class RunError(RuntimeError):
    """A run that cannot go on though nobody made a mistake, such as a loss that is not finite. Exit code 1."""

    def __init__(self, message: str) -> None:
        super().__init__(_line(message))
