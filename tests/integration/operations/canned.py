"""A service that answers what a test says, and keeps what it was sent: for commands that act over HTTP."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from pipelines.__main__ import ratchet

POLICY = "tab"


@dataclass
class Canned:
    """A service at an address, whose answers are by method and path without what is asked of it."""

    url: str = ""
    answers: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """`GET /v1/me`, and what is answered one after the other; the last one for ever. A number before it is its status."""
    sent: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    """`GET /v1/me?limit=1`, and the body."""
    tokens: list[str | None] = field(default_factory=list[str | None])

    def take(self, method: str, path: str, body: Any, token: str | None) -> tuple[int, Any]:
        """The next answer to a request."""
        self.sent.append((f"{method} {path}", body))
        self.tokens.append(token)
        waiting = self.answers[f"{method} {path.partition('?')[0]}"]
        found = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return found if isinstance(found, tuple) else (200, found)

    def told(
        self, *words: str, answers: Mapping[str, Any], data: Path, typed: str | None = None, token: str | None = "secret",
        columns: int = 300,
    ) -> Result:  # fmt: skip
        """What a command prints over these answers, one for each request or a list of them."""
        self.answers = {asked: found if isinstance(found, list) else [found] for asked, found in answers.items()}
        self.sent.clear()
        self.tokens.clear()
        environment = {
            "RATCHET_URL": self.url, "RATCHET_DATA": str(data), "RATCHET_CONFIG": str(data / "ratchet.toml"), "XDG_CONFIG_HOME": str(data),
            "COLUMNS": str(columns), "RATCHET_TOKEN": token, "RATCHET_KEY": None,
        }  # fmt: skip
        return CliRunner(env=environment).invoke(ratchet, words, input=typed)


@contextmanager
def canned() -> Iterator[Canned]:
    """One that runs in a thread."""
    service = Canned()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            """Read the request whole, and say what the test says."""
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            token = self.headers.get("authorization")
            status, found = service.take(self.command, self.path, json.loads(body) if body else None, token)
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def cells(told: Result, *, of: str) -> list[str]:
    """The cells of the row of a table that holds this word."""
    line = next(line for line in told.stdout.splitlines() if of in line and line.startswith("│"))
    return [cell.strip() for cell in line.strip()[1:-1].split("│")]
