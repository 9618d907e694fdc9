"""The book of rollouts on both databases: who holds which, and that it is closed once."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from app.db.engine import open_engine
from app.db.learning.rollouts import SqlRollouts
from app.domain.errors import LeaseLost, Unavailable
from app.domain.ids import uuid7
from app.domain.learning.rollouts import Closed, Outcome, Rollout

TTL = timedelta(seconds=30)
DONE = Closed(outcome=Outcome.SOLVED, reward=1.0, duration_s=2.5, turns=3, flags=("reward",))


@pytest.fixture
def book(engine: Engine) -> SqlRollouts:
    return SqlRollouts(engine)


def rollouts(count: int) -> list[Rollout]:
    group = uuid7()
    return [
        Rollout(id=uuid7(), policy="p", taskset="t", task="k", task_hash="h", group=group, attempt=n, harness_hash="x")
        for n in range(count)
    ]


def test_the_oldest_are_taken_first_and_by_one_alone(book: SqlRollouts) -> None:
    planned = rollouts(6)
    book.plan(planned)
    assert [r.id for r in book.take("p", owner="a", ttl=TTL, at_most=2)] == [r.id for r in planned[:2]]
    with ThreadPoolExecutor(4) as pool:
        taken = [r.id for found in pool.map(lambda n: book.take("p", owner=f"{n}", ttl=TTL, at_most=2), range(4)) for r in found]
    assert sorted(taken) == sorted(r.id for r in planned[2:])
    assert book.take("p", owner="b", ttl=TTL, at_most=9) == []
    assert book.take("other", owner="b", ttl=TTL, at_most=9) == []


def test_a_lease_that_ended_is_taken_and_whoever_had_it_writes_nothing(book: SqlRollouts) -> None:
    book.plan(rollouts(1))
    first = book.take("p", owner="a", ttl=timedelta(0), at_most=1)[0]
    second = book.take("p", owner="b", ttl=TTL, at_most=1)[0]
    assert (first.id, second.token) == (second.id, first.token + 1)
    for act in (lambda: book.begin(first, "e1"), lambda: book.renew(first, ttl=TTL), lambda: book.close(first, DONE)):
        with pytest.raises(LeaseLost, match="held by another dispatcher"):
            act()
    book.begin(second, "e2")
    book.renew(second, ttl=TTL)
    book.close(second, DONE)
    with pytest.raises(LeaseLost):
        book.close(second, DONE)
    assert [(r.episode, r.outcome, r.reward) for r in book.history("p", "t")] == [("e2", Outcome.SOLVED, 1.0)]
    assert book.durations_s("p", "t") == [2.5]
    assert book.take("p", owner="c", ttl=timedelta(0), at_most=1) == []


def test_no_two_rollouts_have_an_episode_and_no_two_of_a_group_an_attempt(book: SqlRollouts) -> None:
    book.plan(rollouts(2))
    one, two = book.take("p", owner="a", ttl=TTL, at_most=2)
    book.begin(one, "e")
    with pytest.raises(IntegrityError):
        book.begin(two, "e")
    with pytest.raises(IntegrityError):
        book.plan([Rollout(id=uuid7(), policy="p", taskset="t", task="k", task_hash="h", group=one.group, attempt=1, harness_hash="x")])


def test_the_newest_of_a_history_are_the_end_of_it(book: SqlRollouts) -> None:
    for _ in range(3):
        book.plan(rollouts(3))
    whole = [r.id for r in book.history("p", "t")]
    assert len(whole) == 9
    assert [r.id for r in book.history("p", "t", newest=4)] == whole[-4:]


def test_a_database_that_is_away_is_said_to_be() -> None:
    held, away = rollouts(1)[0], SqlRollouts(open_engine("postgresql://nobody@127.0.0.1:1/none"))
    for act in (lambda: away.begin(held, "e"), lambda: away.renew(held, ttl=TTL), lambda: away.close(held, DONE)):
        with pytest.raises(Unavailable, match="gone on with when its lease is over"):
            act()
