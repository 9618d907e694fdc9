"""What the live gates read, at the moments where it begins and ends; where traffic goes, and what the history says of it."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from app.db import tables
from app.db.engine import reading, writing
from app.db.release.engine_reads import read_engines
from app.db.release.evidence import SqlEvidenceBook
from app.db.release.pointer import (
    SqlRoutes,
    candidates_of,
    champion_moved_since,
    deployed_at,
    good_versions,
    moves_since,
    read_route,
    versions_by_role,
    wanted_versions,
)
from app.db.release.releases import SqlReleaseLedger
from app.domain.errors import NotFound, Unavailable
from app.domain.release.releases import ReleaseState
from app.domain.release.sessions import Era
from tests.unit.app.db.rows import NOON, POLICY, fill

BIT = timedelta(microseconds=1)
MINUTE = timedelta(minutes=1)


def expose(engine: Engine, *moments: datetime, **given: Any) -> None:
    """Somebody was served at each of them, by `v1` as champion unless it is said otherwise; each is named by its place."""
    plain: dict[str, Any] = {"digest": "v1", "arm": "champion", "stage": "champion", "holdback": 0.0}
    prefix = given.pop("name", "t")
    fill(
        engine, tables.exposures, len(moments), occurred_at=lambda n: moments[n], id=lambda n: f"{prefix}-{n}",
        inference_id=lambda n: f"{prefix}-{n}", **plain | given,
    )  # fmt: skip


def era(**changes: Any) -> Era:
    given: dict[str, Any] = {
        "generation": 1, "since": NOON, "until": None, "champion": "v1", "reference": "v0", "holdback": 0.0, "anchor": "v0",
        "action": "promote", "release_id": None,
    }  # fmt: skip
    return Era(**given | changes)


def test_a_canary_s_sessions_are_its_own_from_a_moment_on(sqlite_engine: Engine) -> None:
    book = SqlEvidenceBook(sqlite_engine)
    expose(sqlite_engine, NOON, NOON + BIT, NOON + MINUTE, release_id="r", stage="canary-0")
    expose(sqlite_engine, NOON, release_id="r", name="champion")
    expose(sqlite_engine, NOON, release_id="other", stage="canary-0", name="other")
    assert [s.inference_id for s in book.canary_sessions("r")] == ["t-0", "t-1", "t-2"]
    assert [s.inference_id for s in book.canary_sessions("r", since=NOON + BIT)] == ["t-1", "t-2"]
    assert [s.inference_id for s in book.sessions_of(["t-2", "t-0", "gone"])] == ["t-0", "t-2"]


def test_an_era_begins_at_its_moment_and_ends_before_the_next(sqlite_engine: Engine) -> None:
    book, ends = SqlEvidenceBook(sqlite_engine), NOON + MINUTE
    expose(sqlite_engine, NOON - BIT, NOON, ends - BIT, ends)
    expose(sqlite_engine, NOON, NOON, NOON, name="previous", digest="v0", arm="previous")
    expose(sqlite_engine, NOON, name="candidate", arm="candidate")
    expose(sqlite_engine, NOON, name="other-share", holdback=0.5)
    expose(sqlite_engine, NOON, name="third", digest="v9")
    names = ["previous-0", "previous-1", "previous-2", "t-1", "t-2"]
    assert sorted(s.inference_id for s in book.era_sessions(POLICY, era(until=ends))) == names
    assert sorted(s.inference_id for s in book.era_sessions(POLICY, era())) == [*names, "t-3"]
    assert [s.inference_id for s in book.era_sessions(POLICY, era(), since=NOON + BIT)] == ["t-2", "t-3"]
    assert len(book.era_sessions(POLICY, era(until=ends), since=NOON - MINUTE)) == 5, "an era never begins before itself"
    assert [s.inference_id for s in book.era_sessions(POLICY, era(reference=None), since=NOON + BIT)] == ["t-2", "t-3"]


def test_a_version_s_newest_sessions_before_a_moment_are_its_history(sqlite_engine: Engine) -> None:
    book = SqlEvidenceBook(sqlite_engine)
    expose(sqlite_engine, *(NOON + n * MINUTE for n in range(5)))

    def shown(**asked: Any) -> list[str]:
        return [s.inference_id for s in book.history(POLICY, "v1", **{"since": NOON, **asked})]

    assert shown() == [f"t-{n}" for n in range(5)]
    assert shown(since=NOON + BIT) == ["t-1", "t-2", "t-3", "t-4"]
    assert shown(until=NOON + 4 * MINUTE) == ["t-0", "t-1", "t-2", "t-3"]
    assert shown(until=NOON + 4 * MINUTE + BIT) == [f"t-{n}" for n in range(5)]
    assert shown(newest=3) == ["t-2", "t-3", "t-4"]
    assert shown(newest=5) == [f"t-{n}" for n in range(5)]
    assert shown(newest=4) == ["t-1", "t-2", "t-3", "t-4"]


def test_people_are_counted_once_in_each_window_over_the_time_with_traffic(sqlite_engine: Engine) -> None:
    """Windows of a minute: ada in two of them, bob in one, in the two minutes since the first of them; 3 / 2."""
    book = SqlEvidenceBook(sqlite_engine)
    expose(sqlite_engine, NOON, NOON + timedelta(seconds=59), NOON + MINUTE, actor="ada")
    expose(sqlite_engine, NOON + timedelta(seconds=59), name="bob", actor="bob")
    asked = {"window": MINUTE, "since": NOON}
    assert book.units_in(POLICY, now=NOON + 2 * MINUTE, **asked) == 1.5
    assert book.units_in(POLICY, now=NOON + 4 * MINUTE, **asked) == 0.75
    assert book.units_in(POLICY, now=NOON + timedelta(seconds=59), **asked) == 2.0, "less than a window counts as one"
    assert book.units_in(POLICY, now=NOON + timedelta(seconds=58), **asked) == 1.0, "what is yet to come does not count"
    assert book.units_in(POLICY, now=NOON, **asked) == 1.0
    assert book.units_in(POLICY, now=NOON + 2 * MINUTE, window=MINUTE, since=NOON + MINUTE) == 1.0
    assert book.units_in(POLICY, now=NOON + 2 * MINUTE, window=MINUTE, since=NOON + MINUTE + BIT) == 0.0
    assert book.units_in(POLICY, now=NOON + 2 * MINUTE, window=timedelta(hours=1), since=NOON) == 2.0


@pytest.mark.parametrize(("hours", "people"), [(2, 25), (12, 150), (24, 300), (54, 300), (96, 300), (168, 300), (240, 300)])
def test_people_who_come_every_day_are_counted_once_however_the_clock_cuts_the_week(sqlite_engine: Engine, hours: int, people: int) -> None:
    book, day = SqlEvidenceBook(sqlite_engine), timedelta(days=1)
    for person in range(300):
        at = NOON + person * day / 300
        expose(sqlite_engine, *(at + n * day for n in range(7)), name=f"p{person}", actor=f"p{person}")
    assert book.units_in(POLICY, window=timedelta(hours=hours), since=NOON, now=NOON + 7 * day) == people


@pytest.mark.parametrize("minutes", [10, 11, 19, 20, 1440])
def test_people_who_came_once_all_count_however_long_ago_that_was(sqlite_engine: Engine, minutes: int) -> None:
    """Sixty people in the first minute and nobody since. The run length of the anchor's detector rests on them: it fell to nothing after a
    pause where people of a rest that makes no whole window were left out, and equal champions were found worse within minutes."""
    expose(sqlite_engine, *(NOON + timedelta(seconds=n) for n in range(60)), actor=lambda n: f"p{n}")
    found = SqlEvidenceBook(sqlite_engine).units_in(POLICY, window=10 * MINUTE, since=NOON, now=NOON + minutes * MINUTE)
    assert found == pytest.approx(60 * 10 / minutes)


def test_a_label_is_waited_for_as_long_as_the_newest_turn_says_and_overdue_from_its_moment(sqlite_engine: Engine) -> None:
    book, hour = SqlEvidenceBook(sqlite_engine), timedelta(hours=1)
    assert book.label_wait_s(POLICY) == 0.0
    assert book.lag_s(POLICY, now=NOON) == 0.0
    turn = {"tool_calls": [], "finished_at": NOON}
    fill(sqlite_engine, tables.turns, inference_id="a", label_due_at=NOON + hour, **turn)
    fill(sqlite_engine, tables.turns, inference_id="b", label_due_at=NOON + 2 * hour, **turn)
    fill(sqlite_engine, tables.turns, inference_id="c", label_due_at=NOON, labelled_at=NOON, **turn)
    fill(sqlite_engine, tables.turns, inference_id="d", label_due_at=NOON, policy="tab", **turn)
    assert book.label_wait_s(POLICY) == 7_200.0
    assert [book.lag_s(POLICY, now=NOON + n * hour) for n in (0, 1, 2)] == [0.0, 0.0, 3_600.0]


def test_an_engine_s_failure_is_told_where_no_other_holds_the_version(sqlite_engine: Engine) -> None:
    book = SqlEvidenceBook(sqlite_engine)
    row = {"digest": "v1", "seen_at": NOON}
    fill(sqlite_engine, tables.engine_versions, engine_id="e", state="failed", detail="too large", **row)
    assert book.engine_failure(POLICY, "v1", seen_since=NOON) == "e cannot load it: too large"
    assert book.engine_failure(POLICY, "v1", seen_since=NOON + BIT) is None
    assert book.engine_failure(POLICY, "v2", seen_since=NOON) is None
    assert book.engine_failure("tab", "v1", seen_since=NOON) is None
    fill(sqlite_engine, tables.engine_versions, engine_id="f", state="ready", **row)
    assert book.engine_failure(POLICY, "v1", seen_since=NOON) is None
    assert book.engines_ready(POLICY, "v1", seen_since=NOON)


def history(engine: Engine, *moves: tuple[str, str]) -> None:
    """(action, digest), a minute after each other; what was live before is the previous one."""
    fill(
        engine, tables.deployment_history, len(moves), generation=lambda n: n + 1, action=lambda n: moves[n][0],
        digest=lambda n: moves[n][1], previous=lambda n: moves[n - 1][1] if n else None, occurred_at=lambda n: NOON + n * MINUTE,
        good=True, holdback=0.0, actor="user:ada",
    )  # fmt: skip


def test_every_stretch_of_the_history_ends_where_the_next_begins(sqlite_engine: Engine) -> None:
    history(sqlite_engine, ("bootstrap", "v1"), ("promote", "v2"), ("holdback", "v2"))
    book = SqlEvidenceBook(sqlite_engine)
    assert [(e.generation, e.champion, e.reference, e.since, e.until) for e in book.eras(POLICY)] == [
        (1, "v1", None, NOON, NOON + MINUTE), (2, "v2", "v1", NOON + MINUTE, NOON + 2 * MINUTE), (3, "v2", "v2", NOON + 2 * MINUTE, None),
    ]  # fmt: skip
    assert book.promoted_at(POLICY) == NOON + MINUTE, "a moved holdback promotes nobody"
    assert book.promoted_at("tab") is None
    with reading(sqlite_engine) as connection:
        assert [champion_moved_since(connection, POLICY, n) for n in (0, 1, 2)] == [True, True, False]
        assert good_versions(connection, POLICY) == ["v2", "v1"]
        assert deployed_at(connection, POLICY, 2) == NOON + MINUTE
        assert moves_since(connection, POLICY, 2) == ["holdback of v2 by user:ada at 2026-11-21 12:02:00 UTC"]


def release(engine: Engine, digest: str, state: str, *, stage: int | None = 0, minute: int = 0, champion: str = "v1") -> None:
    fill(
        engine, tables.releases, id=f"r-{digest}", digest=digest, state=state, stage=stage, champion_digest=champion,
        config={"stages": [0.05, 0.25], "lasting": 0.5}, changed_at=NOON + minute * MINUTE,
    )  # fmt: skip


def deploy(engine: Engine, **changes: Any) -> None:
    fill(engine, tables.deployment_pointer, **{"digest": "v1", "holdback": 0.0, "anchor": "v0", "generation": 1, **changes})


def test_candidates_with_traffic_come_first_and_then_the_newest(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine, previous="v0", holdback_digest="vh")
    for digest, state, minute in (("q1", "QUEUED", 1), ("q2", "OFFLINE", 2), ("p", "PROMOTING", 0), ("c", "CANARY", 0), ("r", "READY", 9)):
        release(sqlite_engine, digest, state, minute=minute)
    release(sqlite_engine, "over", "ABORTED")
    with reading(sqlite_engine) as connection:
        assert [row.digest for row in candidates_of(connection, POLICY)] == ["c", "p", "r", "q2", "q1"]
        assert versions_by_role(connection, POLICY) == {
            "champion": ["v1"], "candidate": ["c", "p", "r", "q2", "q1"], "previous": ["vh", "v0"], "held": [],
        }  # fmt: skip
        wanted = wanted_versions(connection)
    assert wanted == {(POLICY, digest) for digest in ("v1", "v0", "vh", "c", "p", "r", "q1", "q2")}


@pytest.mark.parametrize(("stage", "share"), [(0, 0.05), (1, 0.25)])
def test_a_canary_gets_the_share_of_its_stage(sqlite_engine: Engine, stage: int, share: float) -> None:
    deploy(sqlite_engine)
    release(sqlite_engine, "c", "CANARY", stage=stage)
    with reading(sqlite_engine) as connection:
        route = read_route(connection, POLICY)
    assert route is not None
    assert (route.canary_digest, route.canary_stage, route.canary_share, route.canary_lasting) == ("c", stage, share, 0.5)
    assert route.coming == "c"


def test_what_people_judged_and_what_is_compared_with_another_champion_gets_no_traffic(sqlite_engine: Engine) -> None:
    deploy(sqlite_engine)
    release(sqlite_engine, "judged", "READY", stage=None)
    release(sqlite_engine, "v1", "QUEUED")
    with reading(sqlite_engine) as connection:
        route = read_route(connection, POLICY)
        assert read_route(connection, "tab") is None
    assert route is not None
    assert (route.canary_digest, route.coming) == (None, "judged")


def test_a_route_is_good_for_as_long_as_it_is_said_and_a_version_that_is_known_stays_known(sqlite_engine: Engine) -> None:
    routes = SqlRoutes(sqlite_engine, max_age_s=3_600.0)
    with pytest.raises(Unavailable, match="nothing is deployed"):
        routes.route(POLICY)
    deploy(sqlite_engine)
    assert routes.route(POLICY).pointer.digest == "v1"
    assert not routes.knows(POLICY, "v1")
    fill(sqlite_engine, tables.versions, digest="v1")
    assert routes.knows(POLICY, "v1")
    assert not routes.knows("tab", "v1")
    with writing(sqlite_engine) as connection:
        connection.execute(tables.versions.delete())
        connection.execute(tables.deployment_pointer.update().values(digest="v2"))
    assert routes.knows(POLICY, "v1")
    assert routes.route(POLICY).pointer.digest == "v1"
    assert SqlRoutes(sqlite_engine, max_age_s=0.0).route(POLICY).pointer.digest == "v2"


@pytest.mark.parametrize(
    ("held", "champions", "seconds"),
    [("v3", 0, 30.0), ("v2", 1, 300.0), ("v1", 2, 300.0), ("v9", None, 300.0)],
)
def test_an_engine_is_so_many_champions_behind_as_were_promoted_since_the_newest_it_holds(
    sqlite_engine: Engine, held: str, champions: int | None, seconds: float
) -> None:
    history(sqlite_engine, ("bootstrap", "v1"), ("promote", "v2"), ("holdback", "v2"), ("promote", "v3"))
    deploy(sqlite_engine, digest="v3", changed_at=NOON)
    fill(sqlite_engine, tables.engine_versions, digest=held, state="ready", changed_at=NOON + timedelta(seconds=30), seen_at=NOON)
    if held != "v3":
        fill(sqlite_engine, tables.engine_versions, digest="v3", state="loading", seen_at=NOON)
    with reading(sqlite_engine) as connection:
        (engine,) = read_engines(connection, POLICY, now=NOON + timedelta(seconds=300))
    assert engine["lag"] == {"champions": champions, "seconds": seconds}


def test_rollbacks_are_counted_within_the_window_and_by_whom(sqlite_engine: Engine) -> None:
    history(sqlite_engine, ("bootstrap", "v1"), ("rollback", "v0"))
    deploy(sqlite_engine)
    ledger = SqlReleaseLedger(sqlite_engine, clock=lambda: NOON + 10 * MINUTE)
    with ledger.transaction(POLICY) as tx:
        assert tx.rollbacks_within(9 * MINUTE) == 0, "at its very beginning is before it"
        assert tx.rollbacks_within(9 * MINUTE + BIT) == 1
        assert tx.rollbacks_within(9 * MINUTE + BIT, automatic=True) == 0, "somebody did it"
        assert not tx.rolled_back_automatically()
    with writing(sqlite_engine) as connection:
        connection.execute(tables.deployment_history.update().values(actor="system:watch"))
    with ledger.transaction(POLICY) as tx:
        assert tx.rollbacks_within(9 * MINUTE + BIT, automatic=True) == 1
        assert tx.rolled_back_automatically()
        assert tx.releases(states={ReleaseState.CANARY}) == []


@pytest.mark.parametrize(
    ("received", "retracted", "counts"),
    [
        (MINUTE, None, True), (MINUTE + BIT, None, False), (MINUTE, MINUTE, False), (MINUTE, MINUTE + BIT, True), (timedelta(), BIT, False),
    ],
)  # fmt: skip
def test_what_is_known_when_the_label_is_due_counts_unless_it_was_taken_back_by_then(
    sqlite_engine: Engine, received: timedelta, retracted: timedelta | None, *, counts: bool
) -> None:
    expose(sqlite_engine, NOON, release_id="r", stage="canary-0")
    fill(sqlite_engine, tables.turns, inference_id="t-0", tool_calls=[], label_due_at=NOON + MINUTE)
    fill(
        sqlite_engine, tables.observations, inference_id="t-0", name="task_success", value=True, status="joined",
        received_at=NOON + received, retracted_at=None if retracted is None else NOON + retracted,
    )  # fmt: skip
    (session,) = SqlEvidenceBook(sqlite_engine).canary_sessions("r")
    assert (session.signals or {}) == ({"task_success": True} if counts else {})


def test_what_is_said_of_a_turn_itself_goes_before_what_is_said_of_its_conversation_and_the_newest_counts(sqlite_engine: Engine) -> None:
    expose(sqlite_engine, NOON, NOON + BIT, release_id="r", stage="canary-0", episode_id="e")
    fill(sqlite_engine, tables.turns, 2, inference_id=lambda n: f"t-{n}", episode_id="e", tool_calls=[], label_due_at=NOON + MINUTE)
    said: list[dict[str, Any]] = [
        {"inference_id": "t-0", "value": 1.0}, {"inference_id": "t-0", "value": 2.0}, {"episode_id": "e", "value": 9.0},
    ]  # fmt: skip
    for n, one in enumerate(said):
        fill(
            sqlite_engine,
            tables.observations,
            id=f"o{n}",
            name="rating",
            status="joined",
            occurred_at=NOON + n * BIT,
            received_at=NOON,
            **one,
        )
    found = {session.inference_id: session.signals for session in SqlEvidenceBook(sqlite_engine).canary_sessions("r")}
    assert found == {"t-0": {"rating": 2.0}, "t-1": {"rating": 9.0}}


def test_evidence_is_kept_once_by_its_content(sqlite_engine: Engine) -> None:
    book = SqlEvidenceBook(sqlite_engine)
    for payload in (b"first", b"second"):
        book.keep("r", "hash", payload, now=NOON)
    book.keep("r", "other", b"other", now=NOON)
    assert (book.kept("hash"), book.kept("other")) == (b"first", b"other")
    with pytest.raises(NotFound):
        book.kept("nothing")
