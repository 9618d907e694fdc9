"""What goes is older than the moment that is asked about, the oldest first, and no more at once than is asked for."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Engine, Table, select

from app.db import tables
from app.db.engine import reading, writing
from app.db.ingestion import segment_rows
from app.db.tables import UtcMicros
from app.db.upkeep import identities, past
from app.db.upkeep.compaction import _still_small, _together
from app.db.upkeep.keeper import SqlUpkeep
from app.db.upkeep.needs import Needs, needs
from app.db.upkeep.old_segments import drop_old
from app.domain.errors import Unavailable
from app.domain.retention import Retention
from tests.fakes.streaming import MemorySegments
from tests.unit.app.db.rows import NOON, POLICY, fill

BIT = timedelta(microseconds=1)
DAY = timedelta(days=1)
NOTHING = Needs(batches=frozenset(), since={})


def kept(engine: Engine, column: Column[Any]) -> list[Any]:
    with reading(engine) as connection:
        return list(connection.execute(select(column).order_by(column)).scalars())


Act = Callable[[Connection, datetime, int], Any]
TURN = {"tool_calls": [], "labelled_at": lambda n: NOON + n * BIT, "episode_id": lambda n: f"e{n}"}
LABEL = {"labelled_at": lambda n: NOON + n * BIT, "current": True, "revision": 1, "terms": []}


@pytest.mark.parametrize(
    ("table", "row", "column", "act"),
    [
        (tables.applied_events, {"applied_at": lambda n: NOON + n * BIT}, "event_id",
         lambda c, before, limit: identities.forget_applied(c, before=before, limit=limit)),
        (tables.dead_letters, {"last_seen_at": lambda n: NOON + n * BIT}, "id",
         lambda c, before, limit: identities.forget_letters(c, before=before, limit=limit)),
        (tables.inbox, {"applied_at": lambda n: NOON + n * BIT}, "seq",
         lambda c, before, limit: identities.forget_inbox(c, before=before, limit=limit)[0]),
        (tables.outbox, {"sent_at": lambda n: NOON + n * BIT, "topic": "ratchet.labels"}, "seq",
         lambda c, before, limit: identities.forget_outbox(c, before=before, limit=limit)[0]),
        (tables.observations, {"received_at": lambda n: NOON + n * BIT, "status": "orphan", "inference_id": "gone"}, "id",
         lambda c, before, limit: past.retire_strays(c, before=before, limit=limit)),
        (tables.labels, LABEL, "inference_id",
         lambda c, before, limit: past.retire_labels(c, POLICY, NOTHING, before=before, limit=limit)[0]),
        (tables.exposures, {"occurred_at": lambda n: NOON + n * BIT}, "id",
         lambda c, before, limit: past.retire_exposures(c, POLICY, NOTHING, before=before, limit=limit)),
        (tables.blind_pairs, {"kept_at": lambda n: NOON + n * BIT}, "id",
         lambda c, before, limit: past.retire_pairs(c, before=before, limit=limit)),
        (tables.turns, TURN, "inference_id", lambda c, before, limit: past.retire_turns(c, NOTHING, before=before, limit=limit)[0]),
        (tables.retractions, {"received_at": lambda n: NOON + n * BIT}, "observation_id",
         lambda c, before, limit: past.retire_waiting(c, before=before, limit=limit)),
    ],
)  # fmt: skip
def test_what_is_older_goes_and_what_is_of_that_moment_stays(
    sqlite_engine: Engine, table: Table, row: dict[str, Any], column: str, act: Act
) -> None:
    fill(sqlite_engine, table, 4, **row)
    all_four = kept(sqlite_engine, table.c[column])
    gone: list[int] = []
    for before, limit in ((NOON, 9), (NOON + 3 * BIT, 2), (NOON + 3 * BIT, 9)):
        with writing(sqlite_engine) as connection:
            gone.append(act(connection, before, limit))
    assert gone == [0, 2, 1]
    assert kept(sqlite_engine, table.c[column]) == all_four[3:]


def test_a_turn_goes_with_all_that_is_said_of_it_and_only_with_its_whole_episode(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.turns, 3, **TURN | {"labelled_at": NOON})
    for about in ({"inference_id": "000000"}, {"episode_id": "e0"}, {"inference_id": "000001"}):
        fill(sqlite_engine, tables.observations, 1, id=f"of-{next(iter(about.values()))}", status="joined", retracted_at=NOON, **about)
        fill(sqlite_engine, tables.retractions, source="000000", observation_id=f"of-{next(iter(about.values()))}")
    fill(sqlite_engine, tables.turn_words, 3, tool_calls=[])
    fill(sqlite_engine, tables.labels, 3, **LABEL)
    fill(sqlite_engine, tables.follow_up_readings, 3)
    fill(sqlite_engine, tables.turns, inference_id="young", episode_id="e1", tool_calls=[], labelled_at=NOON + DAY)
    fill(sqlite_engine, tables.turns, inference_id="with-tokens", episode_id="e2", tool_calls=[], labelled_at=NOON, payload_segment="s")
    with writing(sqlite_engine) as connection:
        assert past.retire_turns(connection, NOTHING, before=NOON + DAY, limit=9) == (1, NOON)
    assert kept(sqlite_engine, tables.turns.c.inference_id) == ["000001", "000002", "with-tokens", "young"]
    assert kept(sqlite_engine, tables.observations.c.id) == ["of-000001"]
    assert kept(sqlite_engine, tables.retractions.c.observation_id) == ["of-000001"]
    for table in (tables.turn_words, tables.labels, tables.follow_up_readings):
        assert kept(sqlite_engine, table.c.inference_id) == ["000001", "000002"]


def test_a_stray_goes_with_what_took_it_back(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.observations, 2, status="orphan", inference_id="gone", source="api", retracted_at=NOON)
    fill(sqlite_engine, tables.retractions, 2, source="api", matched=True)
    with writing(sqlite_engine) as connection:
        assert past.retire_strays(connection, before=NOON + BIT, limit=9) == 1
        assert past.retire_waiting(connection, before=NOON + DAY, limit=9) == 0, "what took back an observation that is there stays with it"
    assert kept(sqlite_engine, tables.retractions.c.observation_id) == kept(sqlite_engine, tables.observations.c.id) == ["000001"]


def test_what_is_needed_stays_from_its_moment_on(sqlite_engine: Engine) -> None:
    since = Needs(batches=frozenset(), since={POLICY: NOON + BIT})
    fill(sqlite_engine, tables.exposures, 3, occurred_at=lambda n: NOON + n * BIT)
    fill(sqlite_engine, tables.labels, 3, **LABEL)
    fill(sqlite_engine, tables.turns, 3, **TURN | {"labelled_at": NOON, "finished_at": lambda n: NOON + n * BIT})
    with writing(sqlite_engine) as connection:
        assert past.retire_exposures(connection, POLICY, since, before=NOON + DAY, limit=9) == 1
        assert past.retire_labels(connection, POLICY, since, before=NOON + DAY, limit=9) == (1, NOON)
        assert past.retire_turns(connection, since, before=NOON + DAY, limit=9) == (1, NOON)
        assert past.retire_exposures(connection, "tab", since, before=NOON + DAY, limit=9) == 0
    assert [since.keeps(POLICY, NOON + n * BIT) for n in (0, 1, 2)] == [False, True, True]
    assert not since.keeps("tab", NOON + DAY)


def test_a_label_that_a_batch_took_stays(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.labels, 3, **LABEL | {"batch_id": lambda n: "b" if n == 0 else None})
    fill(sqlite_engine, tables.batch_items, inference_id="000001")
    with writing(sqlite_engine) as connection:
        assert past.retire_labels(connection, POLICY, NOTHING, before=NOON + DAY, limit=9) == (1, NOON + 2 * BIT)
    assert kept(sqlite_engine, tables.labels.c.inference_id) == ["000000", "000001"]


def test_what_is_compared_and_at_work_is_needed(sqlite_engine: Engine) -> None:
    with reading(sqlite_engine) as connection:
        assert needs(connection) == NOTHING
    fill(sqlite_engine, tables.deployment_pointer, holdback=0.0)
    with reading(sqlite_engine) as connection:
        assert needs(connection) == NOTHING, "a holdback of none compares nothing"
    with writing(sqlite_engine) as connection:
        connection.execute(tables.deployment_pointer.update().values(holdback=0.01))
    fill(sqlite_engine, tables.holdouts, thresholds=[], readings=[], counted_until=NOON - DAY)
    fill(sqlite_engine, tables.holdouts, id="over", policy="tab", thresholds=[], readings=[], counted_until=NOON, ended_at=NOON)
    fill(sqlite_engine, tables.cycles, status="running", slot=1, batch_id="cut")
    fill(sqlite_engine, tables.training_runs, 2, id=lambda n: f"r{n}", status=lambda n: ("running", "done")[n], batch_id=lambda n: f"b{n}")
    with reading(sqlite_engine) as connection:
        assert needs(connection) == Needs(batches=frozenset({"cut", "b0"}), since={POLICY: NOON - DAY})


def test_the_outbox_is_forgotten_up_to_the_first_that_is_young_and_releases_stay(sqlite_engine: Engine) -> None:
    topics = ("ratchet.events", "ratchet.releases", "ratchet.events.dlq", "ratchet.labels", "ratchet.labels")
    sent = (NOON, NOON, NOON, None, NOON)
    fill(sqlite_engine, tables.outbox, 5, topic=lambda n: topics[n], sent_at=lambda n: sent[n])
    with writing(sqlite_engine) as connection:
        assert identities.forget_outbox(connection, before=NOON + BIT, limit=2) == (1, 2)
        assert identities.forget_outbox(connection, before=NOON + BIT, limit=9, after=2) == (1, 3)
        assert identities.forget_outbox(connection, before=NOON + BIT, limit=9, after=3) == (0, 3)
    assert kept(sqlite_engine, tables.outbox.c.seq) == [2, 4, 5]


def test_identities_are_forgotten_along_the_table_and_who_waits_at_its_head_stops_nothing(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.inbox, 4, applied_at=lambda n: None if n == 0 else NOON)
    with writing(sqlite_engine) as connection:
        assert identities.forget_inbox(connection, before=NOON + BIT, limit=2) == (1, 2)
        assert identities.forget_inbox(connection, before=NOON + BIT, limit=2, after=2) == (2, 4)
        assert identities.forget_inbox(connection, before=NOON + BIT, limit=2, after=4) == (0, 4)
    assert kept(sqlite_engine, tables.inbox.c.seq) == [1]


def keeper(engine: Engine, retention: Retention, **options: Any) -> SqlUpkeep:
    files = MemorySegments()
    files.turns = lambda name: []  # type: ignore[attr-defined]
    return SqlUpkeep(engine, engine, files=files, retention=retention, owner="one", clock=lambda: NOON, **options)  # type: ignore[arg-type]


ALSO = {"turns_days": ("segments_days", "labels_days"), "dedupe_days": ("inbox_days",)}
"""What may be kept no longer than these."""


STRAY = {"received_at": None, "status": "orphan", "inference_id": "t"}


def retired(engine: Engine, **days: float) -> dict[str, int]:
    days |= {other: number for name, number in days.items() for other in ALSO.get(name, ())}
    never = dict.fromkeys(name for name in Retention.__struct_fields__ if name.endswith("_days"))
    house = keeper(engine, Retention(**{**never, **days}))  # type: ignore[arg-type]
    with house.office() as lease:
        assert lease is not None
        return house.retire(lease)


@pytest.mark.parametrize(
    ("setting", "table", "row", "name", "extra"),
    [
        ("dedupe_days", tables.inbox, {"applied_at": None}, "identities", timedelta()),
        ("dedupe_days", tables.applied_events, {"applied_at": None}, "applied", DAY),
        ("inbox_days", tables.outbox, {"sent_at": None, "topic": "ratchet.labels"}, "outbox", timedelta()),
        ("dead_letters_days", tables.dead_letters, {"last_seen_at": None}, "dead_letters", timedelta()),
        ("turns_days", tables.turns, {"labelled_at": None, "tool_calls": []}, "turns", timedelta()),
        ("turns_days", tables.blind_pairs, {"kept_at": None}, "blind_pairs", timedelta()),
        ("observations_days", tables.observations, STRAY, "observations", timedelta()),
        ("labels_days", tables.labels, {"labelled_at": None, "current": True, "revision": 1, "terms": []}, "labels", timedelta()),
        ("exposures_days", tables.exposures, {"occurred_at": None}, "exposures", timedelta()),
        ("observations_days", tables.retractions, {"received_at": None}, "retractions", timedelta()),
    ],
)  # fmt: skip
def test_a_class_is_kept_for_its_days_to_the_microsecond(
    sqlite_engine: Engine, setting: str, table: Table, row: dict[str, Any], name: str, extra: timedelta
) -> None:
    edge = NOON - 2.5 * DAY - extra
    moment = next(column for column, value in row.items() if value is None)
    fill(sqlite_engine, table, 2, **row | {moment: lambda n: edge - (1 - n) * BIT})
    fill(sqlite_engine, tables.turn_counts, version="v")
    assert isinstance(table.c[moment].type, UtcMicros)
    assert retired(sqlite_engine) == {}, "for ever"
    assert retired(sqlite_engine, **{setting: 2.5}) == {name: 1}
    assert kept(sqlite_engine, table.c[moment]) == [edge]
    with reading(sqlite_engine) as connection:
        counted = connection.execute(select(tables.counters.c.name, tables.counters.c.value)).all()
    assert [tuple(row) for row in counted] == [(f"retired_{name}", 1)]


def test_house_is_kept_by_one_for_two_minutes_and_by_no_clock_that_is_an_hour_off(sqlite_engine: Engine) -> None:
    hour = timedelta(hours=1)
    for own, agreed in ((NOON + hour, True), (NOON - hour, True), (NOON + hour + BIT, False), (NOON - hour - BIT, False)):
        house = keeper(sqlite_engine, Retention(), own=lambda at=own: at)
        with house.office() as lease:
            assert lease is not None
            assert lease.expires_at == NOON + timedelta(minutes=2)
            with keeper(sqlite_engine, Retention()).office() as other:
                assert other is None, "nobody else meanwhile"
            if agreed:
                house.retire(lease)
            else:
                with pytest.raises(Unavailable, match="more than 1:00:00 apart"):
                    house.retire(lease)


def test_segments_go_when_they_are_older_and_nobody_needs_what_they_hold(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.segments, 4, created_at=lambda n: NOON + n * BIT, name=lambda n: f"s{n}", state="whole")
    fill(sqlite_engine, tables.turns, 4, **TURN | {"payload_segment": lambda n: f"s{n}", "labelled_at": lambda n: None if n == 1 else NOON})
    held = {f"s{n}": [f"{n:06}"] for n in range(4)}
    erased: list[str] = []

    class Files:
        def turns(self, name: str) -> list[str]:
            return held[name]

        def drop(self, name: str) -> None:
            erased.append(name)

        def write_sized(self, name: str, payloads: Any) -> int:
            raise AssertionError(name)

        def copy(self, name: str, to: str, *, without: Any) -> int:
            raise AssertionError(name)

    looked = drop_old(sqlite_engine, Files(), now=NOON, before=NOON + 3 * BIT, limit=2)
    assert (looked.dropped, looked.until) == (1, (NOON + BIT, "s1"))
    looked = drop_old(sqlite_engine, Files(), now=NOON, before=NOON + 3 * BIT, limit=2, after=looked.until)
    assert (looked.dropped, looked.until) == (1, (NOON + 2 * BIT, "s2"))
    assert drop_old(sqlite_engine, Files(), now=NOON, before=NOON + 3 * BIT, limit=2, after=looked.until) == (0, None)
    assert kept(sqlite_engine, tables.segments.c.name) == ["s1", "s3"]
    assert erased == ["s0", "s2"]
    with reading(sqlite_engine) as connection:
        t = tables.turns.c
        assert connection.execute(select(t.payload_segment).order_by(t.inference_id)).scalars().all() == [None, "s1", None, "s3"]


def small(engine: Engine, *segments: tuple[str, datetime, int]) -> None:
    with writing(engine) as connection:
        connection.execute(tables.segments.delete())
    fill(
        engine, tables.segments, len(segments), name=lambda n: segments[n][0], created_at=lambda n: segments[n][1],
        bytes=lambda n: segments[n][2], state="whole",
    )  # fmt: skip


MIDNIGHT = datetime(2026, 11, 21, tzinfo=NOON.tzinfo)


@pytest.mark.parametrize(
    ("segments", "together"),
    [
        ([("a", MIDNIGHT, 1), ("b", MIDNIGHT + DAY - BIT, 1)], ["a", "b"]),
        ([("a", MIDNIGHT, 1), ("b", MIDNIGHT + DAY, 1)], ["b"]),
        ([("a", MIDNIGHT - BIT, 1), ("b", MIDNIGHT, 1), ("c", MIDNIGHT, 1)], ["b", "c"]),
        ([("a", MIDNIGHT, 50), ("b", MIDNIGHT, 50), ("c", MIDNIGHT, 1)], ["a", "b"]),
        ([("a", MIDNIGHT, 50), ("b", MIDNIGHT, 51), ("c", MIDNIGHT, 1)], ["b", "c"]),
        ([("a", MIDNIGHT, 1), ("claim-b", MIDNIGHT, 1), ("day-c", MIDNIGHT, 1)], ["a"]),
        ([("a", MIDNIGHT, 1), ("b", MIDNIGHT + 2 * DAY, 1)], ["a"]),
    ],
)
def test_small_segments_of_one_day_that_is_over_are_put_together_up_to_the_size(
    sqlite_engine: Engine, segments: list[tuple[str, datetime, int]], together: list[str]
) -> None:
    small(sqlite_engine, *segments)
    assert [row.name for row in _together(sqlite_engine, before=MIDNIGHT + 2 * DAY, at_most_bytes=100)] == together


def test_each_policy_has_a_file_of_its_own_and_so_as_much_more_goes_together(sqlite_engine: Engine) -> None:
    small(sqlite_engine, *((name, MIDNIGHT, 60) for name in "abcd"))
    fill(sqlite_engine, tables.turn_counts, 2, version="v", policy=lambda n: f"p{n}")
    assert len(_together(sqlite_engine, before=MIDNIGHT + DAY, at_most_bytes=100)) == 3


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ({"day-a": 49, "day-a.1": 49}, ["day-a", "day-a.1"]),
        ({"day-a": 50, "day-a.1": 49}, []),
        ({"day-a": 49, "day-b": 49}, []),
        ({"day-a": 40, "day-a.1": 40, "day-a.2": 20}, ["day-a", "day-a.1", "day-a.2"]),
        ({"day-a": 40, "day-a.1": 40, "day-a.2": 21}, ["day-a", "day-a.1"]),
        ({"a": 1, "a.1": 1}, []),
    ],
)
def test_merged_segments_below_half_of_the_size_are_merged_once_more(
    sqlite_engine: Engine, sizes: dict[str, int], together: list[str]
) -> None:
    small(sqlite_engine, *((name, MIDNIGHT, size) for name, size in sizes.items()))
    assert [row.name for row in _still_small(sqlite_engine, at_most_bytes=100)] == together


def test_a_segment_is_said_before_it_is_written_and_what_stays_so_is_swept(sqlite_engine: Engine) -> None:
    first, second = (segment_rows.intend(sqlite_engine, "s", now=NOON) for _ in range(2))
    assert first != second
    files = MemorySegments()
    with writing(sqlite_engine) as connection:
        segment_rows.complete(connection, first, rows=1, size_bytes=1)
    for name in (first, second):
        files.write(name, [])
        segment_rows.abandon(sqlite_engine, name, files)
    assert list(files.written) == [first], "what was completed after all is no longer to be taken back"
    assert kept(sqlite_engine, tables.segments.c.name) == [first]
    with writing(sqlite_engine) as connection:
        segment_rows.supersede(connection, [first])
    assert segment_rows.tidy(sqlite_engine, files, now=NOON) == 1
    assert files.written == {}
    assert kept(sqlite_engine, tables.segments.c.name) == []
