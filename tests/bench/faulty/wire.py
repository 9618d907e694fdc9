"""What is between a client and a server, and how it fails: connections are cut, stall, crawl, or lose the answer to a request that arrived.

One thread with an event loop forwards bytes from a port of its own to the server's. Faults happen between one pair at a time: to the
connections of one of the server's clients (`Pair`), which are told apart by whose socket is at the other end.
"""

import asyncio
import itertools
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import StrEnum

DELAY_S = 0.2
HALF_OPEN_S, DELAYED_S, SWALLOWED_S = 3.0, 2.0, 0.5
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that closes with a reset instead of a farewell."""


class Fault(StrEnum):
    """How a connection fails."""

    CUT = "cut"
    """Everything open is reset, mid-response or not."""
    SWALLOWED = "swallowed"
    """Requests arrive; instead of the answer comes a reset: nobody knows whether it was done."""
    HALF_OPEN = "half_open"
    """Connections stay open and nothing moves, then they are reset."""
    DELAYED = "delayed"
    """Every piece takes 200 ms longer."""


class Wire:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`to`; `whose` tells which client a connection from a port is of."""

    def __init__(self, *, port: int, to: int, whose: Callable[[int], str] = lambda port: "client") -> None:
        self.port, self._to, self._whose = port, to, whose
        self._faults: dict[str, Fault] = {}
        self._next: dict[str, Iterator[Fault]] = defaultdict(lambda: itertools.cycle(Fault))
        self._open: dict[str, set[asyncio.StreamWriter]] = defaultdict(set)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"wire-{port}", daemon=True)
        self._thread.start()
        self._ready.wait(10)

    def point(self, to: int) -> None:
        """Lead to another port from now on; what is open ends by itself, with the server that is gone."""
        self._to = to

    def fail(self, who: str) -> bool:
        """The next fault between this client and the server; false while the last one is not over."""
        if who in self._faults:
            return False
        self._faults[who] = next(self._next[who])
        asyncio.run_coroutine_threadsafe(self._suffer(who, self._faults[who]), self._loop)
        return True

    def close(self) -> None:
        """Stop forwarding."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connect, "127.0.0.1", self.port))
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for who in list(self._open):
            self._reset(who)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _suffer(self, who: str, fault: Fault) -> None:
        if fault is not Fault.CUT:
            await asyncio.sleep({Fault.HALF_OPEN: HALF_OPEN_S, Fault.DELAYED: DELAYED_S, Fault.SWALLOWED: SWALLOWED_S}[fault])
        if fault in (Fault.CUT, Fault.HALF_OPEN):
            self._reset(who)
        del self._faults[who]

    def _reset(self, who: str) -> None:
        for writer in list(self._open[who]):
            _reset(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            _reset(writer)
            return
        both = {writer, server_writer}
        who = await asyncio.to_thread(self._whose, writer.get_extra_info("peername")[1])
        self._open[who] |= both
        try:
            await asyncio.gather(
                self._pump(who, reader, server_writer, answers=False), self._pump(who, server_reader, writer, answers=True)
            )
        finally:
            for end in both:
                _reset(end)
            self._open[who] -= both

    async def _pump(self, who: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        """Bytes of one direction until it ends, or a fault ends it."""
        try:
            while data := await reader.read(65_536):
                if self._faults.get(who) is Fault.DELAYED:
                    await asyncio.sleep(DELAY_S)
                while self._faults.get(who) is Fault.HALF_OPEN:
                    await asyncio.sleep(0.05)
                if self._faults.get(who) is Fault.SWALLOWED and answers:
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        _reset(writer)


class Pair:
    """One client of a server, and the wire between the two."""

    def __init__(self, wire: Wire, who: str) -> None:
        self._wire, self._who = wire, who

    def kill(self) -> bool:
        """The next fault between them; false while the last one is not over."""
        return self._wire.fail(self._who)


def _reset(writer: asyncio.StreamWriter) -> None:
    end = writer.get_extra_info("socket")
    if end is not None and end.fileno() >= 0 and not writer.is_closing():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
