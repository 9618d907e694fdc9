"""Shows a process's metrics over HTTP, with what a supervisor asks: `/metrics`, `/live`, `/ready`. Readiness asks nobody else.

One thread, so that a scrape never waits for the process's work; it ends with the process. Other sites' pages are stopped by the barrier of
all ports; where other machines reach it any name is answered, because scrapers are told names that this process does not know.
"""

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from app.domain.errors import BadConfig
from app.listening.barrier import LOOPBACK_NAMES, Barrier
from app.listening.errors import HttpError
from app.listening.headers import as_headers
from app.telemetry.instruments import Instruments

log = logging.getLogger(__name__)


def expose(instruments: Instruments, address: str | None) -> ThreadingHTTPServer | None:
    """Serve at `host:port`; nothing where no address is set. Raises `BadConfig` where it is not one, or taken."""
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise BadConfig(f"RATCHET_METRICS is {address!r}: set it to an address such as 127.0.0.1:9464")
    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), _handler(instruments, _barrier(host)))
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


def _handler(instruments: Instruments, barrier: Barrier) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Three paths, no state."""

        timeout = 5.0
        """Of a client that sends nothing."""

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
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds and say nothing."""

    return Handler
