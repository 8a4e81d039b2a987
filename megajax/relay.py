"""A relay between a process and process 0, whose coordination service JAX keeps a connection to.

Where process 0 is gone, that connection breaks, and JAX aborts the process from C++ (SIGABRT) before anything of ours
hears of it. Through the relay JAX sees a service that is silent, which it bears for its heartbeat timeout; the relay
sees the end, and says it.

JAX's own shutdown holds the interpreter's lock, so that nothing is passed on meanwhile: who has a relay leaves by
`megajax.ending.run`, which does without it.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

_CHUNK = 2**16


class Relay:
    """Listens on this machine, and passes what comes on to `host:port` and back.

    Args:
        host, port: of the service.
        on_loss: is called, from a thread, where a connection that stood was ended from over there.
    """

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
    """What this process sends, until it ends the connection."""
    _pass_on(ours, theirs)
    with contextlib.suppress(OSError):
        while ours.recv(_CHUNK):  # nobody is there to pass it on to
            pass
    ended.set()
    with contextlib.suppress(OSError):
        theirs.shutdown(socket.SHUT_WR)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until one of the two ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
