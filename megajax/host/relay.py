"""A relay between a process and process 0, whose coordination service JAX keeps a connection to.

When process 0 is gone, that connection breaks, and JAX aborts the process from C++ (SIGABRT) before our code can react.
Through the relay JAX sees a silent service, which it tolerates for its heartbeat timeout; the relay notices the end and
reports it.

JAX's own shutdown holds the interpreter's lock, so that the relay cannot pass anything on: a process with a relay must
leave by `megajax.host.ending.run`, which avoids that shutdown.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

_CHUNK = 2**16


class Relay:
    """Listens on this machine and passes data to `host:port` and back. `on_loss` is called, from a thread, when the
    other side ends an established connection."""

    def __init__(self, host: str, port: int, on_loss: Callable[[], None]) -> None:
        self._service, self._on_loss = (host, port), on_loss
        self._lost = threading.Lock()  # taken for good at the first loss
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """`HOST:PORT` to connect to in the service's place."""
        host, port = self._listening.getsockname()
        return f"{host}:{port}"

    def _accept(self) -> None:
        while True:
            ours, _ = self._listening.accept()
            threading.Thread(target=self._connect, args=(ours,), daemon=True).start()

    def _connect(self, ours: socket.socket) -> None:
        try:
            theirs = socket.create_connection(self._service)
        except OSError:
            ours.close()  # not there yet: who connects here tries again
            return
        for connection in (ours, theirs):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ended = threading.Event()
        sender = threading.Thread(target=_send, args=(ours, theirs, ended), daemon=True)
        sender.start()
        _pass_on(theirs, ours)
        if not ended.is_set() and self._lost.acquire(blocking=False):
            self._on_loss()
        sender.join()  # until then `ours` stays open, silent
        ours.close()
        theirs.close()


def _send(ours: socket.socket, theirs: socket.socket, ended: threading.Event) -> None:
    """Pass on what this process sends, until it ends the connection."""
    _pass_on(ours, theirs)
    with contextlib.suppress(OSError):
        while ours.recv(_CHUNK):  # nobody is there to pass it on to
            pass
    ended.set()
    with contextlib.suppress(OSError):
        theirs.shutdown(socket.SHUT_WR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass data on until one of the two ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
