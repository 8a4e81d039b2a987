"""Agreement between the processes of a run. All of them must call each function together."""

import contextlib
import hashlib
import socket
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.core.errors import UserError
from megajax.host.transcript import tell


def is_first_process() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def on_first_process(action: Callable[[], list[int] | None]) -> list[int]:
    """Call `action` on process 0 while the others wait; its `UserError` ends them all. All processes get the numbers
    that it returns, each less than 2^31."""
    error: UserError | None = None
    numbers: list[int] | None = None
    if is_first_process():
        try:
            numbers = action()
        except UserError as found:
            error = found
    if of_first_process(error is not None) and error is None:
        raise UserError("process 0 stopped: its standard error says why")
    if error:
        raise error
    return numbers_of_first_process(numbers or [])


def say(text: str) -> None:
    """`tell` on process 0."""
    if is_first_process():
        tell(text)


def of_first_process(number: int) -> int:
    """Process 0's number, on every process."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def numbers_of_first_process(numbers: list[int]) -> list[int]:
    """Process 0's numbers, each less than 2^31, on every process."""
    if jax.process_count() == 1:
        return numbers
    found = np.resize(np.asarray(numbers, np.int32), of_first_process(len(numbers)))
    return [int(number) for number in multihost_utils.broadcast_one_to_all(found)] if found.size else []


def sums_over_processes(numbers: list[int]) -> list[int]:
    """The sum over all processes, modulo 2^32, of each of the numbers, which are less than 2^32."""
    if jax.process_count() == 1:
        return numbers
    all_numbers = multihost_utils.process_allgather(np.asarray(numbers, np.uint32))
    return [int(number) for number in np.asarray(all_numbers).sum(axis=0, dtype=np.uint32)]


def all_agree(value: bool) -> bool:
    """Whether `value` holds on every process."""
    return sums_over_processes([value]) == [jax.process_count()]


def hosts_of_processes() -> list[int]:
    """A number for the host of each process, the same for those of one host."""
    found = np.frombuffer(hashlib.sha256(_host().encode()).digest()[:8], np.uint32)
    everywhere = [found] if jax.process_count() == 1 else multihost_utils.process_allgather(found)
    names = [each.tobytes() for each in everywhere]
    return [names.index(name) for name in names]


def host_names() -> list[str]:
    """The name of each process's host."""
    own = np.frombuffer(socket.gethostname().encode()[:64].ljust(64), np.uint8)
    every = [own] if jax.process_count() == 1 else multihost_utils.process_allgather(own)
    return [bytes(each).decode(errors="replace").strip() for each in every]


def _host() -> str:
    """A name of this machine that its containers share: Linux's number of the boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


class Poll:
    """Messages between processes that nobody waits for; all receive the same."""

    def __init__(self) -> None:
        self._alone = jax.process_count() == 1
        mesh = Mesh(np.array(jax.devices()), ("all",))
        self._places = NamedSharding(mesh, PartitionSpec("all"))
        self._largest = jax.jit(lambda x: x.max(axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def ask(self, numbers: Callable[[], tuple[int, ...]]) -> Callable[[], tuple[int, ...]]:
        """Send this process's current numbers. The returned function gives, when called later, the largest of each over
        all processes. A single process gets its own numbers as of that later moment."""
        if self._alone:
            return numbers
        local = np.tile(np.asarray(numbers(), np.int32), (jax.local_device_count(), 1))
        largest = self._largest(jax.make_array_from_process_local_data(self._places, local))
        return lambda: tuple(map(int, np.asarray(largest)))


def wait_for_all(what: str) -> None:
    """Wait until every process gets here; `what` names the place."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def gathered(x: jax.Array) -> np.ndarray:
    """The whole global array `x`, on every process."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
