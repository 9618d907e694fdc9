"""The relay's side of the inbox and the outbox: one relay in office, fenced by its lease's token.

Inbox and state may be two databases. The lease lives beside the inbox, so marks of inbox rows are fenced in their own transaction.
Marks of outbox rows are checked just before: a relay that lost its office in between marks what the broker acknowledged, so nothing
is lost, at most sent twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, Executable, func, select, text, update

from app.db import leases
from app.db.chunks import one_of
from app.db.clock import ConnectionClock
from app.db.counters import add_counts
from app.db.engine import reading, writing
from app.db.ingestion.dead_letters import buried_among
from app.db.ingestion.streams import applied_among, offsets
from app.db.tables import inbox, outbox
from app.db.verdicts import judged
from app.domain.ports import Lease
from app.domain.telemetry.events import CloudEvent, Topic
from app.domain.telemetry.streams import OutgoingEvent, TopicPartition

LEASE = "relay"
TERM = timedelta(seconds=4)
"""How long a relay that was killed blocks the next one."""
OUTBOX_SOURCE = "ratchet"
READ_BYTES = 16 * 1024 * 1024
TRIMMED_AT_ONCE = 5_000
"""Rows whose payload is dropped in one transaction; the relay goes on until nothing is old any more, between two sendings."""
LEFT_BEHIND = timedelta(days=2)
FULL = text("length(payload) > 0")
"""As the index over rows with a payload says it."""


class SqlRelayOffice:
    """The RelayOffice port. `clock` says what time it is for the lease, whatever a relay believes; the relay's `now` where it is None."""

    def __init__(self, inbox_engine: Engine, state_engine: Engine, *, group: str, clock: ConnectionClock | None = None) -> None:
        self._inbox = inbox_engine
        self._state = state_engine
        self._group = group
        self._clock = clock

    def take(self, owner: str, *, now: datetime) -> "SqlRelayTerm | None":
        """The office, or None while another relay holds it."""
        with writing(self._inbox) as connection:
            lease = leases.acquire(connection, LEASE, owner, ttl=TERM, now=self._clock(connection) if self._clock else now)
        return None if lease is None else SqlRelayTerm(self._inbox, self._state, lease=lease, group=self._group, clock=self._clock)


class SqlRelayTerm:
    """The RelayTerm port."""

    def __init__(
        self, inbox_engine: Engine, state_engine: Engine, *, lease: Lease, group: str, clock: ConnectionClock | None = None
    ) -> None:
        self._inbox = inbox_engine
        self._state = state_engine
        self._group = group
        self._clock = clock
        self.lease = lease

    def unsent_inbox(self, limit: int) -> list[OutgoingEvent]:
        """Inbox rows to send, in order."""
        with reading(self._inbox) as connection:
            statement = select(*_INBOX).where(inbox.c.relayed_at.is_(None)).order_by(inbox.c.seq).limit(limit)
            return [_from_inbox(row) for row in _at_most(connection, statement, lambda row: len(row.payload))]

    def unsent_outbox(self, limit: int) -> list[OutgoingEvent]:
        """Outbox rows to send, in order."""
        with reading(self._state) as connection:
            statement = select(outbox).where(outbox.c.sent_at.is_(None)).order_by(outbox.c.seq).limit(limit)
            return [_from_outbox(row) for row in _at_most(connection, statement, lambda row: len(row.payload))]

    def mark_inbox(self, seqs: Sequence[int], *, now: datetime) -> None:
        """These were acknowledged by the broker."""
        self._update_inbox(seqs, {"relayed_at": now})

    def mark_outbox(self, seqs: Sequence[int], *, now: datetime) -> None:
        """These were acknowledged by the broker."""
        with writing(self._inbox) as connection:
            leases.require(connection, self.lease)
        with writing(self._state) as connection:
            connection.execute(update(outbox).where(one_of(connection, outbox.c.seq, seqs)).values(sent_at=now))

    def confirm_applied(self, *, relayed_before: datetime, limit: int, now: datetime) -> list[OutgoingEvent]:
        """Take what was applied, or buried, off the list; returns what was relayed before that moment and is neither: the first of it, up
        to the row that takes its payloads beyond `READ_BYTES`."""
        unconfirmed = inbox.c.relayed_at.is_not(None) & inbox.c.applied_at.is_(None)
        with reading(self._inbox) as connection:
            identities = select(inbox.c.seq, inbox.c.source, inbox.c.event_id).where(unconfirmed, inbox.c.relayed_at < relayed_before)
            rows = connection.execute(identities.order_by(inbox.c.relayed_at).limit(limit)).all()
        with reading(self._state) as connection:
            applied = applied_among(connection, [(row.source, row.event_id) for row in rows])
        self._update_inbox([row.seq for row in rows if (row.source, row.event_id) in applied], {"applied_at": now})
        missing = [row.seq for row in rows if (row.source, row.event_id) not in applied]
        with reading(self._inbox) as connection:
            wanted = select(*_INBOX).where(one_of(connection, inbox.c.seq, missing)).order_by(inbox.c.seq)
            waiting = [_from_inbox(row) for row in _at_most(connection, wanted, lambda row: len(row.payload))] if missing else []
        with reading(self._state) as connection:
            buried = buried_among(connection, [row.event for row in waiting])
        self._update_inbox([row.seq for row in waiting if (row.event.source, row.event.id) in buried], {"applied_at": now})
        return [row for row in waiting if (row.event.source, row.event.id) not in buried]

    def send_again(self, seqs: Sequence[int]) -> None:
        """Put these back among the unsent, one round older."""
        self._update_inbox(seqs, {"relayed_at": None, "rounds": inbox.c.rounds + 1})
        with writing(self._state) as connection:
            add_counts(connection, {("", "sent_again"): len(seqs)})

    def applied_directly(self, seqs: Sequence[int], *, now: datetime) -> None:
        """These were applied from the inbox itself: count them as an alarm."""
        self._update_inbox(seqs, {"relayed_at": func.coalesce(inbox.c.relayed_at, now), "applied_at": now})
        with writing(self._state) as connection:
            add_counts(connection, {("", "applied_from_inbox"): len(seqs)})

    def applied_before(self, *, now: datetime) -> datetime:
        """Everything sent before this moment is applied."""
        with reading(self._inbox) as connection:
            unconfirmed = inbox.c.relayed_at.is_not(None) & inbox.c.applied_at.is_(None)
            oldest = connection.execute(select(func.min(inbox.c.relayed_at)).where(unconfirmed)).scalar()
        return oldest if oldest is not None else now

    def consumed(self) -> Mapping[TopicPartition, int]:
        """How far ingestion is: next offset per topic and partition."""
        with reading(self._state) as connection:
            return offsets(connection, self._group)

    def trim(self, *, applied_before: datetime) -> int:
        """Drop payloads of long-applied rows, the oldest `TRIMMED_AT_ONCE`; their identities stay for `dedupe_days`.

        On PostgreSQL they go with their era, identities and all: here only what an era that may not go yet holds `LEFT_BEHIND` longer.
        """
        if self._inbox.dialect.name == "postgresql":
            applied_before -= LEFT_BEHIND
        old = select(inbox.c.seq).where(inbox.c.applied_at < applied_before, FULL).order_by(inbox.c.applied_at).limit(TRIMMED_AT_ONCE)
        with writing(self._inbox) as connection:
            leases.require(connection, self.lease)
            seqs = list(connection.execute(old).scalars())
            if seqs:
                connection.execute(update(inbox).where(one_of(connection, inbox.c.seq, seqs)).values(payload=b""))
            return len(seqs)

    def renew(self, *, now: datetime) -> None:
        """Stay in office. Raises `LeaseLost`."""
        with writing(self._inbox) as connection:
            self.lease = leases.renew(connection, self.lease, ttl=TERM, now=self._clock(connection) if self._clock else now)

    def leave(self, *, now: datetime) -> None:
        """Give the office back early."""
        with writing(self._inbox) as connection:
            leases.release(connection, self.lease, now=self._clock(connection) if self._clock else now)

    def _update_inbox(self, seqs: Sequence[int], values: Mapping[str, Any]) -> None:
        if not seqs:
            return
        with writing(self._inbox) as connection:
            leases.require(connection, self.lease)
            connection.execute(update(inbox).where(one_of(connection, inbox.c.seq, seqs)).values(dict(values)))


_INBOX = (
    inbox.c.seq, inbox.c.source, inbox.c.event_id, inbox.c.type, inbox.c.key, inbox.c.time, inbox.c.payload, inbox.c.received_at,
    inbox.c.rounds, inbox.c.relayed_at,
)  # fmt: skip


def _at_most(connection: Connection, statement: Executable, size: Callable[[Any], int]) -> Iterator[Any]:
    """The first rows of an answer, up to `READ_BYTES`: a batch of large turns must not fill the memory."""
    total = 0
    for row in connection.execution_options(stream_results=True).execute(statement):
        yield row
        total += size(row)
        if total > READ_BYTES:
            return


def _from_inbox(row: Any) -> OutgoingEvent:  # noqa: ANN401 - a row of `_INBOX`
    event = CloudEvent(id=row.event_id, source=row.source, type=row.type, time=row.time, key=row.key, data=bytes(row.payload))
    return OutgoingEvent(
        seq=row.seq, topic=Topic.EVENTS, event=event, received_at=row.received_at, rounds=row.rounds, relayed_at=row.relayed_at
    )


def _from_outbox(row: Any) -> OutgoingEvent:  # noqa: ANN401 - a row of the outbox
    event = CloudEvent(id=row.event_id, source=OUTBOX_SOURCE, type=row.type, time=row.created_at, key=row.key, data=bytes(row.payload))
    return OutgoingEvent(seq=row.seq, topic=row.topic, event=event, received_at=row.created_at)


def inbox_metrics(connection: Connection, *, now: datetime) -> dict[str, float]:
    """Gauges of the door: events that wait for the relay and for ingestion, and how old the oldest of them are (seconds)."""
    unsent = select(func.count(), func.min(inbox.c.received_at)).where(inbox.c.relayed_at.is_(None))
    unapplied = select(func.count(), func.min(inbox.c.received_at)).where(inbox.c.relayed_at.is_not(None), inbox.c.applied_at.is_(None))
    gauges: dict[str, float] = {}
    for name, statement in (("unsent", unsent), ("unapplied", unapplied)):
        count, oldest = connection.execute(statement).one()
        gauges[f"inbox_{name}"] = count
        gauges[f"inbox_{name}_age_s"] = (now - oldest).total_seconds() if oldest is not None else 0.0
    return gauges


def has_backlog(engine: Engine) -> bool:
    """Whether anything was relayed that is not known to be applied. Raises `Unavailable`."""
    with judged(), reading(engine) as connection:
        statement = select(inbox.c.seq).where(inbox.c.relayed_at.is_not(None), inbox.c.applied_at.is_(None)).limit(1)
        return connection.execute(statement).first() is not None
