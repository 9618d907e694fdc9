"""The audit chain: every act that changed what may serve, each entry hashed together with the one before it.

Three things break such chains in practice, and are avoided here: two appenders that read the same tail (the head is a row of its own,
locked until the transaction ends), times hashed with more digits than are stored (integer microseconds), and rows that can be
renumbered (the sequence number is hashed). Cutting off the end is found because the head says how long the chain is; cutting it off
together with the head, by the copies of (seq, hash) that every release event carries to Kafka and to webhooks.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, insert, or_, select, update

from app.db.engine import insert_or_ignore
from app.db.tables import audit, audit_head, releases, versions
from app.domain.errors import BadInput
from app.domain.release.gates import canonical_json
from app.domain.release.releases import AuditEntry

DOMAIN = "ratchet.audit.v1"
"""Separates these hashes from every other use of SHA-256 over the same JSON."""
GENESIS = "0" * 64
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What reading the chain from its first entry found."""

    entries: int
    head: str
    problem: str | None
    """The first thing that is wrong, in a sentence; None for an intact chain."""


def append(connection: Connection, *, actor: str, action: str, subject: str, detail: dict[str, Any], now: datetime) -> AuditEntry:
    """Add an entry; other appenders wait until this transaction ends."""
    seq, previous_hash = _lock_head(connection)
    content: dict[str, Any] = {"seq": seq + 1, "occurred_at": now, "actor": actor, "action": action, "subject": subject, "detail": detail}
    entry = AuditEntry(**content, previous_hash=previous_hash, hash=entry_hash(**content, previous_hash=previous_hash))
    connection.execute(insert(audit).values(**content, previous_hash=previous_hash, hash=entry.hash))
    connection.execute(update(audit_head).where(audit_head.c.id == 1).values(seq=entry.seq, hash=entry.hash))
    return entry


def entry_hash(
    *, seq: int, occurred_at: datetime, actor: str, action: str, subject: str, detail: dict[str, Any], previous_hash: str
) -> str:
    """SHA-256 (hex) over the canonical JSON of the entry, its place in the chain and its predecessor's hash."""
    micros = (occurred_at - EPOCH) // timedelta(microseconds=1)
    return hashlib.sha256(canonical_json([DOMAIN, seq, micros, actor, action, subject, detail, previous_hash])).hexdigest()


def verify(connection: Connection, *, seen: tuple[int, str] | None = None) -> Verification:
    """Recompute the whole chain. `seen` is a (seq, hash) noted outside the database, which must still be in it."""
    found = _recomputed(entries(connection), seen)
    head = connection.execute(select(audit_head)).one_or_none()
    known, known_hash = (head.seq, head.hash) if head else (0, GENESIS)
    problem, last = found.problem, found.entries
    if problem is None and (known, known_hash) != (last, found.head):
        problem = f"the head says {known} entries, the chain has {last}: entries were cut off or added behind the head's back"
    return Verification(entries=last, head=found.head, problem=problem or _cut_off(last, seen))


def verify_lines(lines: Iterable[str], *, seen: tuple[int, str] | None = None) -> Verification:
    """Recompute a chain that was exported, an entry a line, without any database. Only `seen` tells whether its end was cut off."""
    found = _recomputed((_read(number, line) for number, line in enumerate(lines, 1)), seen)
    return Verification(entries=found.entries, head=found.head, problem=found.problem or _cut_off(found.entries, seen))


def _recomputed(chain: Iterable[AuditEntry], seen: tuple[int, str] | None) -> Verification:
    problem, last, previous_hash = None, 0, GENESIS
    for entry in chain:
        problem = problem or _problem(entry, last, previous_hash) or _contradiction(entry, seen)
        last, previous_hash = entry.seq, entry.hash
    return Verification(entries=last, head=previous_hash, problem=problem)


def _cut_off(last: int, seen: tuple[int, str] | None) -> str | None:
    if seen is None or seen[0] <= last:
        return None
    return f"entry {seen[0]} was seen outside, the chain ends at {last}: it was cut off together with its head"


def _read(number: int, line: str) -> AuditEntry:
    """Raises `BadInput`."""
    try:
        told = json.loads(line)
        return AuditEntry(**{**told, "occurred_at": datetime.fromisoformat(told["occurred_at"])})
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(f"line {number} is no entry of an exported audit chain ({error}): export it again from /console/audit") from error


def entries(
    connection: Connection, *, after: int = 0, subject: str | None = None, policy: str | None = None, newest: int | None = None
) -> Iterator[AuditEntry]:
    """Entries in order (the newest first where only the `newest` are asked for); with a policy what is about it."""
    query = select(audit).where(audit.c.seq > after)
    if subject is not None:
        query = query.where(audit.c.subject == subject)
    if policy is not None:
        its_releases = select(releases.c.id).where(releases.c.policy == policy)
        its_versions = select(versions.c.digest).where(versions.c.policy == policy)
        query = query.where(or_(audit.c.subject == policy, audit.c.subject.in_(its_releases), audit.c.subject.in_(its_versions)))
    query = query.order_by(audit.c.seq) if newest is None else query.order_by(audit.c.seq.desc()).limit(newest)
    for row in connection.execute(query.execution_options(yield_per=1000)):
        yield AuditEntry(**row._mapping)


def _lock_head(connection: Connection) -> tuple[int, str]:
    connection.execute(insert_or_ignore(connection, audit_head).values(id=1, seq=0, hash=GENESIS))
    head = connection.execute(select(audit_head).where(audit_head.c.id == 1).with_for_update()).one()
    return head.seq, head.hash


def _problem(entry: AuditEntry, last: int, previous_hash: str) -> str | None:
    if entry.seq != last + 1:
        return f"after entry {last} comes entry {entry.seq}: entries in between were deleted or renumbered"
    if entry.previous_hash != previous_hash:
        return f"entry {entry.seq} does not follow entry {last}: entries were reordered, replaced or deleted"
    fields = {name: getattr(entry, name) for name in ("seq", "occurred_at", "actor", "action", "subject", "detail", "previous_hash")}
    if entry_hash(**fields) != entry.hash:
        return f"entry {entry.seq} ({entry.action} of {entry.subject}) was edited"
    return None


def _contradiction(entry: AuditEntry, seen: tuple[int, str] | None) -> str | None:
    if seen is not None and entry.seq == seen[0] and entry.hash != seen[1]:
        return f"entry {entry.seq} is not the one that was seen outside: the chain was written anew"
    return None
