"""A product too small for any canary: people judge blind, nobody is served before the promotion, a long holdback after it."""

import random
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import pytest
from sqlalchemy import Engine, insert, update

from app.db.engine import open_engine, reading, writing
from app.db.release.evidence import SqlEvidenceBook
from app.db.release.pairs import SqlPairs
from app.db.release.pointer import read_route
from app.db.release.release_views import SqlReleaseViews
from app.db.tables import credential_acts, gate_results
from app.domain.errors import DoneAlready, Refused, StaleGeneration
from app.domain.release.by_people import BY_PEOPLE, PeopleTerms
from app.domain.release.gates import CanaryAction, GateName
from app.domain.release.pairs import BlindPair, BlindVote, Choice
from app.domain.release.releases import Release, ReleaseState
from app.release.jury import ReleaseJury
from pipelines.evaluation.live.explain import explain
from tests.fakes.console import browser
from tests.fakes.releases import ADA, BOB, EVE, POLICY, answer
from tests.fakes.traffic import Behaviour
from tests.fakes.watching import WatchedRoom, small_gates, watched_room

S = ReleaseState
PEOPLE = PeopleTerms(enabled=True, votes=20, judges=2, longest_s=86_400.0, holdback=0.2, holdback_s=864_000.0)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    opened = open_engine(database_url)
    yield opened
    opened.dispose()


def small(engine: Engine, *, people: PeopleTerms = PEOPLE) -> WatchedRoom:
    """A product whose five hundred people of a week cannot show a tenth of a point in any canary."""
    config = small_gates(min_power=0.6, canary_max_s=60.0, canary_longest_s=120.0, people=people)
    return watched_room(engine, config=config)


def keep(engine: Engine, release: Release, *, pairs: int = 40) -> None:
    SqlPairs(engine).keep(
        [
            BlindPair(
                id=f"{release.digest}-{n:03}", release_id=release.id, policy=POLICY, suite="s", task=f"t{n}", cluster="", messages=[],
                champion_answer="old", candidate_answer="new", champion_score=0.0, candidate_score=0.0, salt=str(n),
            )
            for n in range(pairs)
        ],
        at=release.created_at,
    )  # fmt: skip


def say(room: WatchedRoom, release: Release, numbers: range, *, by: str, better: str = "candidate", proven: bool = True) -> None:
    jury, kept = ReleaseJury(room.room.ledger), {pair.id: pair for pair in SqlPairs(room.traffic.engine).of(release.id)}
    for n in numbers:
        pair = kept[f"{release.digest}-{n:03}"]
        left = pair.candidate_is_left(by) is (better == "candidate")
        jury.vote(release.id, pair.id, Choice.LEFT if left else Choice.RIGHT, voter=by, shown_to=by, proven=proven)
        room.room.clock.advance(1.0)


def judging(engine: Engine, room: WatchedRoom, *, pairs: int = 40) -> Release:
    release = room.queue("v2", Behaviour())
    keep(engine, release, pairs=pairs)
    room.watch.tick()
    return room.room.desk.find(release.id)


def route(engine: Engine) -> str | None:
    with reading(engine) as connection:
        found = read_route(connection, POLICY)
    assert found is not None
    return found.canary_digest


def test_the_whole_way_to_the_top_without_anybody_served(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    assert release.state is S.JUDGING
    assert (release.reason or "").startswith(BY_PEOPLE)
    say(room, release, range(12), by=ADA)
    room.watch.tick()
    assert room.room.desk.find(release.id).state is S.JUDGING, "twelve votes of one person are not twenty of two"
    say(room, release, range(12, 24), by=BOB)
    room.watch.tick()
    ready = room.room.desk.find(release.id)
    assert ready.state is S.READY
    assert route(engine) is None, "nobody is served by what people judged before it is promoted"
    with pytest.raises(Refused, match="no more votes"):
        say(room, release, range(30, 31), by=EVE, better="champion")
    room.watch.tick()
    assert room.room.desk.find(release.id).state is S.READY, "no canary's doubts about it: there was none"
    room.room.desk.approve(release.id, approver=EVE, evidence=ready.evidence_digest or "")
    room.watch.tick()
    champion, pointer = room.room.desk.find(release.id), room.room.desk.pointer(POLICY)
    assert (champion.state, pointer.digest, pointer.previous, pointer.holdback) == (S.CHAMPION, "v2", "v1", 0.2)
    assert BY_PEOPLE in (champion.reason or "")


def test_the_holdback_after_it_is_the_long_one(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    say(room, release, range(12), by=ADA)
    say(room, release, range(12, 24), by=BOB)
    room.watch.tick()
    room.room.desk.approve(release.id, approver=EVE, evidence=room.room.desk.find(release.id).evidence_digest or "")
    room.watch.tick()
    room.room.clock.now += timedelta(seconds=room.config.holdback_s + 1)
    room.watch.tick()
    assert room.room.desk.pointer(POLICY).holdback == 0.2, "an hour is over, and thirty days are not"
    room.room.clock.now += timedelta(seconds=PEOPLE.holdback_s)
    room.watch.tick()
    assert room.room.desk.pointer(POLICY).holdback < 0.2


def test_it_says_what_it_is_on_its_pages_in_what_is_read_of_it_and_in_the_chain(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    pages = browser(engine, room.room.desk)
    assert BY_PEOPLE in pages.get("/console").text
    assert "judged by people, not by traffic" in pages.get(f"/console/releases/{release.id}").text.lower()
    say(room, release, range(12), by=ADA)
    say(room, release, range(12, 24), by=BOB)
    room.watch.tick()
    assert f"Passed by people&#39;s blind votes, {BY_PEOPLE}" in pages.get(f"/console/releases/{release.id}").text
    views = SqlReleaseViews(engine)
    assert views.release(release.id)["judged_by"] == BY_PEOPLE
    told = [entry.detail.get("reason") or "" for entry in views.audit(subject=release.id)]
    assert sum(BY_PEOPLE in reason for reason in told) >= 2
    book = SqlEvidenceBook(engine)
    again = [one for one in explain(room.room.desk.find(release.id), book) if one.gate == GateName.PEOPLE]
    assert [(one.verdict, one.replayed, one.differences) for one in again] == [("pass", True, ())]
    with writing(engine) as connection:
        kept = {**again[0].numbers, "said": ["candidate"] * 40}
        connection.execute(update(gate_results).where(gate_results.c.gate == GateName.PEOPLE).values(evidence=kept))
    changed = [one for one in explain(room.room.desk.find(release.id), book) if one.gate == GateName.PEOPLE]
    assert changed[0].differences


def test_without_votes_it_ends_and_the_champion_stays(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    room.room.clock.now += timedelta(seconds=PEOPLE.longest_s)
    room.watch.tick()
    found = room.room.desk.find(release.id)
    assert (found.state, room.room.desk.pointer(POLICY).digest) == (S.INCONCLUSIVE, "v1")
    assert "nobody has voted" in (found.reason or "")


def test_people_who_favour_the_champion_end_it(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    say(room, release, range(20), by=ADA, better="champion")
    room.watch.tick()
    assert room.room.desk.find(release.id).state is S.REJECTED


def test_one_person_or_many_whom_nothing_proves_are_not_two(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    say(room, release, range(30), by=ADA)
    assert sum(vote.counted for vote in _votes(room, release)) == 20, "half of forty pairs is her part"
    say(room, release, range(30, 35), by=BOB, proven=False)
    say(room, release, range(35, 40), by=EVE, proven=False)
    room.watch.tick()
    assert room.room.desk.find(release.id).state is S.JUDGING


@pytest.mark.parametrize(("made_by", "state"), [(None, S.READY), (ADA, S.JUDGING), (EVE, S.READY)])
def test_two_of_whom_one_made_the_other_s_credential_today_are_one(engine: Engine, made_by: str | None, state: ReleaseState) -> None:
    room = small(engine)
    release = judging(engine, room)
    if made_by is not None:
        with writing(engine) as connection:
            connection.execute(insert(credential_acts).values(person=BOB, made_by=made_by, what="password", at=room.room.clock.now))
    say(room, release, range(12), by=ADA)
    say(room, release, range(12, 24), by=BOB)
    room.watch.tick()
    assert room.room.desk.find(release.id).state is state


def _votes(room: WatchedRoom, release: Release) -> list[BlindVote]:
    with room.room.ledger.transaction(POLICY) as tx:
        return list(tx.votes(release.id))


def test_what_people_could_not_judge_ends_at_once(engine: Engine) -> None:
    room = small(engine)
    few = judging(engine, room, pairs=19)
    assert few.state is S.INCONCLUSIVE
    assert "19 pairs were kept where 20 votes are needed" in (few.reason or "")
    other = room.room.approved("v4")
    stale = room.queue("v3", Behaviour())
    keep(engine, stale)
    room.room.desk.promote(room.room.desk.begin_promotion(other.id).id)
    room.watch.tick()
    assert room.room.desk.find(stale.id).state is S.INCONCLUSIVE
    assert "no longer the champion" in (room.room.desk.find(stale.id).reason or "")


def test_as_many_pairs_as_votes_are_needed_are_enough(sqlite_engine: Engine) -> None:
    assert judging(sqlite_engine, small(sqlite_engine), pairs=20).state is S.JUDGING


def test_without_the_setting_such_a_release_is_refused_as_before(engine: Engine) -> None:
    room = small(engine, people=PeopleTerms())
    assert judging(engine, room).state is S.REJECTED


def test_a_pass_of_a_canary_is_none_of_people_s_and_the_other_way_round(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    with pytest.raises(Refused):
        room.room.desk.start_canary(release.id)
    room.room.desk.record(release.id, answer(GateName.CANARY, "v2"))
    with pytest.raises(Refused, match="JUDGING"):
        room.room.desk.mark_ready(release.id, answer(GateName.CANARY, "v2"))
    room.watch.tick()
    assert room.room.desk.find(release.id).state is S.JUDGING


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_said_in_whatever_order_nothing_passes_without_enough_of_it(sqlite_url: str, seed: int) -> None:
    """Random votes of random people, proven or not, between looks of the watch: READY means what was agreed."""
    opened, dice = open_engine(sqlite_url), random.Random(seed)
    room = small(opened, people=msgspec.structs.replace(PEOPLE, votes=20, judges=dice.choice([1, 2, 3])))
    release = judging(opened, room)
    terms = msgspec.convert(release.config["people"], PeopleTerms)
    for _ in range(120):
        try:
            n, by = dice.randrange(40), dice.choice([ADA, BOB, EVE, "user:dan", "system:bot"])
            better = "candidate" if dice.random() < 0.9 else "champion"
            say(room, release, range(n, n + 1), by=by, better=better, proven=by != "user:dan")
        except (Refused, DoneAlready):
            pass  # nothing may have changed
        if dice.random() < 0.3:
            room.watch.tick()
        state, votes = room.room.desk.find(release.id).state, [v for v in _votes(room, release) if v.counted]
        assert state in (S.JUDGING, S.READY, S.REJECTED, S.INCONCLUSIVE)
        assert route(opened) is None
        if state is S.READY:
            assert len(votes) >= terms.votes
            assert len({v.voter for v in votes if v.proven}) >= terms.judges or terms.judges == 1
            part = -(-40 // terms.judges)
            assert all(sum(v.voter == who for v in votes) <= part for who in {v.voter for v in votes})
        if state is not S.JUDGING:
            break
    opened.dispose()


def test_two_replicas_of_the_watch_count_once(engine: Engine) -> None:
    room = small(engine)
    release = judging(engine, room)
    say(room, release, range(12), by=ADA)
    say(room, release, range(12, 24), by=BOB)
    seen = room.room.desk.find(release.id)
    assert room.room.desk.count_votes(release.id, seen=seen).action is CanaryAction.READY
    with pytest.raises(StaleGeneration, match="read it again"):
        room.room.desk.count_votes(release.id, seen=seen)
