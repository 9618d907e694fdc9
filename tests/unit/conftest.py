"""Unit tests speak to nobody: a network address, loopback included, is refused in all of them, and so is a database server."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_GUARDED_EVENTS = {"socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"}
_guarding = False


@pytest.fixture(autouse=True)
def no_network() -> Iterator[None]:
    """Refuses the network for the length of a test."""
    with _refusing():
        yield


@pytest.fixture(scope="session")
def postgres_server() -> str:
    """No server: it takes seconds to start."""
    raise RuntimeError("a unit test asked for PostgreSQL: move it to tests/integration/database")


@contextmanager
def _refusing() -> Iterator[None]:
    global _guarding
    _guarding = True
    try:
        yield
    finally:
        _guarding = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: it sees every socket, whichever library opened it. A Unix socket's address is a string and passes."""
    if not _guarding or event not in _GUARDED_EVENTS:
        return
    to_a_path = event in {"socket.connect", "socket.bind"} and isinstance(arguments[1], str | bytes)
    if not to_a_path:
        raise RuntimeError(f"a unit test reached for the network ({event}); hand it a fake, or move it to tests/integration")


sys.addaudithook(_refuse)  # hooks cannot be removed; outside of unit tests this one answers at once
