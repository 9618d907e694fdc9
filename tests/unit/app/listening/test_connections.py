"""By when what a connection is sending must be complete, how much may come without an end, and how fast what was refused is read."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvicorn
import uvicorn.protocols.http.httptools_impl
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.listening.connections import BODY_S, HEAD_BYTES, HEADERS_S, Connection, Server, cut_off_late


class Loop:
    """A clock that is moved by hand; what is to happen later is written down."""

    def __init__(self) -> None:
        self.now = 100.0
        self.later: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], *_: object) -> None:
        self.later.append((delay, callback))

    def create_task(self, work: Coroutine[Any, Any, Any], **_: object) -> "Loop":
        """Nobody answers."""
        work.close()
        return self

    def add_done_callback(self, _: Callable[[object], None]) -> None:
        """Nothing is ever done."""


class Wire(asyncio.Transport):
    """What was done to a connection, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return "closed" in self.done

    def close(self) -> None:
        self.done.append("closed")

    def abort(self) -> None:
        self.done.append("aborted")

    def pause_reading(self) -> None:
        self.done.append("paused")

    def resume_reading(self) -> None:
        self.done.append("resumed")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Is never asked."""


def config() -> uvicorn.Config:
    return uvicorn.Config(app, http=Connection, ws="none", log_config=None)


def opened(loop: Loop, wire: Wire) -> Connection:
    made = Connection(config(), ServerState(), {}, cast(asyncio.AbstractEventLoop, loop))
    made.connection_made(wire)
    return made


HEAD = b"POST /feedback HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 3000000\r\n"


def test_whoever_connects_has_ten_seconds_for_headers_twenty_for_a_body_and_then_nothing_is_awaited() -> None:
    assert (HEADERS_S, BODY_S) == (10.0, 20.0)
    loop, seen = Loop(), list[float | None]()
    connection = opened(loop, Wire())
    for data in (b"", b"POST /feedback HT", b"TP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n", b"\r\n", b"{", b"}", b"GET"):
        loop.now += 1
        connection.data_received(data)
        seen.append(connection.late_at)
    assert seen == [110, 112, 112, 124, 124, None, 117], "of the next request on it the headers are awaited anew"


def test_sixty_four_kilobytes_of_headers_are_waited_for_and_no_byte_more() -> None:
    wire = Wire()
    connection = opened(Loop(), wire)
    connection.data_received(HEAD)  # the message began with it
    for _ in range(2):
        connection.data_received(b"x-a: " + b"a" * (HEAD_BYTES // 2 - 5))
    assert (HEAD_BYTES, wire.written, wire.done) == (65_536, b"", [])
    connection.data_received(b"a")
    assert wire.written == b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    told = wire.written
    connection.data_received(b"a")
    assert (wire.done, wire.written) == (["closed"], told), "it is told once"


def test_blank_lines_before_a_request_have_an_end_too() -> None:
    wire = Wire()
    connection = opened(Loop(), wire)
    connection.data_received(b"\r\n" * (HEAD_BYTES // 2))
    assert wire.done == []
    connection.data_received(b"\r\n")
    assert wire.done == ["closed"]


def test_a_body_may_be_longer_than_that_and_each_request_begins_its_count_anew() -> None:
    wire = Wire()
    connection = opened(Loop(), wire)
    connection.data_received(HEAD)
    connection.data_received(b"x-a: " + b"a" * (HEAD_BYTES - 10))
    connection.data_received(b"\r\n\r\n")
    for _ in range(3):
        connection.data_received(b"x" * 1_000_000)
    for _ in range(3):
        connection.data_received(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        connection.data_received(b"x-a: " + b"a" * (HEAD_BYTES - 10))
        connection.data_received(b"\r\n\r\n")
    assert "closed" not in wire.done
    assert wire.written == b""


def test_a_body_that_was_refused_is_read_at_a_hundred_megabytes_a_second_and_another_one_as_it_comes() -> None:
    loop, wire = Loop(), Wire()
    connection = opened(loop, wire)
    connection.data_received(HEAD + b"\r\n" + b"x" * 1000)
    assert (loop.later, wire.done, connection.cycle.body) == ([], [], b"x" * 1000)
    connection.cycle.response_complete = True
    connection.data_received(b"x" * 50_000)
    ((delay, resume),) = loop.later
    assert (delay, wire.done) == (0.0005, ["paused"])
    resume()
    assert wire.done == ["paused", "resumed"]


def test_whoever_is_late_is_cut_off_and_nobody_who_has_a_moment_left_or_awaits_an_answer() -> None:
    loop, wires = Loop(), [Wire() for _ in range(3)]
    late, just, answered = (opened(loop, wire) for wire in wires)
    late.late_at, just.late_at, answered.late_at = 119.9, 120.0, None
    assert cut_off_late([late, just, answered, object()], 120.0) == 1
    assert [wire.done for wire in wires] == [["aborted"], [], []]


def test_a_server_looks_once_a_second_and_ends_when_it_is_told_to() -> None:
    server, wire = Server(config()), Wire()
    connection = opened(Loop(), wire)
    connection.late_at = float("-inf")
    server.server_state.connections = {connection}
    assert [asyncio.run(server.on_tick(counter)) for counter in range(1, 10)] == [False] * 9
    assert wire.done == []
    server.should_exit = True
    assert asyncio.run(server.on_tick(20)) is True
    assert wire.done == ["aborted"]


@pytest.mark.parametrize("protocol", ["auto", uvicorn.protocols.http.httptools_impl.HttpToolsProtocol])
def test_a_server_whose_connections_wait_for_ever_is_not_made(protocol: Any) -> None:
    with pytest.raises(AssertionError, match="give uvicorn"):
        Server(uvicorn.Config(app, http=protocol))
