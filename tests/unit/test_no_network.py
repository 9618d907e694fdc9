"""The guard of tests/unit/conftest.py guards."""

import asyncio
import socket

import pytest


def test_a_unit_test_cannot_connect_even_to_itself() -> None:
    with socket.socket() as client, pytest.raises(RuntimeError, match="tests/integration"):
        client.connect(("127.0.0.1", 9))


def test_a_unit_test_cannot_listen() -> None:
    with socket.socket() as server, pytest.raises(RuntimeError, match="tests/integration"):
        server.bind(("127.0.0.1", 0))


def test_an_event_loop_still_runs() -> None:
    assert asyncio.run(asyncio.sleep(0, "ran")) == "ran"


def test_a_unit_test_gets_no_database_server(request: pytest.FixtureRequest) -> None:
    with pytest.raises(RuntimeError, match="tests/integration"):
        request.getfixturevalue("postgres_url")
