"""The inbox's statements, in the driver's own words: what the writer thread runs for every group commit."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.engine.interfaces import DBAPIConnection

from app.domain.ports import Receipt

COLUMNS = ("source", "event_id", "type", "key", "time", "payload", "payload_hash", "received_at")
_INSERT = f"INSERT INTO inbox ({', '.join(COLUMNS)}) "
CHUNKS = (1024, 256, 64, 16, 4, 1)
"""Rows per statement on SQLite: few sizes, so that every statement is prepared once (1024 × 8 values < its limit of 32,766)."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Row:
    """One event as the inbox stores it."""

    source: str
    event_id: str
    type: str
    key: str
    time: datetime
    payload: bytes
    payload_hash: bytes
    """See `app.domain.telemetry.events.payload_hash`."""
    received_at: datetime | None
    """None on PostgreSQL: the database's own time of the insert, so that a door with a wrong clock makes nothing early or late."""

    def values(self) -> tuple[Any, ...]:
        """In the order of `COLUMNS`, as the driver wants them."""
        return (
            self.source, self.event_id, self.type, self.key, micros(self.time), self.payload, self.payload_hash,
            None if self.received_at is None else micros(self.received_at),
        )  # fmt: skip


def micros(moment: datetime) -> int:
    """Microseconds since the epoch, as `app.db.tables.UtcMicros` stores them."""
    delta = moment - EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


def insert_rows(connection: DBAPIConnection, dialect: str, rows: Sequence[Row]) -> dict[tuple[str, str], bytes]:
    """Insert what is new; returns the stored hash of every row that was known before, by (source, id)."""
    return _insert_sqlite(connection, rows) if dialect == "sqlite" else _insert_postgres(connection, rows)


def _insert_sqlite(connection: DBAPIConnection, rows: Sequence[Row]) -> dict[tuple[str, str], bytes]:
    (newest,) = _run(connection, "SELECT max(seq) FROM inbox").fetchone()
    known: dict[tuple[str, str], bytes] = {}
    for chunk in _chunks(rows):
        values = ",".join(["(?,?,?,?,?,?,?,?)"] * len(chunk))
        statement = f"{_INSERT} VALUES {values} ON CONFLICT DO NOTHING"
        cursor = _run(connection, statement, [value for row in chunk for value in row.values()])
        if cursor.rowcount != len(chunk):
            known |= _known_sqlite(connection, chunk, newest or 0)
    return known


def _known_sqlite(connection: DBAPIConnection, chunk: Sequence[Row], newest: int) -> dict[tuple[str, str], bytes]:
    """Stored hashes of the chunk's rows whose seq is not above `newest`, as one value (one step of the statement).

    The `+` keeps SQLite from walking the table by seq.
    """
    values = ",".join(["(?,?)"] * len(chunk))
    statement = (
        "SELECT json_group_array(json_array(source, event_id, hex(payload_hash))) FROM inbox "
        f"WHERE (source, event_id) IN (VALUES {values}) AND +seq <= ?"
    )
    (found,) = _run(connection, statement, [part for row in chunk for part in (row.source, row.event_id)] + [newest]).fetchone()
    return {(source, event_id): bytes.fromhex(digest) for source, event_id, digest in json.loads(found)}


def _insert_postgres(connection: DBAPIConnection, rows: Sequence[Row]) -> dict[tuple[str, str], bytes]:
    known = _known_postgres(connection, rows, f" AND era = ({_ERA_BEFORE})")
    fresh = [row for row in rows if (row.source, row.event_id) not in known]
    return known | _insert_fresh(connection, fresh) if fresh else known


_ERA_BEFORE = "SELECT max(era) - 1 FROM inbox_eras"
"""Within an era events are unique; this one is looked into as well, so that an era that has just begun forgets nobody's last day."""


def _insert_fresh(connection: DBAPIConnection, rows: Sequence[Row]) -> dict[tuple[str, str], bytes]:
    columns = list(zip(*(row.values() for row in rows), strict=True))
    types = ("text", "text", "text", "text", "bigint", "bytea", "bytea", "bigint")
    arrays = ", ".join(f"%s::{type_}[]" for type_ in types)
    told = ", ".join(f"t.{column}" for column in COLUMNS[:-1])
    statement = (
        f"{_INSERT} SELECT {told}, COALESCE(t.received_at, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) "
        f"FROM unnest({arrays}) AS t ({', '.join(COLUMNS)}) ON CONFLICT DO NOTHING RETURNING source, event_id"
    )
    inserted = set(_run(connection, statement, [list(column) for column in columns]).fetchall())
    rest = [row for row in rows if (row.source, row.event_id) not in inserted]
    return _known_postgres(connection, rest) if rest else {}


def _known_postgres(connection: DBAPIConnection, rows: Sequence[Row], within: str = "") -> dict[tuple[str, str], bytes]:
    given = "(SELECT * FROM unnest(%s::text[], %s::text[]))"
    found = _run(
        connection,
        f"SELECT source, event_id, payload_hash FROM inbox WHERE (source, event_id) IN {given}{within}",
        [[row.source for row in rows], [row.event_id for row in rows]],
    ).fetchall()
    return {(source, event_id): bytes(digest) for source, event_id, digest in found}


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    start = 0
    for size in CHUNKS:
        while len(rows) - start >= size:
            yield rows[start : start + size]
            start += size


def count_answers(connection: DBAPIConnection, dialect: str, receipts: Sequence[Receipt]) -> None:
    """Add the duplicates and conflicts at the door to the counters of the inbox database."""
    mark = "?" if dialect == "sqlite" else "%s"
    counts = Counter(receipts)
    for receipt in (Receipt.DUPLICATE, Receipt.CONFLICT):
        if counts[receipt]:
            _run(
                connection,
                f"INSERT INTO counters (policy, name, value) VALUES ('', {mark}, {mark}) "
                "ON CONFLICT (policy, name) DO UPDATE SET value = counters.value + excluded.value",
                (f"door_{receipt.value}", counts[receipt]),
            )


def unsent_count(connection: DBAPIConnection, *, at_most: int) -> int:
    """Events that wait for the relay, counted no further than `at_most`."""
    (count,) = _run(connection, f"SELECT count(*) FROM (SELECT 1 FROM inbox WHERE relayed_at IS NULL LIMIT {int(at_most)}) AS t").fetchone()
    return int(count)


def _run(connection: DBAPIConnection, statement: str, values: Sequence[Any] = ()) -> Any:  # noqa: ANN401 - the DB-API types rows loosely
    cursor = connection.cursor()
    cursor.execute(statement, values)
    return cursor
