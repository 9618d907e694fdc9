"""The evidence book on both databases: sessions with their turn, first label and timely signals."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, insert, update

from app.db.engine import writing
from app.db.learning.suite_scores import SqlScores
from app.db.release.evidence import SqlEvidenceBook
from app.db.tables import labels, observations
from app.domain.errors import NotFound
from app.domain.release.gates import GateName, Verdict
from app.domain.release.releases import ReleaseState
from pipelines.evaluation.counting.evidence import unpacked
from tests.fakes.releases import POLICY, answer, version
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import WatchedRoom, watched_room


@pytest.fixture
def world(engine: Engine) -> WatchedRoom:
    return watched_room(engine)


def test_a_canary_runs_on_this_database_and_its_evidence_is_kept(world: WatchedRoom, engine: Engine) -> None:
    release = world.queue("v2", Behaviour(fault=0.5))
    ended = world.run(release, until=frozenset({ReleaseState.ABORTED}), rounds=20)
    assert ended.state is ReleaseState.ABORTED
    book = SqlEvidenceBook(engine)
    last = book.decisions(release.id)[-1]
    assert last["action"] == "abort"
    assert unpacked(book.kept(last["evidence_hash"])).release_id == release.id
    with pytest.raises(NotFound):
        book.kept("0" * 64)


def test_late_observations_and_later_labels_change_nothing(world: WatchedRoom, engine: Engine) -> None:
    book, since = SqlEvidenceBook(engine), world.room.clock.now - timedelta(days=1)
    before = book.history(POLICY, "v1", since=since)
    quiet = next(s for s in before if not s.signals)
    late = {
        "source": "api", "id": "late", "policy": POLICY, "inference_id": quiet.inference_id, "episode_id": None, "name": "task_success",
        "value": True, "occurred_at": quiet.exposed_at, "received_at": quiet.exposed_at + timedelta(hours=1), "actor": None, "tags": {},
        "status": "late",
    }  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(observations), [late])
        connection.execute(update(labels).where(labels.c.inference_id == quiet.inference_id).values(current=False))
        row = {
            "inference_id": quiet.inference_id, "revision": 2, "current": True, "policy": POLICY, "version": "v1", "reward": 1.0,
            "terms": [], "rule_set": "rules", "exclusion": None, "segment": "", "actor": quiet.actor, "held_out": False,
            "finished_at": quiet.exposed_at, "labelled_at": quiet.exposed_at + timedelta(hours=1),
        }  # fmt: skip
        connection.execute(insert(labels), [row])
    assert book.history(POLICY, "v1", since=since) == before


def test_people_per_window_are_counted_once_in_each(world: WatchedRoom, engine: Engine) -> None:
    book, now = SqlEvidenceBook(engine), world.room.clock.now
    # five hundred people, each once, within one minute; asked for windows of half a minute: 250 in each
    found = book.units_in(POLICY, window=timedelta(seconds=30), since=now - timedelta(days=7), now=now)
    assert found == pytest.approx(250, rel=0.05)
    assert book.units_in("nobody", window=timedelta(seconds=30), since=now - timedelta(days=7), now=now) == 0.0


def test_the_newest_sessions_are_read_in_order(world: WatchedRoom, engine: Engine) -> None:
    since = world.room.clock.now - timedelta(days=1)
    found = SqlEvidenceBook(engine).history(POLICY, "v1", since=since, newest=10)
    assert [s.actor for s in found] == [f"person-{n}" for n in range(491, 501)]


def test_labels_that_are_overdue_are_a_lag(world: WatchedRoom, engine: Engine) -> None:
    book = SqlEvidenceBook(engine)
    assert book.lag_s(POLICY, now=world.room.clock.now) == 0.0
    world.traffic.delivered = False
    world.traffic.serve(1)
    world.room.clock.advance(100)
    assert book.lag_s(POLICY, now=world.room.clock.now) == pytest.approx(155.0, abs=61.0)


def test_scores_of_a_version_belong_to_one_suite_and_the_first_ones_stay(engine: Engine) -> None:
    scores, now = SqlScores(engine), datetime(2026, 11, 21, tzinfo=UTC)
    scores.save("v2", "human-eval", [[1.0, 0.0]], at=now)
    scores.save("v2", "human-eval", [[0.0, 0.0]], at=now)
    scores.save("v2", "ours", [[0.5]], at=now)
    assert [scores.find("v2", suite) for suite in ("human-eval", "ours", "another")] == [[[1.0, 0.0]], [[0.5]], None]
    assert scores.find("v3", "ours") is None


def test_the_candidates_that_a_suite_judged_this_month_are_known_with_their_level(world: WatchedRoom, engine: Engine) -> None:
    room, scores = world.room, SqlScores(engine)
    for digest, level, passed in (("v2", 0.05, True), ("v3", None, False), ("v4", 0.04, False)):
        release = room.desk.open(version(digest), initiator="system:loop")
        evidence = {"human-eval": {"level": level, "passed": passed}, "sandbox": "none"}
        room.desk.record(room.desk.start_offline(release.id).id, replace(answer(GateName.OFFLINE, digest), evidence=evidence))
    since = room.clock.now - timedelta(days=30)
    assert scores.tested(POLICY, "human-eval", gate=GateName.OFFLINE, since=since) == [(0.05, True), (0.04, False)]  # refused: no test
    assert scores.tested(POLICY, "another", gate=GateName.OFFLINE, since=since) == []
    assert scores.tested("other", "human-eval", gate=GateName.OFFLINE, since=since) == []


def test_the_champions_comparisons_with_itself_are_added_up_over_the_verdicts_of_a_gate(world: WatchedRoom, engine: Engine) -> None:
    """They were looked for under a gate of another name, so each verdict stood alone."""
    desk, book = world.room.desk, SqlEvidenceBook(engine)

    def judged(digest: str, gate: GateName, alarms: int, comparisons: int) -> str:
        release = next((r for r in world.room.ledger.list(policy=POLICY) if r.digest == digest), None) or world.room.queued(digest)
        found = replace(answer(gate, digest, Verdict.INCONCLUSIVE), evidence={"live_aa": {"alarms": alarms, "comparisons": comparisons}})
        desk.record_live(release.id, found, action="continue")
        return release.id

    first = judged("v2", GateName.CANARY, 5, 20)
    assert judged("v2", GateName.CANARY, 1, 20) == first, "the newest verdict of a release counts"
    second = judged("v3", GateName.CANARY, 2, 10)
    judged("v3", GateName.HOLDBACK, 0, 7)
    assert book.false_alarms(POLICY, besides="nobody") == (3, 30)
    assert book.false_alarms(POLICY, besides=second) == (1, 20)
    assert book.false_alarms(POLICY, besides=first, gate=GateName.HOLDBACK) == (0, 7)
    assert book.false_alarms("another", besides="nobody") == (0, 0)
