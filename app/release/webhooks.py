"""Webhooks as Standard Webhooks has them: signed, repeated for days, with the event's id as the key of idempotency.

Deliveries are rows written in the transaction of the event they are about, so none is lost with a process. A signature proves that some
holder of the secret sent it, not which person acted: that is in the payload and in the audit chain.
"""

import base64
import ipaddress
import json
import logging
import secrets
import smtplib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol
from urllib.parse import urlsplit

import httpx
from standardwebhooks.webhooks import Webhook as Signer

from app.domain.errors import BadConfig, BadRequest, RatchetError
from app.domain.ids import uuid7
from app.domain.ports import Clock
from app.domain.release.gates import canonical_json
from app.domain.release.news import CHANNELS, MAIL, SLACK, TEAMS
from app.release.news import address_of, mail_of, message_of, slack_body, teams_body
from app.release.post import PostOffice

log = logging.getLogger("ratchet.webhooks")
WAITS = tuple(timedelta(seconds=s) for s in (5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400))
"""Until the next attempt, after each failed one; then it is given up, and stays on record as such."""
TIMEOUT_S = 15.0
SECRET_BYTES = 32
GONE = 410
Resolve = Callable[[str], Sequence[str]]


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

    def due(self, *, now: datetime, limit: int = 50) -> Sequence[Waiting]: ...
    def mark(
        self, webhook_id: str, event_id: str, *, attempts: int, status: str, delivered_at: datetime | None, next_attempt_at: datetime | None
    ) -> None: ...
    def disable(self, webhook_id: str, *, now: datetime) -> object: ...


def new_secret() -> str:
    """A fresh signing secret (`whsec_…`, 32 random bytes)."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def addresses_of(host: str) -> Sequence[str]:
    """Every address a name stands for now."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that could be asked for
        raise BadRequest(f"{host} does not resolve ({error}): correct the webhook's address", param="url") from error


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: a translator sends what goes there to the IPv4 address in the last 32 bits."""
LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")
"""RFC 8215: the same for translators of one's own network, who choose where in it the IPv4 address stands."""


def check_url(url: str, *, allow_loopback: bool, resolve: Resolve = addresses_of) -> str:
    """Refuse addresses behind which our own network lies (server-side request forgery). Asked at registration and before every delivery.

    Returns one of the addresses that were looked at: the delivery goes there and asks no resolver again, which could say something else.
    """
    if url.startswith(MAIL):
        return address_of(url)
    url = url.removeprefix(SLACK).removeprefix(TEAMS)
    try:
        parts, _ = urlsplit(url), httpx.URL(url)  # the client that will post there refuses more than urlsplit does
        _ = parts.port  # which is looked at when it is asked for
    except (ValueError, httpx.InvalidURL) as error:
        raise BadRequest(f"this is no webhook address ({error}): give https://host/path", param="url") from error
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.username or parts.password:
        raise BadRequest(f"{url!r} is no webhook address: give https://host/path without user and password", param="url")
    addresses = [ipaddress.ip_address(address.partition("%")[0]) for address in resolve(parts.hostname)]
    if allow_loopback and addresses and all(address.is_loopback for address in addresses):
        return str(addresses[0])
    if parts.scheme != "https":
        raise BadRequest("a webhook's address has to begin with https://: the payload names people and versions", param="url")
    if not addresses or not all(meant.is_global for address in addresses for meant in _meant(address)):
        raise BadRequest(f"{parts.hostname} lies in a private network: a webhook's address has to be public", param="url")
    return str(addresses[0])


def _meant(address: Address) -> list[Address]:
    """The address, and the IPv4 address that a translator or a tunnel makes of it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    if address in LOCAL_NAT64:
        inner.append(ipaddress.IPv4Address("10.0.0.0"))  # not ours to know, so taken as inside
    return [address, *(v4 for v4 in inner if v4 is not None)]


def headers_of(delivery: Waiting, *, at: datetime) -> dict[str, str]:
    """The three headers; one signature per secret, so that a receiver may hold either while they are rotated."""
    signatures = [Signer(secret).sign(delivery.event_id, at, delivery.payload.decode()) for secret in delivery.webhook.secrets]
    return {
        "content-type": "application/json",
        "webhook-id": delivery.event_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signatures),
    }


@dataclass(frozen=True, kw_only=True)
class _TestEvent:
    """An event that nothing caused."""

    webhook: Receiver
    event_id: str
    payload: bytes
    attempts: int = 0


class Courier:
    """Delivers what is due. Redirects are not followed: they would lead past `check_url`."""

    def __init__(
        self, book: WebhookBook, *, clock: Clock, client: httpx.Client | None = None, allow_loopback: bool = False,
        resolve: Resolve = addresses_of, post_office: PostOffice | None = None, address: str = "",
    ) -> None:  # fmt: skip
        self._book = book
        self._clock = clock
        self._client = client or httpx.Client(timeout=TIMEOUT_S)
        self._allow_loopback = allow_loopback
        self._resolve = resolve
        self._post_office = post_office
        self._address = address

    def deliver_due(self) -> int:
        """Attempt everything whose time has come; returns how many arrived."""
        return sum(self._attempt(delivery) for delivery in self._book.due(now=self._clock()))

    def send_test(self, receiver: Receiver) -> tuple[str, bool]:
        """Send `webhook.test` once, signed like any event and recorded nowhere; returns the answer, and whether it was taken."""
        now = self._clock()
        data = {"webhook": receiver.id, "policy": "no policy", "subject": receiver.id, "actor": "ratchet", "reason": "a test"}
        event = {"type": "webhook.test", "timestamp": now.isoformat(), "data": data}
        return self._post(_TestEvent(webhook=receiver, event_id=uuid7(), payload=canonical_json(event)))

    def run(self, stop: threading.Event, *, interval_s: float = 1.0) -> None:
        """Deliver until `stop` is set; whatever waits is still there after a restart."""
        while not stop.is_set():
            try:
                self.deliver_due()
            except RatchetError as error:
                log.warning("webhooks wait: %s", error)
            stop.wait(interval_s)

    def _attempt(self, delivery: Waiting) -> bool:
        status, arrived = self._post(delivery)
        now = self._clock()
        again = None if arrived or delivery.attempts >= len(WAITS) else now + WAITS[delivery.attempts]
        self._book.mark(
            delivery.webhook.id, delivery.event_id, attempts=delivery.attempts + 1, status=status, delivered_at=now if arrived else None,
            next_attempt_at=again,
        )  # fmt: skip
        if not arrived:
            log.warning("webhook_failed webhook=%s event=%s status=%s next=%s", delivery.webhook.id, delivery.event_id, status, again)
        if status == str(GONE):
            self._book.disable(delivery.webhook.id, now=now)
        return arrived

    def _post(self, delivery: Waiting) -> tuple[str, bool]:
        if not delivery.webhook.secrets:
            return "its secret was sealed with another key than this deployment's: restore the key, or `ratchet webhooks rotate` it", False
        try:
            if delivery.webhook.url.startswith(MAIL):
                return self._mail(delivery), True
            address = check_url(delivery.webhook.url, allow_loopback=self._allow_loopback, resolve=self._resolve)
            answer = self._send(delivery, address)
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

    def _send(self, delivery: Waiting, address: str) -> httpx.Response:
        """To the address that was checked, under the name that was given, whose certificate it has to show; a redirect is an answer."""
        named, body = httpx.URL(delivery.webhook.url.removeprefix(SLACK).removeprefix(TEAMS)), delivery.payload
        headers = headers_of(delivery, at=self._clock()) | {"host": named.netloc.decode()}
        if delivery.webhook.url.startswith(CHANNELS):
            told = message_of(json.loads(delivery.payload), address=self._address)
            body = canonical_json(slack_body(told) if delivery.webhook.url.startswith(SLACK) else teams_body(told))
            headers = {name: value for name, value in headers.items() if name in ("content-type", "host")}
        return self._client.post(
            named.copy_with(host=address), content=body, headers=headers, extensions={"sni_hostname": named.host},
            follow_redirects=False,
        )  # fmt: skip
