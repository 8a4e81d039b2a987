"""A relay between this process and process 0, to whose coordination service JAX keeps a connection.

When process 0 is gone, that connection breaks, and JAX aborts this process from C++ (SIGABRT) before our code can
react. Through the relay JAX sees a silent service, which it tolerates for its heartbeat timeout; the relay notices the
end and reports it.

JAX's own shutdown holds the interpreter lock, so the relay cannot pass anything on during it. A process with a relay
must therefore exit through `megajax.host.ending.run`, which avoids that shutdown.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

_CHUNK = 2**16


class Relay:
    """Listens on this machine and relays data to `host:port` and back. When the other side ends an established
    connection, `on_loss` is called from a thread."""

    def __init__(self, host: str, port: int, on_loss: Callable[[], None]) -> None:
        self._service, self._on_loss = (host, port), on_loss
        self._lost = threading.Lock()  # never released after the first loss
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """The `HOST:PORT` to connect to instead of the service."""
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
            ours.close()  # the service is not there yet; clients retry
            return
        for connection in (ours, theirs):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ended = threading.Event()
        sender = threading.Thread(target=_send, args=(ours, theirs, ended), daemon=True)
        sender.start()
        _pass_on(theirs, ours)
        if not ended.is_set() and self._lost.acquire(blocking=False):
            self._on_loss()
        sender.join()  # until then `ours` stays open but silent
        ours.close()
        theirs.close()


def _send(ours: socket.socket, theirs: socket.socket, ended: threading.Event) -> None:
    """Relay what this process sends, until it ends the connection."""
    _pass_on(ours, theirs)
    with contextlib.suppress(OSError):
        while ours.recv(_CHUNK):  # the other side is gone: discard
            pass
    ended.set()
    with contextlib.suppress(OSError):
        theirs.shutdown(socket.SHUT_WR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Relay data until one side ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
