"""The socket that a box reaches, asked by a box that wishes no good; and the journal that a crash cut off."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pipelines.rollouts.interception import MOST_BODY_BYTES, MOST_CONNECTIONS, Always, Bounds, Exchange, FileJournal, Interception, Socket

BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()


@pytest.fixture
def episode(tmp_path: Path) -> Iterator[Socket]:
    """A socket whose gateway always answers."""
    said = {"choices": [{"message": {"content": "y"}}], "usage": {"completion_tokens": 1}}
    gateway = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, json=said)), base_url="http://gateway")
    bounds = Bounds(most_turns=5, most_tokens=100, deadline=float("inf"))
    service = Interception(
        gateway=gateway, policy="composer", tags={}, bounds=bounds, journal=FileJournal(tmp_path / "journal"), permit=Always()
    )  # fmt: skip
    opened = Socket(service=service)
    yield opened
    opened.close()


def connected(episode: Socket) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(episode.path))  # waits where the backlog is full, as long as there is no time limit
    client.settimeout(20.0)
    return client


def status_of(episode: Socket, length: str, body: bytes) -> int:
    with connected(episode) as client:
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {length}\r\n\r\n".encode() + body)
        return int(client.recv(1000).split()[1])


def test_a_completion_passes_and_nothing_of_another_size_is_read(episode: Socket) -> None:
    assert status_of(episode, str(len(BODY)), BODY) == 200
    for length in ("-1", "many", str(MOST_BODY_BYTES + 1)):
        assert status_of(episode, length, b"") == 413, "and without waiting for more, or for an end"


def test_who_is_refused_hears_it_and_may_go_on_with_the_same_connection(episode: Socket) -> None:
    with connected(episode) as client, client.makefile("rb") as heard:
        for asked, body, expected in (
            ("POST /feedback", BODY, 404), ("GET /v1/chat/completions", b"", 404), ("POST /v1/chat/completions", BODY, 200),
        ):  # fmt: skip
            client.sendall(f"{asked} HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            assert int(heard.readline().split()[1]) == expected
            headers = dict(line.decode().lower().split(": ") for line in iter(heard.readline, b"\r\n"))
            heard.read(int(headers["content-length"]))


@pytest.mark.parametrize("tokens", ["many", [1], {"a": 1}])
def test_a_number_of_tokens_that_is_none_is_refused(episode: Socket, tokens: object) -> None:
    body = json.dumps({"messages": [], "max_tokens": tokens}).encode()
    assert status_of(episode, str(len(body)), body) == 400


def test_a_box_that_opens_connections_without_end_gets_no_more_threads(episode: Socket) -> None:
    before = threading.active_count()
    with ExitStack() as held:
        opened = [held.enter_context(connected(episode)) for _ in range(3 * MOST_CONNECTIONS)]
        assert opened[-1].recv(1) == b"", "the last one is closed by us"
        assert threading.active_count() - before <= MOST_CONNECTIONS
    assert any(answers(episode) for _ in range(100)), "and those that were given back can be had again"


def answers(episode: Socket) -> bool:
    try:
        return status_of(episode, str(len(BODY)), BODY) == 200
    except (OSError, IndexError):
        return False


def exchange(number: int) -> Exchange:
    return Exchange(asked=str(number), request={}, answer={"n": number}, version="v")


@pytest.mark.parametrize("torn", [b'{"asked": "2", "req', b'{"asked":"2","request":{},"answer":{},"version":"v"}'])
def test_what_is_written_behind_a_line_that_was_cut_off_is_read_again(tmp_path: Path, torn: bytes) -> None:
    journal = FileJournal(tmp_path / "journal")
    journal.append(exchange(1))
    with journal.path.open("ab") as file:
        file.write(torn)
    assert FileJournal(journal.path).read() == [exchange(1)]
    journal.append(exchange(3))
    assert FileJournal(journal.path).read() == [exchange(1), exchange(3)]
