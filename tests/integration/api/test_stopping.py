"""A service that stops ends its running answers and records them first; slow bodies are not waited for."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from app.api.telemetry.intake import Limits
from app.domain.telemetry.events import EventType
from app.domain.telemetry.turns import FinishReason, TurnServed
from app.listening.connections import Connection
from app.listening.sockets import bound
from app.main import create_app, listen
from app.policy.storage.store import LocalWeights
from app.serving import process
from app.serving import worker as serving_limits
from app.serving.engine import create_engine
from app.serving.residency import Residency
from app.serving.worker import Worker
from app.settings import from_environment
from tests.fakes.engines import MemoryEngineLedger
from tests.fakes.gateway import ScriptedEngines, collaborators, events_of, serving
from tests.fakes.inbox import MemoryInbox


def test_running_answers_are_recorded_as_aborted_when_the_service_stops() -> None:
    inbox = MemoryInbox()
    engines = ScriptedEngines(before_token=lambda index: asyncio.sleep(0 if index == 0 else 30))
    app = create_app(collaborators(inbox=inbox, engines=engines))
    body = {"model": "composer", "messages": [{"role": "user", "content": "x"}], "stream": True}
    with serving(app) as url, httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        chunks = response.iter_raw()
        first = next(chunks)  # `chunks` must live on: with it httpx would close the connection
        assert response.status_code == 200, first
        (running,) = app.chat.running
        loop = running.get_loop()
        asyncio.run_coroutine_threadsafe(app.chat.finish(drain_s=0.2, grace_s=0.2), loop).result(5)
        (event,) = events_of(inbox, EventType.TURN)
    assert msgspec.json.decode(event.data, type=TurnServed).finish_reason == FinishReason.ABORTED


def test_an_answer_that_ends_within_the_drain_is_whole() -> None:
    """What RATCHET_DRAIN_S is for: a rolling upgrade cuts nobody off."""
    inbox = MemoryInbox()
    app = create_app(collaborators(inbox=inbox, engines=ScriptedEngines(before_token=lambda index: asyncio.sleep(0 if index == 0 else 1))))
    body = {"model": "composer", "messages": [{"role": "user", "content": "x"}], "stream": True}
    with serving(app) as url, httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        chunks = response.iter_raw()
        next(chunks)
        (running,) = app.chat.running
        ending = asyncio.run_coroutine_threadsafe(app.chat.finish(drain_s=60, grace_s=0.2), running.get_loop())
        rest = b"".join(chunks)
        ending.result(60)
        (event,) = events_of(inbox, EventType.TURN)
    assert b"[DONE]" in rest
    assert msgspec.json.decode(event.data, type=TurnServed).finish_reason == FinishReason.STOP


def test_what_was_refused_by_its_size_is_read_to_its_end_in_no_hurry() -> None:
    size = 40_000_000
    with (
        serving(create_app(collaborators())) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as sent,
    ):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: testserver\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
        began = time.monotonic()
        sent.sendall(head.encode() + bytes(size))
        took_s = time.monotonic() - began
        answer = sent.recv(4096)
        assert answer.startswith(b"HTTP/1.1 400"), answer
        assert b"context_length_exceeded" in answer
        assert took_s > 0.2, "what the kernel holds comes at once, and the rest at a hundred megabytes a second"
        sent.sendall(b"GET /health HTTP/1.1\r\nhost: testserver\r\n\r\n")
        assert sent.recv(4096).startswith(b"HTTP/1.1 200"), "and the connection goes on"


def test_a_body_that_drips_in_is_a_408_and_does_not_shut_out_others() -> None:
    app = create_app(collaborators(limits=Limits(body_s=2.0)))
    with serving(app) as url:
        answers: list[bytes] = []

        def drip() -> None:
            with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as slow:
                slow.sendall(
                    b"POST /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
                )
                answers.append(slow.recv(100))

        dripping = [threading.Thread(target=drip) for _ in range(50)]
        for thread in dripping:
            thread.start()
        time.sleep(0.1)
        assert httpx.get(f"{url}/status", timeout=60).status_code == 200
        for thread in dripping:
            thread.join(10)
    assert {answer.split(b" ")[1] for answer in answers} == {b"408"}


class Hasty(Connection):
    """As in production, in a tenth of a second."""

    headers_s = body_s = 0.1


@contextmanager
def behind(whose: str, folder: Path, *, connection: type[Connection] = Connection) -> Iterator[str]:
    """The api, or an engine that holds nothing; both answer `/health`."""
    worker = Worker(serving_limits.Limits(rows=1))
    engine = create_engine(worker, Residency(worker, MemoryEngineLedger(), LocalWeights(folder)))
    with serving(create_app(collaborators()) if whose == "api" else engine, connection=connection) as url:
        yield url


@pytest.mark.parametrize("whose", ["api", "engine"])
@pytest.mark.parametrize(
    "half",
    [
        b"",
        b"POST /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
        b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/releases/r/abort HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /status HTTP/1.1\r\nHost: ",
    ],
)
def test_half_a_request_is_cut_off_whatever_it_was_for(half: bytes, whose: str, tmp_path: Path) -> None:
    with behind(whose, tmp_path, connection=Hasty) as url:
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=20) as slow:
            slow.sendall(half)
            try:
                while slow.recv(65_536):
                    pass
            except ConnectionResetError:
                pass  # cut off, without a farewell
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200


ENDLESS = {
    "headers": b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    "one header": b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ",
    "an address": b"GET /status?",
    "trailers": b"POST /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\n{}\r\n0\r\n",
}
"""How they begin."""


@pytest.mark.parametrize("whose", ["api", "engine"])
@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_cut_off_before_it_fills_the_memory(what: str, whose: str, tmp_path: Path) -> None:
    piece = (b"x-%d: " % 7 + b"a" * 1000 + b"\r\n") * 60 if what in ("headers", "trailers") else b"a" * 60_000
    with behind(whose, tmp_path) as url:
        sent = 0
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=20) as endless:
            endless.sendall(ENDLESS[what])
            with pytest.raises(ConnectionError):
                while sent < 100_000_000:
                    endless.sendall(piece)
                    sent += len(piece)
        assert sent < 30_000_000, "what the sockets of both sides hold, and a little"
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200


@pytest.mark.parametrize(
    ("framed", "sent"), [(b"Content-Length: 1000000000", b""), (b"Transfer-Encoding: chunked", b"1000\r\n" + b" " * 4096 + b"\r\n")]
)
def test_an_engine_refuses_a_body_before_it_has_come(framed: bytes, sent: bytes, tmp_path: Path) -> None:
    """By its announced length, or as soon as more than 8 MB of it are there: nobody sends the rest."""
    head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + framed + b"\r\n\r\n"
    with (
        behind("engine", tmp_path) as url,
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=10) as sender,
    ):
        sender.sendall(head)
        for _ in range(2100):
            sender.sendall(sent)
        answer = b""
        while b"shorten the conversation" not in answer and (more := sender.recv(4096)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b"shorten the conversation" in answer


def test_a_long_body_in_small_chunks_has_an_end() -> None:
    """What frames it is several times what is in it, and comes with it."""
    event = msgspec.json.encode({"id": "c", "inference_id": "i", "name": "comment", "value": "x" * 40_000})
    inbox = MemoryInbox()
    with serving(create_app(collaborators(inbox=inbox))) as url:
        chunks = (event[at : at + 3] for at in range(0, len(event), 3))
        answer = httpx.post(f"{url}/v1/events", content=chunks, headers={"content-type": "application/json"}, timeout=60)
    assert (answer.status_code, len(inbox.events)) == (202, 1)


def test_a_whole_request_may_take_its_time_to_be_answered() -> None:
    engines = ScriptedEngines(before_token=lambda index: asyncio.sleep(1.5 if index == 0 else 0))
    body = {"model": "composer", "messages": [{"role": "user", "content": "x"}]}
    with serving(create_app(collaborators(engines=engines)), connection=Hasty) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).status_code == 200


@pytest.mark.parametrize("whose", ["api", "engine"])
def test_small_answers_leave_at_once(whose: str) -> None:
    """Headers and body are two writes: without this the second waits 40 ms, until the first was acknowledged."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listener = listen(from_environment({"RATCHET_PORT": str(port)})) if whose == "api" else process.listen("127.0.0.1", port)

    async def story() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def note(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            seen.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            found = await asyncio.wait_for(seen, 60)
            writer.close()
            await writer.wait_closed()
            return found

    assert asyncio.run(story()) == 1


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_place_that_was_left_a_moment_ago_is_taken_again_and_one_that_is_taken_leaves_nothing_open(
    host: str, family: socket.AddressFamily
) -> None:
    """A socket that were left open would be a ResourceWarning, and that an error."""
    with bound(host, 0) as listener:
        assert (listener.family, listener.type, listener.proto) == (family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        listener.listen()
        with pytest.raises(OSError, match="in use"):
            bound(host, listener.getsockname()[1])
