"""Connections that do not wait for ever: whoever sends half a request is cut off, whatever route it was for.

uvicorn itself gives up on idle connections between requests, and on nothing else: one that never sends its headers, or never the rest
of a body that nobody reads, would be held until the sender goes away. Bodies that the API reads are answered 408 before that (`Intake`).
Neither does it count the bytes of headers.
"""

import asyncio
from collections.abc import Iterable

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S = 10.0
"""From the connection, or the first byte of the next request on it, until the headers are complete."""
HEAD_BYTES = 64 * 1024
"""Of headers, or what follows a body, that do not end: four times what is answered, beside what one read brings (up to 256 KB)."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
REFUSED_BYTES_PER_S = 100e6
"""Of a body that was answered before it was there: two senders of megabytes cost everybody else 2 GB a second of reading."""
BODY_S = 20.0
"""From there until the body is: more than `Limits.body_s`, so that readers answer 408 first."""


class Connection(HttpToolsProtocol):
    """One connection, which knows by when what it is sending must be complete. A few attribute writes a request; no timers."""

    headers_s, body_s = HEADERS_S, BODY_S
    late_at: float | None = None
    """On the loop's clock; None while nothing is awaited from the client."""
    endless_bytes = 0
    """Read of the message so far without getting on with it: no headers complete, nothing of a body."""
    gets_on = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Await the first request."""
        super().connection_made(transport)
        self.late_at = self.loop.time() + self.headers_s

    def data_received(self, data: bytes) -> None:
        """Take what came, and cut off what has no end: headers that nobody counted took 400 MB in six seconds."""
        self.gets_on = False
        super().data_received(data)
        if self.gets_on:
            return
        self.endless_bytes += len(data)
        if self.endless_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Await the headers."""
        super().on_message_begin()
        self.gets_on, self.endless_bytes = True, 0
        self.late_at = self.loop.time() + self.headers_s

    def on_headers_complete(self) -> None:
        """Await the body."""
        self.gets_on = True
        self.late_at = self.loop.time() + self.body_s
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of it came."""
        self.gets_on = True
        super().on_body(body)
        if self.cycle.response_complete:  # refused: read to its end, so that its sender sees the answer, but in no hurry
            self.flow.pause_reading()
            self.loop.call_later(len(body) / REFUSED_BYTES_PER_S, self.flow.resume_reading)

    def on_message_complete(self) -> None:
        """Await nothing."""
        self.gets_on = True
        self.late_at = None
        super().on_message_complete()


def cut_off_late(connections: Iterable[object], now: float) -> int:
    """Close the connections whose time is over, without waiting for what they did not read; returns how many."""
    late = [c for c in list(connections) if isinstance(c, Connection) and c.late_at is not None and c.late_at < now]
    for connection in late:
        connection.transport.abort()
    return len(late)


class Server(uvicorn.Server):
    """uvicorn with `Connection` for its protocol, looked over once a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        assert isinstance(config.http, type), "give uvicorn.Config http=Connection"
        assert issubclass(config.http, Connection), "give uvicorn.Config http=Connection"

    async def on_tick(self, counter: int) -> bool:
        """What uvicorn does ten times a second."""
        if counter % 10 == 0:
            cut_off_late(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)
