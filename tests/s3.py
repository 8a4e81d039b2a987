"""An S3 server of moto's on this machine, which fails and waits as a test says."""

import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class S3Server:
    """Its URL is in `environment`; each has a bucket called `bucket`.

    Attributes:
        fault: called with every request (WSGI's environment); may return a status in place of an answer; with a `+`
            before it, the request is done nevertheless.
    """

    def __init__(self) -> None:
        moto = pytest.importorskip("moto.server", reason="needs the extra `dev`", exc_type=ImportError)
        pytest.importorskip("s3fs", reason="needs the extra `dev`")
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *_: object) -> None: ...

        self.fault: Callable[[dict[str, Any]], str | None] = lambda request: None
        self._app, self._lock = moto.DomainDispatcherApplication(moto.create_backend_app), threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{self._server.port}"
        urllib.request.urlopen(f"{address}/moto-api/reset", b"").close()  # of what tests before have stored
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        self.environment = CREDENTIALS | {"AWS_ENDPOINT_URL": address}

    def close(self) -> None:
        self._server.shutdown()

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        status = self.fault(request)
        lost = bool(status) and status.startswith("+")
        if not status or lost:
            with self._lock:  # moto's conditional writes are no more atomic than Python's threads
                answer = self._app(request, (lambda *_: lambda _: None) if lost else start)
        if not status:
            return answer
        start(f"{status.lstrip('+')} Fault", [("Content-Length", "0")])
        return [b""]
