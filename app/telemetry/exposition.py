"""Shows a process's metrics over HTTP, with what a supervisor asks: `/metrics`, `/live`, `/ready`. Readiness asks nobody else.

Threads of its own, so that a scrape never waits for the process's work; each ends when its client's time is over, all with the process.
Other sites' pages are stopped by the barrier of all ports; where other machines reach it any name is answered, because scrapers are told
names that this process does not know.
"""

import io
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from app.domain.errors import BadConfig
from app.listening.barrier import LOOPBACK_NAMES, Barrier
from app.listening.errors import HttpError
from app.listening.headers import as_headers
from app.telemetry.instruments import Instruments

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

log = logging.getLogger(__name__)
REQUEST_S = 5.0
"""From the connection until the request is complete, whether its client is silent or sends a byte every two seconds; and as long again for
each half of the answer."""


def expose(instruments: Instruments, address: str | None, *, request_s: float = REQUEST_S) -> ThreadingHTTPServer | None:
    """Serve at `host:port`; nothing where no address is set. Raises `BadConfig` where it is not one, or taken."""
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadConfig(f"RATCHET_METRICS is {address!r}: set it to an address such as 127.0.0.1:9464")
    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), _handler(instruments, _barrier(host), request_s))
    except OSError as error:
        raise BadConfig(
            f"cannot show metrics on {address} ({error.strerror}): set RATCHET_METRICS to a free address of this machine, or unset it"
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    log.info("metrics shown address=http://%s:%d/metrics", host, server.server_address[1])
    return server


def _barrier(host: str) -> Barrier:
    alone = host in LOOPBACK_NAMES or host.startswith("127.") or host == "[::1]"
    return Barrier(hosts=frozenset() if alone else frozenset({"*"}), loopback=alone)


class _Hurried(io.RawIOBase):
    """What a client sends until its time is over; then reading raises `TimeoutError`. A socket's own begins anew with every byte."""

    def __init__(self, connection: socket.socket, request_s: float) -> None:
        self._connection = connection
        self._ends = time.monotonic() + request_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request is not complete in time")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _handler(instruments: Instruments, barrier: Barrier, request_s: float) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Three paths, no state."""

        def setup(self) -> None:
            """Read in a hurry."""
            super().setup()
            self.rfile.close()
            self.rfile = io.BufferedReader(_Hurried(self.connection, request_s))

        def do_GET(self) -> None:
            """Answer a scrape or a probe."""
            try:
                barrier.check("GET", as_headers(self.headers.items()))
            except HttpError as error:
                return self._answer(error.status, f"{error}\n".encode())
            if self.path == "/metrics":
                self._answer(200, instruments.text(), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path == "/live":
                self._answer(200, b"ok\n")
            elif self.path == "/ready":
                self._answer(200 if instruments.ready else 503, b"ok\n" if instruments.ready else b"not yet\n")
            else:
                self._answer(404, b"there are /metrics, /live and /ready\n")

        def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.connection.settimeout(request_s)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds and say nothing."""

    return Handler
