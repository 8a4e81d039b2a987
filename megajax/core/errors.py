"""The two exceptions whose messages are meant for the person who started the run. They are those of `jaxequal`, which
imports nothing of megajax, so that its errors end a command as ours do."""

from jaxequal.errors import RunError, UserError, shortened, told

__all__ = ["RunError", "UserError", "shortened", "told"]
