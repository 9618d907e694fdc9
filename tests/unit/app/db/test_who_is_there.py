"""Engines, keys and people: how long each counts as there, and what is written down of it."""

from datetime import datetime, timedelta

from sqlalchemy import Engine, select

from app.db import tables
from app.db.access.keys import SqlKeys
from app.db.access.people import SqlPeople, hands_of
from app.db.engine import reading, writing
from app.db.release.engine_reads import holds, read_engines
from app.db.release.engines import SqlEngineLedger
from app.db.release.needed_weights import SqlNeededWeights
from app.domain.access import Scope
from app.domain.people import Role
from app.domain.ports import EngineState, Holder
from tests.fakes.clock import FrozenClock
from tests.unit.app.db.rows import NOON, POLICY, fill

BIT = timedelta(microseconds=1)
FULL_DAY = timedelta(days=1)


def test_an_engine_is_taken_for_gone_after_ten_seconds(sqlite_engine: Engine) -> None:
    ten = timedelta(seconds=10)
    fill(sqlite_engine, tables.engine_versions, engine_id="e", address="http://e", digest="d", state="ready", seen_at=NOON)
    for later, there in ((ten, True), (ten + BIT, False)):
        ledger = SqlEngineLedger(sqlite_engine, clock=lambda at=NOON + later: at)
        assert (ledger.addresses("d") == ["http://e"]) is there
        assert (ledger.everywhere() == ["http://e"]) is there
        with reading(sqlite_engine) as connection:
            assert read_engines(connection, None, now=NOON + later)[0]["reports"] is there
    with reading(sqlite_engine) as connection:
        assert holds(connection, POLICY, "d", seen_since=NOON)
        assert not holds(connection, POLICY, "d", seen_since=NOON + BIT)


def test_what_an_engine_reported_within_an_hour_is_needed(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.engine_versions, digest="d", state="ready", seen_at=NOON)
    fill(sqlite_engine, tables.engine_versions, engine_id="gone", digest="dropped", state="dropped", seen_at=NOON)
    for later, needed in ((timedelta(hours=1), {"d"}), (timedelta(hours=1) + BIT, set[str]())):
        assert SqlNeededWeights(sqlite_engine, clock=lambda at=NOON + later: at).needed() == needed


def test_a_key_s_use_is_noted_once_a_minute_and_it_ends_when_it_was_said(sqlite_engine: Engine) -> None:
    clock = FrozenClock(NOON)
    keys = SqlKeys(sqlite_engine, clock=clock)
    assert not keys.ever()
    key, _ = keys.create(name="n", scopes=[Scope.ADMIN], expires_at=NOON + FULL_DAY)

    def noted_after(at: datetime) -> datetime | None:
        keys.note_used({key.id: at})
        return keys.history()[0].last_used_at

    minute = timedelta(minutes=1)
    assert noted_after(NOON) == NOON
    assert noted_after(NOON + minute - BIT) == NOON
    assert noted_after(NOON + minute) == NOON + minute
    for later, there in ((FULL_DAY - BIT, 1), (FULL_DAY, 0)):
        clock.now = NOON + later
        assert len(keys.all()) == there
    assert keys.ever()
    for _ in range(2):
        keys.revoke(key.prefix)
    with reading(sqlite_engine) as connection:
        acts = connection.execute(select(tables.audit.c.action, tables.audit.c.subject).order_by(tables.audit.c.seq)).all()
    assert [tuple(act) for act in acts] == [("key.created", key.prefix), ("key.revoked", key.prefix)]


def test_a_browser_session_ends_at_its_bounds_and_its_use_is_written_down_once_a_minute(sqlite_engine: Engine) -> None:
    clock = FrozenClock(NOON)
    people = SqlPeople(sqlite_engine, clock=clock)
    assert not people.ever()
    ada = people.add("ada", roles=[Role.ADMIN], by="system:test")
    assert people.ever()
    secret, minute, idle, lasts = people.enter(ada, how="password"), timedelta(minutes=1), timedelta(hours=2), timedelta(hours=12)

    def seen_after(later: timedelta) -> datetime | None:
        clock.now = NOON + later
        if people.of_session(secret) is None:
            return None
        with reading(sqlite_engine) as connection:
            return connection.execute(select(tables.browser_sessions.c.seen_at)).scalar_one()

    assert seen_after(minute) == NOON
    assert seen_after(minute + BIT) == NOON + minute + BIT
    assert seen_after(minute + idle) == NOON + minute + idle
    assert seen_after(minute + 2 * idle) is None, "two hours after it was seen"
    for hours in (2, 4, 6, 8, 10):
        with writing(sqlite_engine) as connection:
            connection.execute(tables.browser_sessions.update().values(seen_at=NOON + timedelta(hours=hours, minutes=1)))
    assert seen_after(lasts - BIT) == NOON + lasts - BIT
    assert seen_after(lasts) is None


def test_a_hand_in_a_credential_counts_after_the_moment_and_never_one_s_own(sqlite_engine: Engine) -> None:
    fill(sqlite_engine, tables.credential_acts, person="user:ada", made_by="user:bob", at=NOON)
    fill(sqlite_engine, tables.credential_acts, person="user:ada", made_by="user:ada", at=NOON)
    fill(sqlite_engine, tables.credential_acts, person="user:eve", made_by="user:mal", at=NOON)
    with reading(sqlite_engine) as connection:
        assert hands_of(connection, "user:ada", since=NOON - BIT) == {"user:bob"}
        assert hands_of(connection, "user:ada", since=NOON) == frozenset()


def test_a_locked_account_counts_no_tries_until_its_lock_ends(sqlite_engine: Engine) -> None:
    clock = FrozenClock(NOON)
    people = SqlPeople(sqlite_engine, clock=clock)
    people.add("ada", roles=[Role.ADMIN], by="system:test")
    asked: list[int] = []

    def lock_after(failures: int) -> datetime:
        asked.append(failures)
        return NOON + timedelta(minutes=1)

    locked: list[bool] = []
    for later in (timedelta(), timedelta(minutes=1) - BIT, timedelta(minutes=1)):
        clock.now = NOON + later
        attempt = people.attempt("ada", lock_after=lock_after)
        assert attempt is not None
        locked.append(attempt.locked)
    assert (locked, asked) == ([False, True, False], [1, 2])
    people.forgive(people.find("ada"))
    people.attempt("ada", lock_after=lock_after)
    assert asked == [1, 2, 1]
    assert people.attempt("nobody", lock_after=lock_after) is None


def test_what_is_done_to_people_stands_in_the_audit_chain_with_whose_hand_it_was(sqlite_engine: Engine) -> None:
    clock = FrozenClock(NOON)
    people = SqlPeople(sqlite_engine, clock=clock)
    people.add("ada", roles=[Role.ADMIN], email="A@x.de", by="user:root")
    people.add("bob", roles=[Role.VIEWER], by="user:root")
    people.accept(people.invite("bob", lasts=FULL_DAY, by="user:ada"), password_hash="h")
    people.change("bob", by="user:ada", email="b@x.de", disabled=False)
    people.set_password("bob", password_hash="h2")
    people.attempt("bob", lock_after=lambda _: None)
    people.failed("bob")
    people.enter(people.find("bob"), how="password")
    people.sign_out("bob", by="user:ada")
    people.change("bob", by="user:ada", disabled=True)
    with reading(sqlite_engine) as connection:
        a, c = tables.audit.c, tables.credential_acts.c
        acts = connection.execute(select(a.action, a.subject, a.actor).order_by(a.seq)).all()
        hands = connection.execute(select(c.person, c.what, c.made_by).order_by(c.seq)).all()
    assert [tuple(act) for act in acts] == [
        ("person.added", "ada", "user:root"), ("person.email_made", "ada", "user:root"), ("person.added", "bob", "user:root"),
        ("person.link_made", "bob", "user:ada"), ("person.password_made", "bob", "user:ada"), ("person.changed", "bob", "user:ada"),
        ("person.email_made", "bob", "user:ada"), ("person.password_made", "bob", "user:bob"),
        ("person.sign_in_failed", "bob", "system:access"), ("person.signed_in", "bob", "user:bob"),
        ("person.signed_out", "bob", "user:ada"),
        ("person.changed", "bob", "user:ada"),
    ]  # fmt: skip
    assert [tuple(hand) for hand in hands] == [
        ("user:ada", "email", "user:root"), ("user:bob", "link", "user:ada"), ("user:bob", "password", "user:ada"),
        ("user:bob", "email", "user:ada"), ("user:bob", "password", "user:bob"),
    ]  # fmt: skip


def test_an_engine_s_row_is_its_own_and_goes_with_it(sqlite_engine: Engine) -> None:
    clock = FrozenClock(NOON)
    one, two = (SqlEngineLedger(sqlite_engine, engine_id=name, address=f"http://{name}", clock=clock) for name in "12")
    for state in (EngineState.LOADING, EngineState.READY, EngineState.READY):
        one.report(POLICY, "d", state, "slow")
        clock.advance(1)
    two.report(POLICY, "d", EngineState.READY)
    with reading(sqlite_engine) as connection:
        row = connection.execute(select(tables.engine_versions).where(tables.engine_versions.c.engine_id == "1")).one()
    assert (row.changed_at, row.seen_at, row.detail) == (NOON + timedelta(seconds=1), NOON + timedelta(seconds=2), "slow")
    assert two.holders("d") == {"http://2": Holder(), "http://1": Holder(doubt="slow")}, "the most recently heard of first"
    two.forget()
    assert two.everywhere() == ["http://1"]
