"""Webhooks: who wants to hear of releases, and what was delivered to them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Engine, Row, func, insert, select, update

from app.db.engine import reading, writing
from app.db.release import audit
from app.db.tables import outbox, webhook_deliveries, webhooks
from app.domain.errors import NotFound
from app.domain.ids import uuid7
from app.domain.release.news import CHANNELS, FLAPPING, OF_EVIDENCE, REST, is_news
from app.sealing import Seal

SYSTEM = "system:webhooks"
"""Who acts where nobody says who: a receiver that says it is gone (410)."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """One receiver."""

    id: str
    policy: str | None
    """Only events of this policy; None for all."""
    url: str
    secrets: tuple[str, ...]
    """`whsec_…`, newest first: while there are two, every delivery is signed with both (rotation). Empty: none opens with our key."""
    events: tuple[str, ...]
    """Prefixes of event types such as `release.` or `deployment.promote`; empty for all."""
    created_at: datetime
    disabled_at: datetime | None

    def told(self) -> dict[str, Any]:
        """As people see it: how many signatures a delivery carries, and no secret."""
        return {name: value for name, value in vars(self).items() if name != "secrets"} | {"signatures": len(self.secrets)}


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """One event on its way to one receiver."""

    webhook: Webhook
    event_id: str
    payload: bytes
    attempts: int
    created_at: datetime


def schedule(
    connection: Connection, *, policy: str, event: str, event_id: str, now: datetime, about: str = "", actor: str = "",
    detail: Mapping[str, Any] = NOTHING,
) -> None:  # fmt: skip
    """Note, in the event's own transaction, everybody it has to be delivered to; channels get news alone, and no news twice.

    `about` is the key that the event has in the outbox.
    """
    news = is_news(event, actor, detail)
    for row in connection.execute(select(webhooks).where(webhooks.c.disabled_at.is_(None))).all():
        wanted = row.policy in (None, policy) and (not row.events or any(event.startswith(prefix) for prefix in row.events))
        if wanted and row.url.startswith(CHANNELS):
            wanted = news and not (event in FLAPPING and _told(connection, row.id, event, about, detail, since=now - REST))
        if wanted:
            values = {"webhook_id": row.id, "event_id": event_id, "attempts": 0, "next_attempt_at": now}
            connection.execute(insert(webhook_deliveries).values(values))


def _told(connection: Connection, webhook_id: str, event: str, about: str, detail: Mapping[str, Any], *, since: datetime) -> bool:
    """Whether a receiver was sent this about that already."""
    same = (outbox.c.key == about) & (outbox.c.type == f"ratchet.{event}.v1") & (outbox.c.created_at > since)
    joined = select(outbox.c.payload).join(webhook_deliveries, webhook_deliveries.c.event_id == outbox.c.event_id)
    sent = connection.execute(joined.where(same, webhook_deliveries.c.webhook_id == webhook_id)).scalars()
    names = ("kind", "evidence_digest") if event in OF_EVIDENCE else ("kind",)
    return any(all(json.loads(payload)["data"].get(name) == detail.get(name) for name in names) for payload in sent)


class SqlWebhookBook:
    """Receivers and deliveries of one database."""

    def __init__(self, engine: Engine, seal: Seal) -> None:
        self._engine = engine
        self._seal = seal

    def add(self, *, policy: str | None, url: str, secret: str, events: Sequence[str], now: datetime, by: str = SYSTEM) -> Webhook:
        """Register a receiver; audited."""
        webhook_id = uuid7()
        row = {"id": webhook_id, "policy": policy, "url": url, "secrets": [], "events": list(events), "created_at": now}
        row["sealed"] = [self._seal.seal(secret, about=webhook_id)]
        with writing(self._engine) as connection:
            connection.execute(insert(webhooks).values(row))
            scheme, _, rest = url.partition("://")
            host = rest.partition("/")[0]  # not the whole address: a chat's is a secret, and mail's is a person's
            said = {"policy": policy, "scheme": scheme.partition(":")[0], "host": host, "events": list(events)}
            audit.append(connection, actor=by, action="webhook.added", subject=webhook_id, detail=said, now=now)
        return self.find(webhook_id)

    def find(self, webhook_id: str) -> Webhook:
        """A receiver by id. Raises `NotFound`."""
        with reading(self._engine) as connection:
            row = connection.execute(select(webhooks).where(webhooks.c.id == webhook_id)).one_or_none()
        if row is None:
            raise NotFound(f"there is no webhook {webhook_id}: list them first")
        return self._webhook(row)

    def all(self) -> list[Webhook]:
        """Every receiver, the disabled ones too."""
        with reading(self._engine) as connection:
            return [self._webhook(row) for row in connection.execute(select(webhooks).order_by(webhooks.c.id))]

    def set_secrets(self, webhook_id: str, secrets: Sequence[str]) -> Webhook:
        """Replace the signing secrets: [new, old] to start a rotation, [new] to end it."""
        with writing(self._engine) as connection:
            self._put(connection, webhook_id, secrets)
        return self.find(webhook_id)

    def rotate(self, webhook_id: str, secret: str, *, now: datetime, by: str = SYSTEM) -> Webhook:
        """A new secret in front of the newest one, and no others; audited. Two at once come one after the other. Raises `NotFound`."""
        with writing(self._engine) as connection:
            row = connection.execute(select(webhooks).where(webhooks.c.id == webhook_id).with_for_update()).one_or_none()
            if row is None:
                raise NotFound(f"there is no webhook {webhook_id}: list them first")
            self._put(connection, webhook_id, [secret, *self._webhook(row).secrets[:1]])
            audit.append(connection, actor=by, action="webhook.rotated", subject=webhook_id, detail={}, now=now)
        return self.find(webhook_id)

    def _put(self, connection: Connection, webhook_id: str, secrets: Sequence[str]) -> None:
        sealed = [self._seal.seal(secret, about=webhook_id) for secret in secrets]
        connection.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(sealed=sealed, secrets=[]))

    def disable(self, webhook_id: str, *, now: datetime, by: str = SYSTEM) -> Webhook:
        """Stop deliveries; what waits is dropped, what was delivered stays on record. Audited; a second time changes nothing."""
        with writing(self._engine) as connection:
            active = (webhooks.c.id == webhook_id) & webhooks.c.disabled_at.is_(None)
            if connection.execute(update(webhooks).where(active).values(disabled_at=now)).rowcount:
                audit.append(connection, actor=by, action="webhook.removed", subject=webhook_id, detail={}, now=now)
            waiting = (webhook_deliveries.c.webhook_id == webhook_id) & webhook_deliveries.c.delivered_at.is_(None)
            connection.execute(update(webhook_deliveries).where(waiting).values(next_attempt_at=None, last_status="disabled"))
        return self.find(webhook_id)

    def due(self, *, now: datetime, each: int = 10) -> list[Delivery]:
        """Deliveries whose time has come, the oldest first: a few of each receiver, so that who takes none fills no page."""
        table = webhook_deliveries
        place = func.row_number().over(partition_by=table.c.webhook_id, order_by=outbox.c.seq)
        waiting = (
            select(table.c.webhook_id, table.c.event_id, outbox.c.seq, place.label("place"))
            .join(outbox, outbox.c.event_id == table.c.event_id)
            .join(webhooks, webhooks.c.id == table.c.webhook_id)
            .where(table.c.delivered_at.is_(None), table.c.next_attempt_at <= now, webhooks.c.disabled_at.is_(None))
            .subquery()
        )
        query = (
            select(table, outbox.c.payload, outbox.c.created_at.label("event_at"), webhooks)
            .join(waiting, (waiting.c.webhook_id == table.c.webhook_id) & (waiting.c.event_id == table.c.event_id))
            .join(outbox, outbox.c.event_id == table.c.event_id)
            .join(webhooks, webhooks.c.id == table.c.webhook_id)
            .where(waiting.c.place <= each)
            .order_by(outbox.c.seq)
        )
        with reading(self._engine) as connection:
            rows = connection.execute(query).all()
        return [
            Delivery(webhook=self._webhook(row), event_id=row.event_id, payload=row.payload, attempts=row.attempts, created_at=row.event_at)
            for row in rows
        ]

    def mark(
        self, webhook_id: str, event_id: str, *, attempts: int, status: str, delivered_at: datetime | None, next_attempt_at: datetime | None
    ) -> None:
        """Record an attempt; without a `next_attempt_at` it was the last one."""
        table = webhook_deliveries
        key = (table.c.webhook_id == webhook_id) & (table.c.event_id == event_id)
        values = {
            "attempts": attempts, "last_status": status, "delivered_at": delivered_at, "next_attempt_at": next_attempt_at,
        }  # fmt: skip
        with writing(self._engine) as connection:
            connection.execute(update(table).where(key).values(values))

    def deliveries(self, webhook_id: str, *, limit: int = 100) -> list[dict[str, Any]]:
        """What became of the newest deliveries (MLflow's webhooks keep no such record: mlflow#14677)."""
        table = webhook_deliveries
        query = select(table).where(table.c.webhook_id == webhook_id).order_by(table.c.event_id.desc()).limit(limit)
        with reading(self._engine) as connection:
            return [dict(row._mapping) for row in connection.execute(query)]

    def seal_all(self) -> int:
        """Seal what an older process stored in clear; returns how many receivers that were."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(webhooks).where(webhooks.c.sealed.is_(None))).all()
        clear = [row for row in rows if row.secrets]
        for row in clear:
            self.set_secrets(row.id, row.secrets)
        return len(clear)

    def _webhook(self, row: Row[Any]) -> Webhook:
        opened = [self._seal.open(sealed, about=row.id) for sealed in row.sealed or ()]
        secrets = [secret for secret in opened if secret is not None] or row.secrets
        return Webhook(
            id=row.id, policy=row.policy, url=row.url, secrets=tuple(secrets), events=tuple(row.events), created_at=row.created_at,
            disabled_at=row.disabled_at,
        )  # fmt: skip
