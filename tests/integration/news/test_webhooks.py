"""Webhooks: written with the event, signed with every secret, repeated until they arrive, and never sent into our own network."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, select, update
from standardwebhooks.webhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError

from app.db.release.webhooks import SqlWebhookBook, Webhook
from app.db.tables import webhooks
from app.domain.errors import BadRequest
from app.domain.ids import utc_now
from app.release.addresses import addresses_of, check_url
from app.release.webhooks import WAITS, Courier, new_secret
from app.sealing import Seal
from tests.fakes.clock import FrozenClock
from tests.fakes.releases import ReleaseRoom, release_room
from tests.fakes.sealed import SEAL

PUBLIC = "93.184.216.34"


@pytest.fixture
def book(sqlite_engine: Engine) -> SqlWebhookBook:
    return SqlWebhookBook(sqlite_engine, SEAL)


def _hook(book: SqlWebhookBook, *, events: tuple[str, ...] = ("release.canary",), secret: str | None = None) -> Webhook:
    return book.add(policy="tab", url="https://ops.example/hook", secret=secret or new_secret(), events=events, now=utc_now())


def _courier(book: SqlWebhookBook, clock: FrozenClock, handler: Callable[[httpx.Request], httpx.Response]) -> Courier:
    return Courier(book, clock=clock, clients=answering(handler), resolve=lambda host: [PUBLIC])


def answering(handler: Callable[[httpx.Request], httpx.Response], **options: Any) -> Callable[[], httpx.AsyncClient]:
    """Clients that reach nobody else."""
    return lambda: httpx.AsyncClient(transport=httpx.MockTransport(handler), **options)


class Receiver:
    """Answers with the statuses it is given, then 204, and keeps what it got."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return httpx.Response(self.statuses.pop(0) if self.statuses else 204)


def _room(engine: Engine) -> ReleaseRoom:
    room = release_room(engine)
    room.clock.now = utc_now()
    return room


def test_a_receiver_gets_the_events_it_asked_for_signed(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, secret, receiver = _room(sqlite_engine), new_secret(), Receiver()
    _hook(book, secret=secret)
    release = room.canary("v2")
    assert _courier(book, room.clock, receiver).deliver_due() == 1
    request = receiver.requests[0]
    body = Verifier(secret).verify(request.content, dict(request.headers))
    assert body["type"] == "release.canary"
    assert body["data"]["subject"] == release.id
    assert len(body["data"]["audit"]["hash"]) == 64, "the audit chain is anchored outside the database"


def test_a_changed_body_a_replay_and_a_wrong_secret_are_found(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, secret, receiver = _room(sqlite_engine), new_secret(), Receiver()
    _hook(book, secret=secret)
    room.canary("v2")
    _courier(book, room.clock, receiver).deliver_due()
    headers, body = dict(receiver.requests[0].headers), receiver.requests[0].content
    with pytest.raises(WebhookVerificationError):
        Verifier(secret).verify(body.replace(b"CANARY", b"READY!"), headers)
    with pytest.raises(WebhookVerificationError):
        Verifier(new_secret()).verify(body, headers)
    with pytest.raises(WebhookVerificationError, match="too old"):
        Verifier(secret).verify(body, {**headers, "webhook-timestamp": str(int(headers["webhook-timestamp"]) - 3600)})


def test_the_database_holds_no_secret_that_could_sign(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    hook = _hook(book, secret=(secret := new_secret()))
    book.set_secrets(hook.id, [newer := new_secret(), secret])
    with sqlite_engine.connect() as connection:
        stored = [str(row) for row in connection.execute(select(webhooks))]
    assert not [row for row in stored if secret in row or newer in row or secret.removeprefix("whsec_") in row]
    assert book.find(hook.id).secrets == (newer, secret)


def test_a_sealed_secret_opens_with_its_key_and_for_its_receiver_alone(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    mine, other = _hook(book), _hook(book)
    with sqlite_engine.begin() as connection:
        sealed = connection.execute(select(webhooks.c.sealed).where(webhooks.c.id == mine.id)).scalar_one()
        connection.execute(update(webhooks).where(webhooks.c.id == other.id).values(sealed=sealed))
    assert book.find(other.id).secrets == (), "moved to another receiver it opens as nothing"
    stranger = SqlWebhookBook(sqlite_engine, Seal(keys=lambda: ("another key",)))
    assert stranger.find(mine.id).secrets == ()
    rotated = SqlWebhookBook(sqlite_engine, Seal(keys=lambda: ("a newer key", *SEAL.keys())))
    assert rotated.find(mine.id).secrets == mine.secrets


def test_what_cannot_be_signed_is_not_sent_and_says_why(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    hook, receiver = _hook(book), Receiver()
    stranger = SqlWebhookBook(sqlite_engine, Seal(keys=lambda: ("another key",)))
    status, arrived = asyncio.run(_courier(book, FrozenClock(utc_now()), receiver).send_test(stranger.find(hook.id)))
    assert (arrived, receiver.requests) == (False, [])
    assert "sealed with another key" in status


def test_both_secrets_sign_while_they_are_rotated(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, old, new, receiver = _room(sqlite_engine), new_secret(), new_secret(), Receiver()
    book.set_secrets(_hook(book, secret=old).id, [new, old])
    room.canary("v2")
    _courier(book, room.clock, receiver).deliver_due()
    for secret in (old, new):
        assert Verifier(secret).verify(receiver.requests[0].content, dict(receiver.requests[0].headers))


def test_what_does_not_arrive_is_repeated_with_the_same_id_until_it_does(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, receiver = _room(sqlite_engine), Receiver(500, 429)
    hook = _hook(book)
    room.canary("v2")
    courier = _courier(book, room.clock, receiver)
    assert courier.deliver_due() == 0
    assert courier.deliver_due() == 0, "its time has not come yet"
    room.clock.advance(WAITS[0].total_seconds())
    assert courier.deliver_due() == 0
    room.clock.advance(WAITS[1].total_seconds())
    assert courier.deliver_due() == 1
    assert courier.deliver_due() == 0
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    assert book.deliveries(hook.id)[0]["attempts"] == 3


def test_after_days_it_is_given_up_and_stays_on_record(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, receiver = _room(sqlite_engine), Receiver(*[500] * 20)
    hook = _hook(book)
    room.canary("v2")
    courier = _courier(book, room.clock, receiver)
    for _ in range(15):
        courier.deliver_due()
        room.clock.advance(timedelta(days=1).total_seconds())
    assert len(receiver.requests) == len(WAITS) + 1
    record = book.deliveries(hook.id)[0]
    assert (record["delivered_at"], record["next_attempt_at"], record["last_status"]) == (None, None, "500")


def test_a_receiver_that_is_gone_is_not_asked_again(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, receiver = _room(sqlite_engine), Receiver(410)
    hook = _hook(book, events=())
    room.queued("v2")
    courier = _courier(book, room.clock, receiver)
    courier.deliver_due()
    assert book.find(hook.id).disabled_at is not None
    room.queued("v3")
    sent = len(receiver.requests)
    room.clock.advance(86_400)
    courier.deliver_due()
    assert len(receiver.requests) == sent


DISGUISED = (
    "fec0::1", "::10.0.0.7", "::ffff:0:10.0.0.7", "192.0.0.192", "192.88.99.1", "224.0.0.1", "239.255.255.250", "ff02::1", "ff0e::1",
    "3fff::1", "5f00::1", "2001::a00:7", "2001:db8::1", "100::1", "fe80::1", "fc00::1", "::", "0.0.0.0", "240.0.0.1", "255.255.255.255",
    "100.64.0.1", "198.18.0.1", "64:ff9b::e000:1", "4000::1",
)  # fmt: skip
"""Local, reserved, of documents, of many, or IPv4 addresses that a translator or a tunnel makes of them: nobody's in the internet."""


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::5db8:d822"])
def test_addresses_in_the_internet_are_not_refused(address: str) -> None:
    assert check_url("https://ops.example/hook", allow_loopback=False, resolve=lambda host: [address]) == address


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("http://ops.example/hook", [PUBLIC]),
        ("https://ops.example/hook", ["10.0.0.7"]),
        ("https://ops.example/hook", [PUBLIC, "169.254.169.254"]),
        ("https://ops.example/hook", ["::1"]),
        ("https://ops.example/hook", ["127.0.0.1"]),
        ("https://user:secret@ops.example/hook", [PUBLIC]),
        ("file:///etc/passwd", [PUBLIC]),
        ("https://ops.example/hook", []),
        ("https://ops.example/hook", ["64:ff9b::a00:7"]),  # NAT64 for 10.0.0.7
        ("https://ops.example/hook", ["64:ff9b::a9fe:a9fe"]),  # and for 169.254.169.254
        ("https://ops.example/hook", ["64:ff9b:1::a00:7"]),  # a NAT64 prefix of one's own network (RFC 8215)
        ("https://ops.example/hook", ["::ffff:10.0.0.7"]),
        ("https://ops.example/hook", ["2002:a00:7::1"]),  # 6to4 of 10.0.0.7
        *(("https://ops.example/hook", [address]) for address in DISGUISED),
    ],
)
def test_addresses_inside_our_own_network_are_refused(url: str, addresses: list[str]) -> None:
    with pytest.raises(BadRequest):
        check_url(url, allow_loopback=False, resolve=lambda host: addresses)


def test_loopback_is_allowed_on_a_deployment_of_one_machine() -> None:
    check_url("http://127.0.0.1:9/hook", allow_loopback=True, resolve=lambda host: ["127.0.0.1"])


def test_a_name_that_moved_into_our_network_is_not_followed(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, receiver = _room(sqlite_engine), Receiver()
    hook = _hook(book)
    room.canary("v2")
    assert Courier(book, clock=room.clock, clients=answering(receiver), resolve=lambda host: ["10.0.0.7"]).deliver_due() == 0
    assert receiver.requests == []
    assert "private network" in str(book.deliveries(hook.id)[0]["last_status"])


def test_a_delivery_goes_to_the_address_that_was_checked_and_asks_no_resolver_again(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, receiver, asked = _room(sqlite_engine), Receiver(), list[str]()
    _hook(book)
    room.canary("v2")

    def rebinding(host: str) -> list[str]:
        asked.append(host)
        return [PUBLIC] if len(asked) == 1 else ["10.0.0.7"]

    assert Courier(book, clock=room.clock, clients=answering(receiver), resolve=rebinding).deliver_due() == 1
    (request,) = receiver.requests
    assert (request.url.host, request.headers["host"]) == (PUBLIC, "ops.example")
    assert request.extensions["sni_hostname"] == "ops.example", "whose certificate it has to show"
    assert asked == ["ops.example"]


def test_a_redirect_is_not_followed_whatever_client_delivers(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room, asked = _room(sqlite_engine), list[str]()
    hook = _hook(book)
    room.canary("v2")

    def redirecting(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(307, headers={"location": "http://169.254.169.254/latest/meta-data"})

    for follows in (False, True):
        clients = answering(redirecting, follow_redirects=follows)
        assert Courier(book, clock=room.clock, clients=clients, resolve=lambda host: [PUBLIC]).deliver_due() == 0
        room.clock.advance(10)
    assert asked == [f"https://{PUBLIC}/hook"] * 2
    assert book.deliveries(hook.id)[0]["last_status"] == "307"


@pytest.mark.parametrize(
    "url",
    ["https://ops.example:99999/hook", "https://ops.example/a\tb", "https://[ops.example/hook", "https://ops.example:port/hook"],
)
def test_an_address_that_no_client_can_open_is_refused_and_one_that_is_stored_stops_nobody_else(
    sqlite_engine: Engine, book: SqlWebhookBook, url: str
) -> None:
    with pytest.raises(BadRequest):
        check_url(url, allow_loopback=False, resolve=lambda host: [PUBLIC])
    room, receiver = _room(sqlite_engine), Receiver()
    broken = book.add(policy="tab", url=url, secret=new_secret(), events=("release.canary",), now=utc_now())
    _hook(book)
    room.canary("v2")
    assert _courier(book, room.clock, receiver).deliver_due() == 1
    assert "BadRequest" in str(book.deliveries(broken.id)[0]["last_status"])


def test_a_name_that_nobody_could_be_asked_for_is_refused() -> None:
    with pytest.raises(BadRequest, match="does not resolve"):
        addresses_of(f"{'a' * 64}.example")


@contextmanager
def dripping(piece: bytes, *, first: bytes = b"", every_s: float = 0.05) -> Iterator[tuple[str, list[int]]]:
    """A receiver that never ends its answer; yields its address and how much it could send in each connection."""
    sent, ended = list[int](), threading.Event()

    def serve(connection: socket.socket) -> None:
        at = len(sent)
        sent.append(0)
        try:
            with connection:
                connection.recv(65_536)
                connection.sendall(first)
                while not ended.is_set():
                    connection.sendall(piece)
                    sent[at] += len(piece)
                    time.sleep(every_s)
        except OSError:
            return

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/hook", sent
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)


def test_a_receiver_that_drips_its_headers_has_one_time_for_all_of_them(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    """Every byte of them would start httpx's own clock anew."""
    room = _room(sqlite_engine)
    with dripping(b"x", first=b"HTTP/1.1 200 OK\r\nx-long: ") as (url, _):
        hook = book.add(policy="tab", url=url, secret=new_secret(), events=("release.canary",), now=utc_now())
        room.canary("v2")
        began = time.monotonic()
        assert Courier(book, clock=room.clock, allow_loopback=True, within_s=1.0).deliver_due() == 0
        assert time.monotonic() - began < 20
    assert book.deliveries(hook.id)[0]["last_status"] == "TimeoutError: no answer within 1 s"


def test_of_an_answer_nothing_is_read_past_its_status(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room = _room(sqlite_engine)
    first = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n"
    with dripping(b"x" * 1_000_000, first=first, every_s=0.0) as (url, sent):
        book.add(policy="tab", url=url, secret=new_secret(), events=("release.canary",), now=utc_now())
        room.canary("v2")
        assert Courier(book, clock=room.clock, allow_loopback=True).deliver_due() == 1, "it was taken"
        assert sum(sent) < 20_000_000, "what the sockets hold"


def test_a_receiver_that_takes_its_time_keeps_nobody_else_waiting(
    sqlite_engine: Engine, book: SqlWebhookBook, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one that never answers sixty deliveries are due, older than the other's one."""
    room, stop = _room(sqlite_engine), threading.Event()
    with dripping(b"", every_s=0.2) as (slow, _), dripping(b"", first=b"HTTP/1.1 204 No Content\r\n\r\n") as (quick, _):
        late = book.add(policy="tab", url=slow, secret=new_secret(), events=(), now=utc_now())
        for number in range(20):
            room.desk.abort(room.canary(f"c{number}").id, actor="system:watch", reason="again")
        hook = book.add(policy="tab", url=quick, secret=new_secret(), events=("release.canary",), now=utc_now())
        courier = Courier(book, clock=room.clock, allow_loopback=True, within_s=60.0)
        delivering = threading.Thread(target=courier.run, args=(stop,), kwargs={"interval_s": 0.02}, daemon=True)
        delivering.start()
        try:
            room.canary("v2")
            end = time.monotonic() + 20
            while book.deliveries(hook.id)[0]["last_status"] is None and time.monotonic() < end:
                time.sleep(0.02)
        finally:
            stop.set()
            delivering.join(20)
    assert not delivering.is_alive()
    assert book.deliveries(hook.id)[0]["last_status"] == "204"
    assert {row["attempts"] for row in book.deliveries(late.id)} == {0}
    assert "webhooks wait" not in caplog.text, "nothing went wrong"


def test_of_each_receiver_a_few_are_due_at_a_time(sqlite_engine: Engine, book: SqlWebhookBook) -> None:
    room = _room(sqlite_engine)
    hooks = [_hook(book, events=()) for _ in range(2)]
    for number in range(4):
        room.desk.abort(room.canary(f"c{number}").id, actor="system:watch", reason="again")
    due = book.due(now=room.clock() + timedelta(hours=1), each=3)
    assert [delivery.webhook.id for delivery in due].count(hooks[0].id) == 3
    assert len(due) == 6
    assert [delivery.event_id for delivery in due] == sorted(delivery.event_id for delivery in due), "the oldest first"
