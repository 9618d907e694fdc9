"""Where an editor registers edits over HTTP, on loopback alone.

    POST   /edits          an `Edit` as JSON → 202 {"edit": "<name>"}
    DELETE /edits/<name>   nobody looks at it any more (file closed, session over) → 204

A web page in the user's browser must not reach it: the barrier of all ports stands before it (`content-type: application/json`).
"""

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from app.listening.barrier import Barrier
from app.listening.errors import HttpError
from app.listening.headers import as_headers
from pipelines.commands.collecting.spool import Edit, Spool

log = logging.getLogger(__name__)
MOST_BYTES = 8 * 1024 * 1024
"""Of a body: a file of 1 MB, escaped as badly as can be."""
READ_TIMEOUT_S = 10.0
BARRIER = Barrier()


@contextmanager
def open_door(spool: Spool, port: int) -> Generator[int]:
    """Answer editors in a thread; gives the port (a free one for 0)."""
    server = _Server(("127.0.0.1", port), _Answer)
    server.spool = spool
    thread = threading.Thread(target=server.serve_forever, name="edit-door", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    spool: Spool


class _Answer(BaseHTTPRequestHandler):
    timeout = READ_TIMEOUT_S

    def do_POST(self) -> None:
        """Register an edit."""
        if self._is_stopped():
            return None
        if self.path != "/edits":
            return self._say(404, {"error": "POST /edits, from this machine's editors alone"})
        length = int(self.headers.get("content-length") or 0)
        if not 0 < length <= MOST_BYTES:
            return self._say(413, {"error": f"an edit has 1 to {MOST_BYTES} bytes"})
        try:
            name = self._spool.register(msgspec.json.decode(self.rfile.read(length), type=Edit))
        except ValueError as error:  # msgspec's errors are ValueErrors
            return self._say(422, {"error": str(error)})
        return self._say(202, {"edit": name})

    def do_DELETE(self) -> None:
        """End an edit's observation."""
        if self._is_stopped():
            return None
        known = self.path.startswith("/edits/") and self._spool.end(self.path.removeprefix("/edits/"))
        return self._say(204 if known else 404, None)

    def log_message(self, format: str, *args: object) -> None:
        """One line per request, without addresses: they are all this machine's."""
        log.debug(format, *args)

    @property
    def _spool(self) -> Spool:
        assert isinstance(self.server, _Server)
        return self.server.spool

    def _is_stopped(self) -> bool:
        """Whether it was answered: another site's page could have sent it."""
        try:
            BARRIER.check(self.command, as_headers(self.headers.items()))
        except HttpError as error:
            self._say(error.status, {"error": str(error)})
            return True
        return False

    def _say(self, status: int, body: dict[str, str] | None) -> None:
        content = b"" if body is None else msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
