"""Webhooks as Standard Webhooks has them: signed, repeated for days, with the event's id as the key of idempotency.

Deliveries are rows written in the transaction of the event they are about, so none is lost with a process. A signature proves that some
holder of the secret sent it, not which person acted: that is in the payload and in the audit chain.
"""

import asyncio
import base64
import json
import logging
import secrets
import smtplib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Protocol, TypeVar

import httpx
from standardwebhooks.webhooks import Webhook as Signer

from app.domain.errors import BadConfig, BadRequest, RatchetError
from app.domain.ids import uuid7
from app.domain.ports import Clock
from app.domain.release.gates import canonical_json
from app.domain.release.news import CHANNELS, MAIL, SLACK, TEAMS
from app.release.addresses import Resolve, addresses_of, check_url
from app.release.news import address_of, mail_of, message_of, slack_body, teams_body
from app.release.post import PostOffice

log = logging.getLogger("ratchet.webhooks")
WAITS = tuple(timedelta(seconds=s) for s in (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400))
"""Until the next attempt, after each failed one; then it is given up, and stays on record as such."""
TIMEOUT_S = 15.0
"""From looking the name up to the status: httpx counts each read anew, and a receiver that drips would never end."""
AT_ONCE = 32
"""Receivers that are spoken to at a time."""
SECRET_BYTES = 32
GONE = 410
T = TypeVar("T")


class Receiver(Protocol):
    """Where to."""

    @property
    def id(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def secrets(self) -> tuple[str, ...]: ...


class Waiting(Protocol):
    """One event on its way to one receiver."""

    @property
    def webhook(self) -> Receiver: ...
    @property
    def event_id(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def attempts(self) -> int: ...


class WebhookBook(Protocol):
    """What is due, and what became of it."""

    def due(self, *, now: datetime) -> Sequence[Waiting]: ...
    def mark(
        self, webhook_id: str, event_id: str, *, attempts: int, status: str, delivered_at: datetime | None, next_attempt_at: datetime | None
    ) -> None: ...
    def disable(self, webhook_id: str, *, now: datetime) -> object: ...


def new_secret() -> str:
    """A fresh signing secret (`whsec_…`, 32 random bytes)."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def headers_of(delivery: Waiting, *, at: datetime) -> dict[str, str]:
    """The three headers; one signature per secret, so that a receiver may hold either while they are rotated."""
    signatures = [Signer(secret).sign(delivery.event_id, at, delivery.payload.decode()) for secret in delivery.webhook.secrets]
    return {
        "content-type": "application/json",
        "webhook-id": delivery.event_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signatures),
    }


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class _TestEvent:
    """An event that nothing caused."""

    webhook: Receiver
    event_id: str
    payload: bytes
    attempts: int = 0


class Courier:
    """Delivers what is due: to all receivers beside each other, to each in order. Redirects are not followed: they would lead past
    `check_url`. Of an answer nothing is read past its status, and a delivery that takes longer than `within_s` in all has failed."""

    def __init__(
        self, book: WebhookBook, *, clock: Clock, clients: Callable[[], httpx.AsyncClient] = _client, allow_loopback: bool = False,
        resolve: Resolve = addresses_of, post_office: PostOffice | None = None, address: str = "", within_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._book = book
        self._clock = clock
        self._clients = clients
        self._allow_loopback = allow_loopback
        self._resolve = resolve
        self._post_office = post_office
        self._address = address
        self._within_s = within_s
        self._threads = ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="webhooks")
        """For what waits in C or in a library: names, mail."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deliveries")
        """For the book, which so waits behind no name that nobody finds."""

    def deliver_due(self) -> int:
        """Attempt what is due, of each receiver until one attempt fails; returns how many arrived."""

        async def once() -> int:
            async with self._clients() as client:
                due = await self._booked(lambda: self._book.due(now=self._clock()))
                return sum(await asyncio.gather(*(self._in_order(client, waiting) for waiting in by_receiver(due).values())))

        return asyncio.run(once())

    async def send_test(self, receiver: Receiver) -> tuple[str, bool]:
        """Send `webhook.test` once, signed like any event and recorded nowhere; returns the answer, and whether it was taken."""
        now = self._clock()
        data = {"webhook": receiver.id, "policy": "no policy", "subject": receiver.id, "actor": "ratchet", "reason": "a test"}
        event = {"type": "webhook.test", "timestamp": now.isoformat(), "data": data}
        async with self._clients() as client:
            return await self._post(client, _TestEvent(webhook=receiver, event_id=uuid7(), payload=canonical_json(event)))

    def run(self, stop: threading.Event, *, interval_s: float = 1.0) -> None:
        """Deliver until `stop` is set; whatever waits is still there after a restart."""
        asyncio.run(self._run(stop, interval_s))

    async def _run(self, stop: threading.Event, interval_s: float) -> None:
        """Look at what is due all the time: a receiver that is still being spoken to is left out, and keeps nobody else waiting."""
        speaking: dict[str, asyncio.Task[int]] = {}
        async with self._clients() as client:
            while not stop.is_set():
                try:
                    due = by_receiver(await self._booked(lambda: self._book.due(now=self._clock())))
                except RatchetError as error:
                    log.warning("webhooks wait: %s", error)
                    due = {}
                speaking = {name: task for name, task in speaking.items() if not _ended(task)}
                free = [name for name in due if name not in speaking][: AT_ONCE - len(speaking)]
                speaking |= {name: asyncio.create_task(self._in_order(client, due[name])) for name in free}
                await asyncio.sleep(interval_s)
            for task in speaking.values():
                task.cancel()

    async def _in_order(self, client: httpx.AsyncClient, deliveries: Sequence[Waiting]) -> int:
        """One receiver's deliveries, up to the first that fails: the others wait for the next look, behind everybody's."""
        for arrived, delivery in enumerate(deliveries):
            if not await self._attempt(client, delivery):
                return arrived
        return len(deliveries)

    async def _attempt(self, client: httpx.AsyncClient, delivery: Waiting) -> bool:
        status, arrived = await self._post(client, delivery)
        now = self._clock()
        again = None if arrived or delivery.attempts >= len(WAITS) else now + WAITS[delivery.attempts]
        await self._booked(lambda: self._book.mark(
            delivery.webhook.id, delivery.event_id, attempts=delivery.attempts + 1, status=status, delivered_at=now if arrived else None,
            next_attempt_at=again,
        ))  # fmt: skip
        if not arrived:
            log.warning("webhook_failed webhook=%s event=%s status=%s next=%s", delivery.webhook.id, delivery.event_id, status, again)
        if status == str(GONE):
            await self._booked(lambda: self._book.disable(delivery.webhook.id, now=now))
        return arrived

    async def _post(self, client: httpx.AsyncClient, delivery: Waiting) -> tuple[str, bool]:
        if not delivery.webhook.secrets:
            return "its secret was sealed with another key than this deployment's: restore the key, or `ratchet webhooks rotate` it", False
        try:
            async with asyncio.timeout(self._within_s):
                if delivery.webhook.url.startswith(MAIL):
                    return await self._beside(lambda: self._mail(delivery)), True
                check = partial(check_url, delivery.webhook.url, allow_loopback=self._allow_loopback, resolve=self._resolve)
                answer = await self._send(client, delivery, await self._beside(check))
        except TimeoutError:
            return f"TimeoutError: no answer within {self._within_s:g} s", False
        except (httpx.HTTPError, smtplib.SMTPException, OSError, BadRequest, BadConfig) as error:
            return f"{type(error).__name__}: {error}"[:500], False
        return str(answer.status_code), answer.is_success

    def _mail(self, delivery: Waiting) -> str:
        """Hand it to the post office, as the mail that bears the event's id."""
        if self._post_office is None:
            raise BadConfig("RATCHET_SMTP is not set: mail cannot be sent")
        told = message_of(json.loads(delivery.payload), address=self._address)
        to = address_of(delivery.webhook.url)
        self._post_office.send(mail_of(told, to=to, sender=self._post_office.sender, event_id=delivery.event_id))
        return "handed over"

    async def _send(self, client: httpx.AsyncClient, delivery: Waiting, address: str) -> httpx.Response:
        """To the address that was checked, under the name that was given, whose certificate it has to show; a redirect is an answer."""
        named, body = httpx.URL(delivery.webhook.url.removeprefix(SLACK).removeprefix(TEAMS)), delivery.payload
        headers = headers_of(delivery, at=self._clock()) | {"host": named.netloc.decode()}
        if delivery.webhook.url.startswith(CHANNELS):
            told = message_of(json.loads(delivery.payload), address=self._address)
            body = canonical_json(slack_body(told) if delivery.webhook.url.startswith(SLACK) else teams_body(told))
            headers = {name: value for name, value in headers.items() if name in ("content-type", "host")}
        to = named.copy_with(host=address)
        request = client.build_request("POST", to, content=body, headers=headers, extensions={"sni_hostname": named.host})
        answer = await client.send(request, stream=True, follow_redirects=False)
        await answer.aclose()  # its body may have no end, and nobody asks what it says
        return answer

    async def _booked(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    async def _beside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def by_receiver(due: Sequence[Waiting]) -> dict[str, list[Waiting]]:
    """Deliveries of each receiver, in their order."""
    found: dict[str, list[Waiting]] = {}
    for delivery in due:
        found.setdefault(delivery.webhook.id, []).append(delivery)
    return found


def _ended(task: "asyncio.Task[int]") -> bool:
    """Whether a receiver was spoken to; what could not be put into the book is tried again."""
    if not task.done():
        return False
    if (error := task.exception()) is not None:
        log.error("webhooks wait: %s", error, exc_info=None if isinstance(error, RatchetError) else error)
    return True
