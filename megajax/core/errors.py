"""The two exceptions whose messages are meant for the person who started the run. They are those of `jaxequal`, which
imports nothing of megajax, so that its errors end a command as ours do."""

from typing import Any

from jaxequal.errors import RunError, UserError, brief, shortened, told

__all__ = ["Damaged", "RunError", "UserError", "WrongDevice", "brief", "shortened", "told"]


class WrongDevice(RunError):
    """A device computes or remembers wrongly. Commands exit with code 3."""


class Damaged(UserError):
    """A file that cannot be read or is not what it should be: why, and what would be valid instead."""

    def __init__(self, path: object, why: str, way_out: str) -> None:
        super().__init__(f"{path}: {why}; valid: {way_out}")

    def __reduce__(self) -> tuple[type[UserError], tuple[Any, ...]]:
        return UserError, self.args  # between processes
