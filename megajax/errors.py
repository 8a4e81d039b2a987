"""The two exceptions whose message is meant for the person who started the run."""


class UserError(ValueError):
    """Something the user can put right: a flag, a preset, a file.

    The message is one line that names the flag or file and says what would be valid. The entry points print it on
    standard error and exit with code 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on though nobody made a mistake, such as a loss that is not finite. Exit code 1."""
