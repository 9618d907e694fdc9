"""`ratchet api` as a process: what it refuses, what it says, how it stops."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

Start = Callable[..., "subprocess.Popen[str]"]
ROOT = Path(__file__).parents[3]
PATIENCE_S = 180.0
"""How long a start may take on a machine that is busy with other things."""


@pytest.fixture
def environment(sqlite_template: Path, tmp_path: Path) -> dict[str, str]:
    for name in ("ratchet.db", "inbox.db"):
        (tmp_path / name).write_bytes(sqlite_template.read_bytes())
    (tmp_path / "ratchet.toml").write_text('[policies.composer]\nmodel = "m"\nbase_name = "tiny"\nbase_model = "tiny"\n')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"RATCHET_DATA": str(tmp_path), "RATCHET_CONFIG": str(tmp_path / "ratchet.toml"), "RATCHET_PORT": str(port)}


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start_one(*command: str, **changes: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", *(command or ("pipelines", "api"))],
            env={**os.environ, **environment, **changes}, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


def wait_until_ready(url: str, process: "subprocess.Popen[str]") -> None:
    """Until it answers; a process that ended instead says why."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/status", timeout=PATIENCE_S).raise_for_status()
            return
        except httpx.TransportError:
            assert process.poll() is None, f"the api ended with {process.returncode}: {process.communicate()[0]}"
            time.sleep(0.1)
    raise AssertionError("the api did not start")


def test_it_serves_says_so_and_stops_cleanly(start: Start, environment: dict[str, str]) -> None:
    process = start()
    url = f"http://127.0.0.1:{environment['RATCHET_PORT']}"
    wait_until_ready(url, process)
    event = {"id": "e", "inference_id": "i", "name": "undo", "value": True, "occurred_at": "2026-11-21T12:00:00Z"}
    assert httpx.post(f"{url}/v1/events", json=event).json()["results"][0]["status"] == "accepted"
    second = start()
    assert second.wait(PATIENCE_S) == 2
    assert second.stdout is not None
    assert "set RATCHET_PORT to a free port" in second.stdout.read()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0  # two seconds on an idle machine; a stop that waits for something never comes
    assert process.stdout is not None
    log = process.stdout.read()
    assert f"api ready address={url} policies=composer" in log
    assert "api open: no API key exists" in log
    again = start()
    wait_until_ready(url, again)
    assert httpx.post(f"{url}/v1/events", json=event).json()["results"][0]["status"] == "duplicate", "it was durable"
    again.kill()


def test_it_refuses_another_address_until_there_is_a_key(start: Start) -> None:
    refused = start(RATCHET_HOST="0.0.0.0")
    assert refused.wait(PATIENCE_S) == 2
    assert refused.stdout is not None
    assert "ratchet keys create" in refused.stdout.read()
    created = start("pipelines", "keys", "create", "--break-glass", "--name", "ops", "--scope", "admin")
    shown, _ = created.communicate(timeout=PATIENCE_S)
    key = shown.splitlines()[0]
    listed, _ = start("pipelines", "keys", "list", "--break-glass").communicate(timeout=PATIENCE_S)
    assert key[:11] in listed
    assert "never" in listed, "it was not used yet"
    assert key[12:] not in listed
    revoked, _ = start("pipelines", "keys", "revoke", key[:11], "--break-glass").communicate(timeout=PATIENCE_S)
    assert "revoked" in revoked
    assert start(RATCHET_HOST="0.0.0.0").wait(PATIENCE_S) == 2


def test_a_database_without_a_schema_is_refused_with_the_cure(start: Start, tmp_path: Path) -> None:
    refused = start(RATCHET_DATA=str(tmp_path / "elsewhere"))
    output, _ = refused.communicate(timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert "ratchet db upgrade" in output
    assert "Traceback" not in output
