"""On which port the embedded broker listens: where it was found before, as long as nobody else is there."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.messaging.broker import choose_port
from app.messaging.cluster import announce


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield int(listening.getsockname()[1])


def free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_broker_comes_back_where_it_was_and_begins_where_it_is_wanted(tmp_path: Path) -> None:
    address, last, preferred = tmp_path / "broker.json", free(), free()
    assert choose_port(address, preferred=preferred) == preferred
    announce(address, last)
    assert choose_port(address, preferred=preferred) == last


def test_whoever_listens_there_already_is_left_alone(tmp_path: Path, taken: int) -> None:
    address, preferred = tmp_path / "broker.json", free()
    announce(address, taken)
    assert choose_port(address, preferred=preferred) == preferred
    other = choose_port(address, preferred=taken)
    assert other != taken
    assert other >= 1024, "one that the machine gives to whoever asks for any"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", other))


def test_an_address_that_nobody_can_read_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "broker.json").write_text('{"address": 7')
    preferred = free()
    assert choose_port(tmp_path / "broker.json", preferred=preferred) == preferred
