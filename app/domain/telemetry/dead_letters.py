"""Dead letters as people see them; and applied after all when their cause is mended, deduplicated like everything else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from app.domain.errors import BadRequest, NotFound
from app.domain.ports import Clock
from app.domain.telemetry.decoding import understand
from app.domain.telemetry.events import RECEIVED, CloudEvent
from app.domain.telemetry.streams import Delivery, EffectBatch, EffectStore, StoredDeadLetter

PAGE = 200
"""Letters of one call; each is a transaction of its own."""


class Letters(Protocol):
    """Where dead letters are kept."""

    def find(
        self, *, ids: Sequence[int] = (), reason: str | None = None, pending: bool = True, after: int = 0, limit: int = 1_000
    ) -> list[StoredDeadLetter]:
        """By id, by words of their reason, or all that were not replayed; those behind `after`, oldest first."""
        ...

    def failed_again(self, id_: int, reason: str, *, now: datetime) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What became of a page of dead letters."""

    applied: int
    still: Mapping[int, str]
    """Why the others make no sense even now, by id."""
    after: int | None
    """Where the next page begins; None behind the last."""


def replay(
    letters: Letters, store: EffectStore, *, ids: Sequence[int] = (), reason: str | None = None, after: int = 0, clock: Clock
) -> Replayed:
    """Apply a page of dead letters; what was applied meanwhile is not applied twice."""
    page = letters.find(ids=ids, reason=reason, pending=not ids, after=after, limit=PAGE)
    still: dict[int, str] = {}
    for stored in page:
        try:
            replay_one(stored, store, now=clock())
        except (ValueError, BadRequest, RecursionError) as error:  # RecursionError: nested deeper than anything is read
            still[stored.id] = str(error)
            letters.failed_again(stored.id, str(error), now=clock())
    return Replayed(applied=len(page) - len(still), still=still, after=page[-1].id if len(page) == PAGE else None)


def replay_one(stored: StoredDeadLetter, store: EffectStore, *, now: datetime) -> None:
    """Apply one dead letter. Raises ValueError, RecursionError or `BadRequest` where it still makes no sense."""
    store.apply(EffectBatch(events=(understand(_delivery(stored)),), replayed_dead_letters=(stored.id,)), now=now)


def _delivery(stored: StoredDeadLetter) -> Delivery:
    """The record again, from its headers; without an identity of its own it gets one from where it lay."""
    letter, headers = stored.letter, stored.letter.headers
    event = CloudEvent(
        id=headers.get("ce_id") or f"{letter.topic}:{letter.partition}:{letter.offset}", source=headers.get("ce_source") or "dlq",
        type=headers.get("ce_type") or "", time=stored.first_seen_at, key="", data=letter.payload,
    )  # fmt: skip
    return Delivery(
        topic=f"replay-{stored.id}-{letter.topic}", partition=letter.partition, offset=letter.offset, headers=headers,
        value=letter.payload, event=event, received_at=_received_at(stored),
    )  # fmt: skip


def _received_at(stored: StoredDeadLetter) -> datetime:
    """When the inbox committed it, as the header says; an outside producer's record counts from when it was buried."""
    micros = stored.letter.headers.get(RECEIVED, "")
    if not (micros.isdecimal() and len(micros) <= 17):
        return stored.first_seen_at
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(micros))


def letter_of(letters: Letters, id_: int) -> StoredDeadLetter:
    """The one of this id. Raises `NotFound`."""
    found = letters.find(ids=[id_], pending=False)
    if not found:
        raise NotFound(f"there is no dead letter {id_}; `ratchet dlq list --all` shows those there are")
    return found[0]


def told(stored: StoredDeadLetter) -> dict[str, Any]:
    """Where it lay and why it is dead; not what it says."""
    return {
        "id": stored.id, "topic": stored.letter.topic, "partition": stored.letter.partition, "offset": stored.letter.offset,
        "reason": stored.letter.reason, "attempts": stored.attempts, "first_seen_at": stored.first_seen_at,
        "last_seen_at": stored.last_seen_at, "replayed_at": stored.replayed_at,
    }  # fmt: skip


def told_whole(stored: StoredDeadLetter) -> dict[str, Any]:
    """With what it says."""
    return told(stored) | {"headers": dict(stored.letter.headers), "payload": stored.letter.payload.decode(errors="backslashreplace")}
