"""A courier with a book in memory, and receivers that answer as they are told: what is written down of each attempt, and what is left."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from typing import Any, cast

import httpx
import pytest

from app.release.post import PostOffice
from app.release.webhooks import WAITS, Courier, new_secret

NOW = datetime(2026, 11, 24, 6, tzinfo=UTC)
EVENT = {"type": "alarm.raised", "data": {"policy": "tab", "subject": "tab", "actor": "system:watch", "kind": "gap", "reason": "late"}}


@dataclass(frozen=True)
class Hook:
    id: str = "w1"
    url: str = "https://x.de/hook"
    secrets: tuple[str, ...] = (new_secret(),)


@dataclass(frozen=True)
class Due:
    webhook: Hook = Hook()
    event_id: str = "e1"
    attempts: int = 0
    payload: bytes = json.dumps(EVENT).encode()


class Book:
    """What is due, and what was written down."""

    def __init__(self, *waiting: Due) -> None:
        self.waiting = waiting
        self.marks: list[tuple[str, str, dict[str, Any]]] = []
        self.disabled: list[tuple[str, datetime]] = []

    def due(self, *, now: datetime) -> list[Due]:
        assert now == NOW
        return list(self.waiting)

    def mark(self, webhook_id: str, event_id: str, **said: Any) -> None:
        self.marks.append((webhook_id, event_id, said))

    def disable(self, webhook_id: str, *, now: datetime) -> None:
        self.disabled.append((webhook_id, now))


class Endless(httpx.AsyncByteStream):
    """A body without an end, which notes whether it was left."""

    def __init__(self) -> None:
        self.read, self.closed = 0, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            self.read += 1
            yield b"x"

    async def aclose(self) -> None:
        self.closed = True


class Receivers:
    """Answer with a status, or raise."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[httpx.Request] = []
        self.bodies: list[Endless] = []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer), follow_redirects=True)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.bodies.append(Endless())
        return httpx.Response(answer, headers={"location": "https://y.de"}, stream=self.bodies[-1])


def courier(book: Book, receivers: Receivers | None = None, **more: Any) -> Courier:
    asked = receivers or Receivers()
    return Courier(
        book, clock=lambda: NOW, clients=asked.client, address="https://c", **{"resolve": lambda _host: ["8.8.8.8"], **more}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "arrived"), [(200, True), (204, True), (299, True), (302, False), (400, False), (410, False), (500, False)]
)
def test_what_a_receiver_says_is_written_down_and_its_body_is_left_unread(status: int, *, arrived: bool) -> None:
    book, receivers = Book(Due(attempts=2)), Receivers(status)
    assert courier(book, receivers).deliver_due() == int(arrived)
    again = None if arrived else NOW + timedelta(minutes=30)
    told = {"attempts": 3, "status": str(status), "delivered_at": NOW if arrived else None, "next_attempt_at": again}
    assert book.marks == [("w1", "e1", told)]
    assert book.disabled == ([("w1", NOW)] if status == 410 else [])
    assert len(receivers.asked) == 1, "a redirect is an answer"
    assert (receivers.bodies[0].read, receivers.bodies[0].closed) == (0, True)


@pytest.mark.parametrize(("attempts", "wait"), [*enumerate(WAITS), (len(WAITS), None)])
def test_after_each_failed_attempt_the_next_one_waits_longer_and_the_tenth_is_the_last(attempts: int, wait: timedelta | None) -> None:
    book = Book(Due(attempts=attempts))
    courier(book, Receivers(500)).deliver_due()
    ((_, _, told),) = book.marks
    assert (told["attempts"], told["next_attempt_at"]) == (attempts + 1, None if wait is None else NOW + wait)


def test_of_each_receiver_what_is_due_goes_in_order_until_one_fails() -> None:
    book = Book(Due(), Due(event_id="e2"), Due(event_id="e3"))
    assert courier(book, Receivers(200, 500, 200)).deliver_due() == 1
    assert [(event, told["status"]) for _, event, told in book.marks] == [("e1", "200"), ("e2", "500")]
    both = Book(Due(), Due(Hook(id="w2"), "e2"), Due(event_id="e3"))
    assert courier(both, Receivers(200, 200, 200)).deliver_due() == 3
    assert [event for hook, event, _ in both.marks if hook == "w1"] == ["e1", "e3"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (httpx.ConnectError("no route"), "ConnectError: no route"), (httpx.ReadTimeout("slow"), "ReadTimeout: slow"),
        (httpx.ConnectError("x" * 500), f"ConnectError: {'x' * 486}"),
    ],
)  # fmt: skip
def test_what_kept_a_delivery_from_arriving_is_told_in_five_hundred_characters(error: Exception, status: str) -> None:
    book = Book(Due())
    assert courier(book, Receivers(error)).deliver_due() == 0
    assert book.marks[0][2]["status"] == status


def test_a_delivery_goes_to_the_address_that_was_looked_at_under_the_name_that_was_given() -> None:
    receivers = Receivers(200)
    courier(Book(Due()), receivers).deliver_due()
    (request,) = receivers.asked
    assert (request.method, str(request.url), request.headers["host"]) == ("POST", "https://8.8.8.8/hook", "x.de")
    assert request.extensions["sni_hostname"] == "x.de"
    assert request.headers["webhook-id"] == "e1"
    assert request.content == Due().payload


@pytest.mark.parametrize(("scheme", "first"), [("slack+", '{"text":'), ("teams+", '{"attachments":')])
def test_a_chat_gets_words_and_no_signature(scheme: str, first: str) -> None:
    receivers = Receivers(200)
    courier(Book(Due(Hook(url=f"{scheme}https://x.de/hook"))), receivers).deliver_due()
    (request,) = receivers.asked
    assert request.content.decode().startswith(first)
    assert {name for name in request.headers if name.startswith("webhook")} == set()
    assert request.headers["content-type"] == "application/json"


@pytest.mark.parametrize("url", ["https://x.de/hook", "http://x.de/hook"])
def test_nothing_goes_to_this_machine_unless_that_was_said(url: str) -> None:
    book, receivers = Book(Due(Hook(url=url))), Receivers(200)
    assert courier(book, receivers, resolve=lambda _host: ["127.0.0.1"]).deliver_due() == 0
    assert receivers.asked == []
    assert courier(Book(Due(Hook(url=url))), receivers, resolve=lambda _host: ["127.0.0.1"], allow_loopback=True).deliver_due() == 1


def test_without_its_secret_nothing_is_sent() -> None:
    book, receivers = Book(Due(Hook(secrets=()))), Receivers(200)
    assert courier(book, receivers).deliver_due() == 0
    assert "sealed with another key" in book.marks[0][2]["status"]
    assert receivers.asked == []


def test_a_mail_is_handed_over_and_without_a_post_office_it_waits() -> None:
    mails = list[EmailMessage]()

    class Office:
        sender = "r@y.de"

        def send(self, mail: EmailMessage) -> None:
            mails.append(mail)

    book = Book(Due(Hook(url="mailto:a@x.de")))
    assert courier(book, post_office=cast("PostOffice", Office())).deliver_due() == 1
    assert [(mail["To"], mail["From"], mail["Message-ID"]) for mail in mails] == [("a@x.de", "r@y.de", "<e1@y.de>")]
    assert book.marks[0][2]["status"] == "handed over"
    late = Book(Due(Hook(url="mailto:a@x.de")))
    assert courier(late).deliver_due() == 0
    assert late.marks[0][2]["status"] == "BadConfig: RATCHET_SMTP is not set: mail cannot be sent"


def test_a_test_is_sent_once_and_written_down_nowhere() -> None:
    book, receivers = Book(), Receivers(503)
    assert asyncio.run(courier(book, receivers).send_test(Hook())) == ("503", False)
    sent = json.loads(receivers.asked[0].content)
    assert (sent["type"], sent["timestamp"], sent["data"]["webhook"]) == ("webhook.test", NOW.isoformat(), "w1")
    assert (book.marks, book.disabled) == ([], [])
