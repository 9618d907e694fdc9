"""Dead letters: records that make no sense, with where they lay and why."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Engine, Row, Select, delete, select, tuple_, update

from app.db.chunks import chunked, pair_of
from app.db.counters import add_counts
from app.db.engine import inserting, reading, writing
from app.db.outbox import OutboxEvent, enqueue
from app.db.tables import dead_letters
from app.db.verdicts import judged
from app.domain.telemetry.events import RECEIVED, CloudEvent, Topic
from app.domain.telemetry.streams import DeadLetter, StoredDeadLetter

MAX_REASON = 2_000
MAX_NAME = 200
APART = "~"
"""In the name of no topic: in a letter's `topic` the letter's number follows, where a topic of that name was made anew since."""


def bury(connection: Connection, dead: Sequence[DeadLetter], *, now: datetime) -> None:
    """Keep dead letters (the same record again raises its attempts) and send them to the dead-letter topic."""
    if not dead:
        return
    _make_room(connection, dead)
    rows = [
        {
            "topic": letter.topic, "partition": letter.partition, "offset": letter.offset, "reason": letter.reason[:MAX_REASON],
            "headers": dict(letter.headers), "payload": letter.payload, "attempts": 1, "first_seen_at": now, "last_seen_at": now,
            "source": _identity(letter, "ce_source"), "event_id": _identity(letter, "ce_id"),
        }
        for letter in sorted(dead, key=lambda letter: (letter.topic, letter.partition, letter.offset))
    ]  # fmt: skip
    statement = inserting(connection, dead_letters)
    seen_again = {
        "attempts": dead_letters.c.attempts + 1,
        "reason": statement.excluded.reason,
        "last_seen_at": statement.excluded.last_seen_at,
    }
    connection.execute(statement.on_conflict_do_update(index_elements=["topic", "partition", "offset"], set_=seen_again), rows)
    enqueue(connection, [_event(letter) for letter in dead], now=now)


def _make_room(connection: Connection, dead: Sequence[DeadLetter]) -> None:
    """Another record at the place of one of these is of a topic that is gone, whose name this one has: it is kept, under a name apart."""
    coming = {(letter.topic, letter.partition, letter.offset): _record(letter.payload, letter.headers) for letter in dead}
    d = dead_letters.c
    for places in chunked(sorted(coming)):
        lying = select(d.id, d.topic, d.partition, d.offset, d.payload, d.headers).where(tuple_(d.topic, d.partition, d.offset).in_(places))
        for row in connection.execute(lying).all():
            if _record(bytes(row.payload), row.headers) != coming[row.topic, row.partition, row.offset]:
                apart = f"{APART}{row.id}"
                topic = row.topic[: MAX_NAME - len(apart)] + apart
                connection.execute(update(dead_letters).where(d.id == row.id).values(topic=topic))


def _record(payload: bytes, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """By which a record is known again: all but when it was received, which is said anew of an event that is put aside a second time."""
    return payload, {name: text for name, text in headers.items() if name != RECEIVED}


def _identity(letter: DeadLetter, header: str) -> str | None:
    text = letter.headers.get(header, "")
    return text if 0 < len(text) <= MAX_NAME and "\x00" not in text else None


def buried_among(connection: Connection, events: Sequence[CloudEvent]) -> set[tuple[str, str]]:
    """Those of the events that lie among the dead letters as they are: to send them again would bury them again."""
    d, waiting = dead_letters.c, {(event.source, event.id): event.data for event in events}
    known = select(d.source, d.event_id, d.payload).where(pair_of(connection, (d.source, d.event_id), sorted(waiting)))
    found = connection.execute(known) if waiting else ()
    return {(row.source, row.event_id) for row in found if bytes(row.payload) == waiting[row.source, row.event_id]}


def copy_key(topic: str, partition: int, offset: int) -> str:
    """Key of what is sent of a letter to the dead-letter topic: where the record lay, by the topic's own name."""
    return f"{topic.partition(APART)[0]}:{partition}:{offset}"


def _event(letter: DeadLetter) -> OutboxEvent:
    place = copy_key(letter.topic, letter.partition, letter.offset)
    kind = letter.headers.get("ce_type", "").replace("\x00", "\ufffd") or "ratchet.dead_letter.v1"  # PostgreSQL keeps no NUL in a text
    return OutboxEvent(topic=Topic.DEAD_LETTERS, type=kind[:200], key=place, payload=letter.payload or b"{}")


def list_dead_letters(
    connection: Connection, *, ids: Sequence[int] = (), reason: str | None = None, pending: bool = True, after: int = 0, limit: int = 1_000
) -> list[StoredDeadLetter]:
    """Dead letters behind the id `after`, oldest first: chosen by id, by words of their reason, or all that were not replayed."""
    statement: Select[Any] = select(dead_letters).where(dead_letters.c.id > after).order_by(dead_letters.c.id).limit(limit)
    if ids:
        statement = statement.where(dead_letters.c.id.in_(ids))
    if reason:
        statement = statement.where(dead_letters.c.reason.contains(reason, autoescape=True))
    if pending:
        statement = statement.where(dead_letters.c.replayed_at.is_(None))
    return [_stored(row) for row in connection.execute(statement)]


def _stored(row: Row[Any]) -> StoredDeadLetter:
    letter = DeadLetter(
        topic=row.topic, partition=row.partition, offset=row.offset, headers=row.headers, payload=bytes(row.payload), reason=row.reason
    )
    return StoredDeadLetter(
        id=row.id, letter=letter, attempts=row.attempts, first_seen_at=row.first_seen_at, last_seen_at=row.last_seen_at,
        replayed_at=row.replayed_at,
    )  # fmt: skip


def mark_replayed(connection: Connection, ids: Sequence[int], *, now: datetime) -> None:
    """These were applied after all."""
    connection.execute(update(dead_letters).where(dead_letters.c.id.in_(ids)).values(replayed_at=now))


def mark_failed_again(connection: Connection, id_: int, reason: str, *, now: datetime) -> None:
    """Replaying did not help."""
    values = {"attempts": dead_letters.c.attempts + 1, "reason": reason[:MAX_REASON], "last_seen_at": now}
    connection.execute(update(dead_letters).where(dead_letters.c.id == id_).values(values))


class SqlDeadLetters:
    """The dead letters of a deployment, for people."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def find(
        self, *, ids: Sequence[int] = (), reason: str | None = None, pending: bool = True, after: int = 0, limit: int = 1_000
    ) -> list[StoredDeadLetter]:
        """See `list_dead_letters`."""
        with reading(self._engine) as connection:
            return list_dead_letters(connection, ids=ids, reason=reason, pending=pending, after=after, limit=limit)

    def bury(self, dead: Sequence[DeadLetter], *, now: datetime) -> None:
        """Keep dead letters that never came to ingestion, and count them as its own. Raises `Unavailable`, `BadRequest`, `OwnFault`."""
        with judged(), writing(self._engine) as connection:
            bury(connection, dead, now=now)
            add_counts(connection, {("", "dead_lettered"): len(dead)})

    def failed_again(self, id_: int, reason: str, *, now: datetime) -> None:
        """Replaying did not help."""
        with writing(self._engine) as connection:
            mark_failed_again(connection, id_, reason, now=now)

    def purge(self, *, before: datetime) -> int:
        """Delete what was replayed before a moment."""
        with writing(self._engine) as connection:
            return purge_replayed(connection, before=before)


def purge_replayed(connection: Connection, *, before: datetime) -> int:
    """Delete dead letters that were replayed before a moment."""
    return connection.execute(delete(dead_letters).where(dead_letters.c.replayed_at < before)).rowcount
