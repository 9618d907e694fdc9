"""The door, the dead letters and what is joined, at the bound and one beyond it."""

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select

from app.db import tables
from app.db.counters import add_counts, read_counts
from app.db.engine import reading, writing
from app.db.ingestion.dead_letters import SqlDeadLetters, buried_among, bury, mark_failed_again, mark_replayed
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.inbox_rows import _chunks, micros
from app.db.ingestion.observations import JOINED, LATE, PARKED, expire_parked, settle_crossed, status_of
from app.db.ingestion.turn_counts import count_labelled, count_turns, read_turn_counts
from app.db.ingestion.turns import TurnRef
from app.db.outbox import OutboxEvent, enqueue
from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent, Topic
from app.domain.telemetry.streams import DeadLetter, JoinRules
from tests.unit.app.db.rows import NOON, POLICY, fill

BIT = timedelta(microseconds=1)
HOUR = timedelta(hours=1)


def event(id_: str = "1", data: bytes = b"{}", **named: str) -> CloudEvent:
    given = {"source": "api", "type": "t", "key": "k"} | named
    return CloudEvent(id=id_, time=NOON, data=data, **given)


@pytest.fixture
def door(sqlite_engine: Engine) -> SqlInbox:
    return SqlInbox(sqlite_engine, max_in_flight_bytes=1_000, free_bytes=lambda: 1 << 40)


def test_an_event_counts_three_hundred_bytes_beside_its_payload_and_the_bound_itself_is_in_bounds(door: SqlInbox) -> None:
    assert door.append_blocking([event("a", b"x" * 400), event("b", b"")]) == [Receipt.ACCEPTED] * 2
    with pytest.raises(Overloaded, match=r"^0 bytes wait for their commit") as refused:
        door.append_blocking([event("c", b"x" * 401), event("d", b"")])
    assert 0.5 <= refused.value.retry_after_s <= 1.5
    assert door.in_flight_bytes == 0
    door.close()
    with pytest.raises(Unavailable, match="closing"):
        door.append_blocking([event("late")])


def test_without_another_bound_thirty_two_mebibytes_wait(sqlite_engine: Engine) -> None:
    door = SqlInbox(sqlite_engine, free_bytes=lambda: 1 << 40)
    with pytest.raises(Overloaded):
        door.append_blocking([event("a", bytes(32 * 1024 * 1024 - 299))])
    assert door.append_blocking([event("a", bytes(32 * 1024 * 1024 - 300))]) == [Receipt.ACCEPTED]
    door.close()


@pytest.mark.parametrize("name", ["source", "id", "type", "key"])
def test_a_name_has_one_to_two_hundred_characters(door: SqlInbox, name: str) -> None:
    def named(text: str) -> CloudEvent:
        given: dict[str, Any] = {name: text}
        return event(text) if name == "id" else event(**given)

    assert door.append_blocking([named("ü" * 200)]) == [Receipt.ACCEPTED]
    for text in ("", "x" * 201, "a\x00", "\ud800"):
        with pytest.raises(BadRequest) as refused:
            door.append_blocking([named(text)])
        assert refused.value.param == name
        assert str(refused.value) == f"{name} is {text[:40]!r}: use 1 to 200 characters of valid text without NUL"
    door.close()


def refused_after_a_look(door: SqlInbox) -> str | None:
    """What the door says once it has looked; it looks after a commit or a second of silence."""
    pause = threading.Event()
    for _ in range(30):
        pause.wait(0.1)
        if door._looked_at > 0 and door._refusal is not None:
            break
    refusal = door._refusal
    door.close()
    return refusal


@pytest.mark.parametrize(("rows", "free", "refusal"), [(3, 100, None), (4, 100, "more than 3 events wait"), (0, 99, "only 99 bytes")])
def test_the_door_is_shut_beyond_its_backlog_and_below_its_disk(sqlite_engine: Engine, rows: int, free: int, refusal: str | None) -> None:
    if rows:
        fill(sqlite_engine, tables.inbox, rows)
    door = SqlInbox(sqlite_engine, max_backlog_rows=3, min_free_bytes=100, free_bytes=lambda: free)
    told = refused_after_a_look(door)
    assert told is None if refusal is None else told is not None and told.startswith(refusal)


def test_of_a_request_each_event_hears_what_became_of_it(door: SqlInbox) -> None:
    assert door.append_blocking([event("a"), event("a"), event("a", b"x")]) == [Receipt.ACCEPTED, Receipt.DUPLICATE, Receipt.CONFLICT]
    assert door.append_blocking([event("b")]) == [Receipt.ACCEPTED]
    assert door.append_blocking([event("b", b"x"), event("c"), event("a")]) == [Receipt.CONFLICT, Receipt.ACCEPTED, Receipt.DUPLICATE]
    door.close()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 17, 1_023, 1_024, 1_025, 2_500])
def test_rows_are_written_in_a_few_sizes_that_add_up(count: int) -> None:
    sizes = [len(chunk) for chunk in _chunks(range(count))]  # type: ignore[arg-type]
    assert [row for chunk in _chunks(range(count)) for row in chunk] == list(range(count))  # type: ignore[arg-type, comparison-overlap]
    assert set(sizes) <= {1_024, 256, 64, 16, 4, 1}
    assert sizes == sorted(sizes, reverse=True)
    assert all(sizes.count(size) < 4 for size in (256, 64, 16, 4, 1)), "the largest that fits"


def test_a_door_writes_moments_as_the_tables_do() -> None:
    assert micros(datetime(1970, 1, 2, 0, 0, 1, 5, tzinfo=UTC)) == 86_401_000_005
    assert micros(datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)) == -1_000_000


def letter(offset: int = 0, reason: str = "r", **headers: str) -> DeadLetter:
    return DeadLetter(topic="t", partition=0, offset=offset, headers=headers, payload=b"p", reason=reason)


def test_a_dead_letter_s_reason_and_identity_are_cut_to_what_the_table_holds(sqlite_engine: Engine) -> None:
    long = "x" * 2_001
    with writing(sqlite_engine) as connection:
        bury(connection, [letter(0, long, ce_id="i" * 200, ce_source="s"), letter(1, ce_id="i" * 201, ce_type="t" * 201)], now=NOON)
        bury(connection, [letter(0, "again", ce_id="i" * 200, ce_source="s")], now=NOON + HOUR)
        mark_failed_again(connection, 2, long, now=NOON + HOUR)
        d = tables.dead_letters.c
        rows = connection.execute(select(d.offset, d.reason, d.event_id, d.attempts, d.first_seen_at, d.last_seen_at).order_by(d.id)).all()
        types = connection.execute(select(tables.outbox.c.type).order_by(tables.outbox.c.seq)).scalars().all()
        known = buried_among(connection, [event("i" * 200, b"p", source="s"), event("other")])
        assert buried_among(connection, [event("i" * 200, b"q", source="s")]) == set(), "with other words it is another event"
    assert [tuple(row) for row in rows] == [
        (0, "again", "i" * 200, 2, NOON, NOON + HOUR), (1, "x" * 2_000, None, 2, NOON, NOON + HOUR),
    ]  # fmt: skip
    assert types == ["ratchet.dead_letter.v1", "t" * 200, "ratchet.dead_letter.v1"]
    assert known == {("s", "i" * 200)}


def test_dead_letters_are_found_by_what_is_asked_for_and_purged_when_they_were_replayed_before(sqlite_engine: Engine) -> None:
    with writing(sqlite_engine) as connection:
        bury(connection, [letter(n, f"reason {n}") for n in range(4)], now=NOON)
        mark_replayed(connection, [1], now=NOON)
        mark_replayed(connection, [2], now=NOON - BIT)
    book = SqlDeadLetters(sqlite_engine)
    assert [one.id for one in book.find()] == [3, 4]
    assert [one.id for one in book.find(pending=False)] == [1, 2, 3, 4]
    assert [one.id for one in book.find(pending=False, after=2, limit=1)] == [3]
    assert [one.id for one in book.find(reason="n 3")] == [4]
    assert [one.id for one in book.find(ids=[1, 4], pending=False)] == [1, 4]
    book.failed_again(3, "still", now=NOON + HOUR)
    (failed,) = book.find(ids=[3])
    assert (failed.attempts, failed.letter.reason, failed.last_seen_at) == (2, "still", NOON + HOUR)
    assert book.purge(before=NOON) == 1
    assert [one.id for one in book.find(pending=False)] == [1, 3, 4]


def test_a_dead_letter_list_ends_after_a_thousand(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.dead_letters, 1_001)
    assert len(SqlDeadLetters(sqlite_engine).find()) == 1_000


def ref(due: datetime = NOON, *, imported: bool = False, policy: str = POLICY) -> TurnRef:
    return TurnRef(
        inference_id="t", episode_id="e", policy=policy, label_due_at=due, labelled_at=None, erased_at=None, imported=imported,
    )  # fmt: skip


RULES = JoinRules(policies={}, lateness_s=3_600.0)


@pytest.mark.parametrize(
    ("received", "known", "status"),
    [
        (NOON, [], PARKED),
        (NOON + HOUR, [ref()], JOINED),
        (NOON + HOUR + BIT, [ref()], LATE),
        (NOON + HOUR + BIT, [ref(), ref(NOON + BIT)], JOINED),
        (NOON + HOUR + 2 * BIT, [ref(), ref(NOON + BIT)], LATE),
    ],
)
def test_what_is_said_is_in_time_until_lateness_after_the_last_label_is_due(received: datetime, known: list[TurnRef], status: str) -> None:
    assert status_of("api", NOON, received, known, RULES) == status


@pytest.mark.parametrize(
    ("source", "imported", "status"), [("import:a", [True], JOINED), ("import:a", [True, False], LATE), ("api", [True], LATE)]
)
def test_history_is_judged_by_when_it_occurred_where_all_of_it_is_history(source: str, imported: list[bool], status: str) -> None:
    assert status_of(source, NOON, NOON + 9 * HOUR, [ref(imported=one) for one in imported], RULES) == status


def test_what_waited_longer_than_lateness_is_an_orphan_and_joins_when_its_turn_is_there(sqlite_engine: Engine) -> None:
    said = {"policy": POLICY, "status": "parked", "source": "api", "inference_id": lambda n: f"t{n}"}
    fill(
        sqlite_engine,
        tables.observations,
        3,
        id=lambda n: f"o{n}",
        received_at=lambda n: NOON + n * BIT,
        **said,
    )
    with writing(sqlite_engine) as connection:
        assert expire_parked(connection, rules=RULES, now=NOON + HOUR) == {}
        assert expire_parked(connection, rules=RULES, now=NOON + HOUR + 2 * BIT, limit=1) == {(POLICY, "orphaned"): 1}
        assert expire_parked(connection, rules=RULES, now=NOON + HOUR + 2 * BIT) == {(POLICY, "orphaned"): 1}
    fill(sqlite_engine, tables.turns, inference_id="t2", tool_calls=[], label_due_at=NOON)
    with writing(sqlite_engine) as connection:
        joined = settle_crossed(connection, rules=RULES)
        status = connection.execute(select(tables.observations.c.status).order_by(tables.observations.c.id)).scalars().all()
    assert joined.changed_turns == {"t2"}
    assert status == ["orphan", "orphan", "joined"]


def test_what_is_counted_adds_up_and_may_be_taken_back(sqlite_engine: Engine) -> None:
    with writing(sqlite_engine) as connection:
        count_turns(connection, [("p", "v1"), ("p", "v1"), ("q", "v2")])
        count_labelled(connection, [("p", "v1"), ("p", "v1")])
        count_labelled(connection, [("p", "v1")], by=-1)
        assert read_turn_counts(connection) == [("p", "v1", 2, 1), ("q", "v2", 1, 0)]
        assert read_turn_counts(connection, "q") == [("q", "v2", 1, 0)]
        add_counts(connection, {("", "a"): 2, ("p", "a"): 1})
        add_counts(connection, {("", "a"): 3})
        assert read_counts(connection) == {("", "a"): 5, ("p", "a"): 1}


def test_a_key_of_the_outbox_is_cut_to_two_hundred_characters_and_the_same_cause_is_told_once(sqlite_engine: Engine) -> None:
    def told(key: str, event_id: str | None = None) -> OutboxEvent:
        return OutboxEvent(topic=Topic.LABELS, key=key, type="t", payload=b"{}", event_id=event_id)

    with writing(sqlite_engine) as connection:
        enqueue(connection, [], now=NOON)
        enqueue(connection, [told("k" * 201), told("k" * 200)], now=NOON)
        for _ in range(2):
            enqueue(connection, [told("once", "id")], now=NOON)
    with reading(sqlite_engine) as connection:
        keys = connection.execute(select(tables.outbox.c.key).order_by(tables.outbox.c.seq)).scalars().all()
    assert keys == ["k" * 200, "k" * 200, "once"]
