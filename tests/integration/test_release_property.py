"""Whatever sequence of acts comes, and however many people act at once: the states move along MOVES, one canary at a time, no quarantined
version comes back, and the pointer is always somewhere good with the right predecessor."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from sqlalchemy import Engine, select

from app.db import audit
from app.db.engine import open_engine, reading
from app.db.pointer import quarantined, read_history
from app.db.tables import release_history
from app.domain.errors import RatchetError
from app.domain.gates import GateName, Verdict
from app.domain.releases import MOVES, ReleaseState
from app.domain.terms import Terms
from tests.fakes.releases import ADA, BOB, EVE, POLICY, ReleaseRoom, answer, release_room, version

S = ReleaseState
DIGESTS = [f"v{n}" for n in range(2, 8)]


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = open_engine(database_url)
    yield engine
    engine.dispose()


def _act(room: ReleaseRoom, dice: random.Random) -> None:
    """One random act on a random release; most of them are refused, which is the point."""
    digest = dice.choice(DIGESTS)
    found = [r for r in room.ledger.list(policy=POLICY) if r.digest == digest]
    release = dice.choice(found) if found else None
    desk = room.desk
    if release is None or dice.random() < 0.15:
        room.queued(digest)
        return
    evidence, person = release.evidence_digest or "", dice.choice([ADA, BOB, EVE, "system:bot"])
    acts: list[Callable[[], object]] = [
        lambda: desk.start_canary(release.id),
        lambda: desk.start_canary(release.id),
        lambda: desk.ramp(release.id, reason="units"),
        lambda: desk.mark_ready(release.id, answer(GateName.CANARY, digest)),
        lambda: desk.mark_ready(release.id, answer(GateName.CANARY, digest, dice.choice(list(Verdict)))),
        lambda: desk.approve(release.id, approver=person, evidence=evidence),
        lambda: desk.approve(release.id, approver=ADA, evidence=evidence),
        lambda: desk.approve(release.id, approver=BOB, evidence=evidence),
        lambda: desk.begin_promotion(release.id),
        lambda: desk.begin_promotion(release.id),
        lambda: desk.promote(release.id),
        lambda: desk.promote(release.id),
        lambda: desk.void(release.id, reason="doubt"),
        lambda: desk.expire(release.id),
        lambda: desk.reject(release.id, approver=person, reason="no"),
        lambda: desk.abort(release.id, actor=person, reason="stop"),
        lambda: desk.roll_back(release.id, actor=person, reason="harm"),
        lambda: desk.renew_anchor(POLICY, actor=person),
        lambda: desk.unfreeze(POLICY, actor=person),
        lambda: desk.plant(version(digest), actor=EVE, reason="forced"),
    ]
    dice.choice(acts)()


def _acts(room: ReleaseRoom, seed: int, count: int) -> None:
    dice = random.Random(seed)
    for _ in range(count):
        try:
            _act(room, dice)
        except RatchetError:
            continue  # refused: nothing may have changed


def _check(room: ReleaseRoom, engine: Engine) -> None:
    with reading(engine) as connection:
        for row in connection.execute(select(release_history)):
            moved = row.from_state is not None and row.from_state != row.to_state
            assert not moved or S(row.to_state) in MOVES[S(row.from_state)], (row.from_state, row.to_state)
        history = list(reversed(read_history(connection, POLICY, newest=10_000)))
        barred = quarantined(connection, POLICY)
        assert audit.verify(connection).problem is None
    assert [row.generation for row in history] == list(range(1, len(history) + 1))
    for before, after in pairwise(history):
        if after.action == "promote":
            assert after.previous == before.digest, "the predecessor of a promotion is the champion before it"
    pointer = room.desk.pointer(POLICY)
    assert pointer.digest not in barred
    states = [r.state for r in room.ledger.list(policy=POLICY, limit=1000)]
    assert states.count(S.CANARY) <= 1
    assert states.count(S.CHAMPION) == 1
    champion = next(r for r in room.ledger.list(policy=POLICY, limit=1000) if r.state is S.CHAMPION)
    assert champion.digest == pointer.digest


@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_of_acts_keep_every_invariant(engine: Engine, seed: int) -> None:
    room = release_room(engine, terms=Terms(config_hash="config", breaker_rollbacks=50))
    for part in range(2):
        _acts(room, seed * 10 + part, 40)
        _check(room, engine)


def test_eight_people_acting_at_once_keep_every_invariant(engine: Engine) -> None:
    room = release_room(engine, terms=Terms(config_hash="config", breaker_rollbacks=50))
    gate = threading.Barrier(8)

    def act(seed: int) -> None:
        gate.wait()
        _acts(room, 100 + seed, 15)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(act, range(8))) == [None] * 8
    _check(room, engine)
