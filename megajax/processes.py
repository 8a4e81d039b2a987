"""What the processes of a run agree on. Every function is called by all of them together."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from megajax.errors import UserError


def is_first_process() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def on_first_process(action: Callable[[], Any]) -> None:
    """Call `action` on process 0 while the others wait; a user's mistake found there ends them all.

    Raises:
        UserError: process 0 raised one.
    """
    error: UserError | None = None
    if is_first_process():
        try:
            action()
        except UserError as found:
            error = found
    if of_first_process(error is not None) and error is None:
        raise UserError("process 0 stopped: its standard error says why")
    if error:
        raise error


def of_first_process(number: int) -> int:
    """The number that process 0 has."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def all_agree(value: bool) -> bool:
    """Whether `value` holds on every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def wait_for_all(what: str) -> None:
    """Wait until every process is here; `what` names the place."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def gathered(x: jax.Array) -> np.ndarray:
    """The global array `x` as a whole, on every process."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
