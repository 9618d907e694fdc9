"""`ratchet webhooks` against a receiver on loopback that verifies what it gets."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from standardwebhooks.webhooks import Webhook as Verifier

from app.db.engine import open_engine
from app.db.release.webhooks import SqlWebhookBook
from app.domain.errors import BadRequest, NotFound, Refused, UnknownPolicy
from pipelines.commands.webhooks import webhooks
from tests.fakes.sealed import SEAL

GLASS = "--break-glass"


class Door(BaseHTTPRequestHandler):
    """Keeps what it is sent and answers with the server's status."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((body, dict(self.headers.items())))  # type: ignore[attr-defined] - set by the fixture
        self.send_response(self.server.status)  # type: ignore[attr-defined] - set by the fixture
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def door() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    server.got, server.status = [], 204  # type: ignore[attr-defined] - what the handler needs
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def runner(sqlite_url: str, tmp_path: Path) -> CliRunner:
    return CliRunner(env={"RATCHET_DATABASE_URL": sqlite_url, "RATCHET_DATA": str(tmp_path)})


def _add(runner: CliRunner, door: ThreadingHTTPServer, sqlite_url: str) -> tuple[str, str]:
    """(id, secret) of a new receiver."""
    told = runner.invoke(
        webhooks, ["add", f"http://127.0.0.1:{door.server_port}/hook", "--event", "release.", GLASS], catch_exceptions=False
    )
    engine = open_engine(sqlite_url)
    newest = SqlWebhookBook(engine, SEAL).all()[-1]
    engine.dispose()
    return newest.id, told.stdout.strip()


def test_a_receiver_is_added_tried_rotated_and_removed(runner: CliRunner, door: ThreadingHTTPServer, sqlite_url: str) -> None:
    name, secret = _add(runner, door, sqlite_url)
    assert "answered 204" in runner.invoke(webhooks, ["test", name, GLASS], catch_exceptions=False).output
    body, headers = door.got[0]  # type: ignore[attr-defined] - set by the fixture
    assert Verifier(secret).verify(body, headers)["type"] == "webhook.test"

    fresh = runner.invoke(webhooks, ["rotate", name, GLASS], catch_exceptions=False).stdout.strip()
    runner.invoke(webhooks, ["test", name, GLASS], catch_exceptions=False)
    body, headers = door.got[1]  # type: ignore[attr-defined] - set by the fixture
    for valid in (secret, fresh):
        Verifier(valid).verify(body, headers)

    shown = runner.invoke(webhooks, ["list", GLASS], catch_exceptions=False).output
    assert name in shown
    assert secret not in shown
    assert "hears no more" in runner.invoke(webhooks, ["remove", name, GLASS], catch_exceptions=False).output
    assert "removed" in runner.invoke(webhooks, ["list", GLASS], catch_exceptions=False).output
    assert runner.invoke(webhooks, ["deliveries", name, GLASS], catch_exceptions=False).exit_code == 0


def test_a_receiver_that_does_not_take_it_is_told(runner: CliRunner, door: ThreadingHTTPServer, sqlite_url: str) -> None:
    name, _ = _add(runner, door, sqlite_url)
    door.status = 500  # type: ignore[attr-defined] - read by the handler
    refused = runner.invoke(webhooks, ["test", name, GLASS])
    assert isinstance(refused.exception, Refused)
    assert "(500)" in str(refused.exception)


def test_addresses_policies_and_ids_that_lead_nowhere_are_refused(runner: CliRunner, door: ThreadingHTTPServer) -> None:
    misspelt = ["add", f"http://127.0.0.1:{door.server_port}/hook", "--policy", "nobody", GLASS]
    assert isinstance(runner.invoke(webhooks, misspelt).exception, UnknownPolicy)
    assert isinstance(runner.invoke(webhooks, ["add", "ftp://x", GLASS]).exception, BadRequest)
    assert isinstance(runner.invoke(webhooks, ["add", "https://10.0.0.1/hook", GLASS]).exception, BadRequest)
    assert isinstance(runner.invoke(webhooks, ["test", "nobody", GLASS]).exception, NotFound)
