"""The dispatcher's loops over a real book, with tries that nobody makes: what is planned, what waits, what outlives a fault."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from app.db.learning.rollouts import SqlRollouts
from app.domain.errors import Refused, Unavailable
from app.domain.learning.rollouts import Closed, Outcome, Rollout
from pipelines.rollouts.check import Checked, HeldTasks
from pipelines.rollouts.config import RolloutsConfig
from pipelines.rollouts.dispatch import Dispatch, Kept
from pipelines.rollouts.harness import CodingAgent
from pipelines.rollouts.tasks import TaskData
from pipelines.rollouts.tasksets.small_functions import SmallFunctions

ADD, DOUBLE = SmallFunctions().load()[:2]
SOLVED = Closed(outcome=Outcome.SOLVED, reward=1.0, duration_s=9.0, turns=1)
AWAY = Closed(outcome=Outcome.GATEWAY_FAILED, reward=None, duration_s=0.0, turns=0)


@dataclass
class Tries:
    """Says what each try comes to; `after` is told the number of it."""

    closed: Closed = SOLVED
    after: Callable[[int], None] = lambda number: None
    harness: CodingAgent = field(default_factory=CodingAgent)
    made: list[Rollout] = field(default_factory=list[Rollout])
    prepared: list[str] = field(default_factory=list[str])

    def attempt(self, rollout: Rollout, task: TaskData, *, begun: Callable[[str], None], holds: Callable[[], None]) -> Closed:
        self.made.append(rollout)
        self.after(len(self.made))
        return self.closed

    def prepare(self, task: TaskData) -> None:
        self.prepared.append(task.key)

    def close(self) -> None:
        self.prepared.append("closed")


def dispatch(engine: Engine, folder: Path, tries: Tries, *tasks: TaskData, config: dict[str, Any] | None = None, **more: Any) -> Dispatch:
    by_taskset: dict[str, dict[str, TaskData]] = {}
    for task in tasks or (ADD,):
        by_taskset.setdefault(task.taskset, {})[task.key] = task
    few: dict[str, Any] = {"group_size": 2, "slots": 2}
    chosen = RolloutsConfig(**(few | (config or {})))
    workplace: Any = tries
    given: dict[str, Any] = {"book": SqlRollouts(engine)} | more
    return Dispatch(policy="composer", tasks=by_taskset, workplace=workplace, config=chosen, kept=Kept(folder), **given)


def test_on_and_on_every_taskset_has_its_turn(sqlite_engine: Engine, tmp_path: Path) -> None:
    tries = Tries(after=lambda number: made.stop() if number == 8 else None)
    made = dispatch(sqlite_engine, tmp_path, tries, ADD, replace(DOUBLE, taskset="other"), config={"slots": 1})
    made.run()
    assert [rollout.taskset for rollout in tries.made] == ["other", "other", "small-functions", "small-functions"] * 2


def test_a_taskset_that_is_held_does_not_end_the_practice_at_others(sqlite_engine: Engine, tmp_path: Path) -> None:
    held = {"other": {"*": "another harness"}}
    tries = Tries()
    made = dispatch(sqlite_engine, tmp_path, tries, ADD, replace(DOUBLE, taskset="other"), held=held)
    assert made.run(groups=2) == {"solved": 4}
    assert {rollout.taskset for rollout in tries.made} == {"small-functions"}
    with pytest.raises(Refused, match="another harness"):
        dispatch(sqlite_engine, tmp_path, tries, ADD, replace(DOUBLE, taskset="other"), held=held).run(groups=1, taskset="other")


def test_what_may_not_begin_now_waits_and_nothing_more_is_planned_meanwhile(sqlite_engine: Engine, tmp_path: Path) -> None:
    tries, looks = Tries(), list[int]()
    dispatch(sqlite_engine, tmp_path, tries).run(groups=3)  # six that took nine seconds each

    def until_promotion_s() -> float:
        looks.append(len(made.book.history("composer", ADD.taskset)))
        return 5.0 if len(looks) <= 4 else 60.0

    made = dispatch(sqlite_engine, tmp_path, tries, until_promotion_s=until_promotion_s)
    assert made.run(groups=1) == {"solved": 2}
    assert looks[:5] == [6] * 5


FLAGGED = replace(SOLVED, flags=("ends its process",))


def test_a_task_whose_transcripts_are_flagged_is_held_until_a_person_has_looked(sqlite_engine: Engine, tmp_path: Path) -> None:
    held = HeldTasks(tmp_path / "held.json")

    def practising(closed: Closed) -> Dispatch:
        return dispatch(
            sqlite_engine, tmp_path, Tries(closed=closed), ADD, DOUBLE, held=held.read(), looked_at=held.looked_at(), hold=held.hold,
            config={"group_size": 8},
        )  # fmt: skip

    practising(FLAGGED).run(groups=1)
    (first,) = {row.task for row in SqlRollouts(sqlite_engine).history("composer", ADD.taskset)}
    other = {ADD.key: DOUBLE.key, DOUBLE.key: ADD.key}[first]
    again = practising(SOLVED)
    again.run(groups=3)
    assert held.read() == {ADD.taskset: {first: "8 of its last 8 transcripts are flagged (ends its process): look at them"}}
    assert {rollout.task for rollout in cast("Tries", again.workplace).made} == {other}
    held.write(Checked(taskset=ADD.taskset, tasks=2, held={}), looked_at=[first], but=[other])
    assert held.read() == {ADD.taskset: {}}
    later = practising(SOLVED)
    later.run(groups=8)
    assert {rollout.task for rollout in cast("Tries", later.workplace).made} == {first, other}, "what was looked at speaks no more"


def test_faults_of_ours_slow_the_practice_down(sqlite_engine: Engine, tmp_path: Path) -> None:
    """A gateway that is away fails a try in milliseconds: a night of that must not be a million rows."""
    tries = Tries(closed=AWAY)
    made = dispatch(sqlite_engine, tmp_path, tries)
    ended = threading.Timer(2.5, made.stop)
    ended.start()
    made.run()
    ended.join()
    assert 2 <= len(tries.made) <= 12


def test_a_heart_beats_on_after_a_database_that_was_away(sqlite_engine: Engine, tmp_path: Path) -> None:
    class Away(SqlRollouts):
        beats = 0

        def renew(self, rollout: Rollout, *, ttl: timedelta) -> None:
            Away.beats += 1
            if Away.beats == 1:
                raise OperationalError("UPDATE rollouts", None, ConnectionError("server closed the connection unexpectedly"))
            super().renew(rollout, ttl=ttl)
            beaten.set()

    beaten = threading.Event()
    tries = Tries(after=lambda number: None if beaten.wait(20.0) else pytest.fail("no beat came after the one that failed"))
    config = {"lease_s": 30.0, "heartbeat_s": 0.05, "slots": 1}
    assert dispatch(sqlite_engine, tmp_path, tries, config=config, book=Away(sqlite_engine)).run(groups=1) == {"solved": 2}


def test_a_gateway_that_is_away_when_a_grade_is_said_leaves_the_rollout_to_whoever_comes(sqlite_engine: Engine, tmp_path: Path) -> None:
    def away(number: int) -> None:
        if number == 1:
            raise Unavailable("the gateway does not answer")

    config = {"slots": 1, "lease_s": 0.2, "heartbeat_s": 0.1}
    tries = Tries(after=away)
    counted = dispatch(sqlite_engine, tmp_path, tries, config=config).run(groups=1)
    counted = {name: counted.get(name, 0) for name in ("lost", "solved")}
    while counted["solved"] < 2:
        counted["solved"] += dispatch(sqlite_engine, tmp_path, tries, config=config).run(groups=0).get("solved", 0)
    assert counted == {"lost": 1, "solved": 2}


def test_a_bug_in_a_try_ends_the_dispatcher_and_its_heart(sqlite_engine: Engine, tmp_path: Path) -> None:
    def wrong(number: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dispatch(sqlite_engine, tmp_path, Tries(after=wrong), config={"heartbeat_s": 0.05}).run(groups=1)
    assert "rollout-heartbeat" not in {thread.name for thread in threading.enumerate()}
