"""What a process hears of process 0's end, through the relay between them."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from megajax.host.relay import Relay


@pytest.fixture
def lost() -> threading.Event:
    return threading.Event()


@contextlib.contextmanager
def connected(service: socket.socket, lost: threading.Event) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection through a relay."""
    host, port = service.getsockname()
    relay_host, _, relay_port = Relay(host, port, lost.set).address.rpartition(":")
    ours = socket.create_connection((relay_host, int(relay_port)))
    theirs, _ = service.accept()
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(10)
        yield ours, theirs


def test_what_is_sent_arrives(lost: threading.Event) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service, connected(service, lost) as (ours, theirs):
        for source, target in ((ours, theirs), (theirs, ours)):
            sent = bytes(range(256)) * 1024
            threading.Thread(target=source.sendall, args=(sent,)).start()
            received = b""
            while len(received) < len(sent):
                received += target.recv(2**16)
            assert received == sent
        ours.close()
        assert theirs.recv(1) == b"" and not lost.is_set()


def test_its_end_is_told_and_not_passed_on(lost: threading.Event) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service, connected(service, lost) as (ours, theirs):
        theirs.close()
        assert lost.wait(10)
        ours.settimeout(0.2)
        with pytest.raises(TimeoutError):  # silent, not closed
            ours.recv(1)


def test_where_nobody_listens_yet_the_connection_is_closed(lost: threading.Event) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host, port = gone.getsockname()
    relay_host, _, relay_port = Relay(host, port, lost.set).address.rpartition(":")
    with socket.create_connection((relay_host, int(relay_port)), timeout=10) as ours:
        assert ours.recv(1) == b"" and not lost.is_set()
