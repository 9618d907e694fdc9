"""What a dispatcher does between its rollouts: whom it admits, how long it rests after faults of ours, and what it keeps for going on."""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from app.domain.errors import LeaseLost, Unavailable
from app.domain.learning.rollouts import Closed, Outcome, Rollout
from pipelines.rollouts.config import RolloutsConfig
from pipelines.rollouts.dispatch import Dispatch, Kept, by_key, group_of
from pipelines.rollouts.episode import forget
from pipelines.rollouts.harness import CodingAgent
from pipelines.rollouts.service import Session
from pipelines.rollouts.tasks import TaskData

TASK = TaskData(
    taskset="t", key="k", instruction="", files={"a.py": ""}, editable=("a.py",), tests={"h.py": ""}, expected=("h.py::test",), gold={},
    most_tokens=500, most_turns=7,
)  # fmt: skip
ENDED = Closed(outcome=Outcome.SOLVED, reward=1.0, duration_s=1.0, turns=1)


class Book:
    """A book that keeps what it was told, and knows how long rollouts took."""

    def __init__(self, durations: Sequence[float] = ()) -> None:
        self.durations, self.closed, self.taken = durations, list[tuple[str, Closed]](), list[tuple[timedelta, int]]()

    def durations_s(self, policy: str, taskset: str) -> Sequence[float]:
        return self.durations if taskset == "t" else ()

    def close(self, rollout: Rollout, closed: Closed) -> None:
        self.closed.append((rollout.id, closed))

    def take(self, policy: str, *, owner: str, ttl: timedelta, at_most: int) -> list[Rollout]:
        self.taken.append((ttl, at_most))
        return []


class Place:
    """A workplace whose attempts end as they are told to."""

    def __init__(self, ends: Closed | Exception = ENDED) -> None:
        self.ends, self.harness, self.prepared, self.worked = ends, CodingAgent(), list[str](), 0

    def attempt(self, rollout: Rollout, task: TaskData, **_: Any) -> Closed:
        self.worked += 1
        if isinstance(self.ends, Exception):
            raise self.ends
        return self.ends

    def prepare(self, task: TaskData) -> None:
        self.prepared.append(task.key)


def dispatch(folder: Path, *, book: Book | None = None, place: Place | None = None, left_s: float | None = None, **config: Any) -> Dispatch:
    return Dispatch(
        policy="p", book=cast("Any", book or Book()), tasks={"t": {"k": TASK}, "u": {}}, workplace=cast("Any", place or Place()),
        config=RolloutsConfig(**config), kept=Kept(folder / "deep" / "kept"), until_promotion_s=lambda: left_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("durations", "left_s", "admits"),
    [
        ([100.0] * 5, None, True), ([100.0] * 4, 1.0, True), ([100.0] * 5, 1.0, False), ([100.0] * 5, 100.0, True),
        ([100.0] * 5, 99.9, False), ([0.0, 25.0, 50.0, 75.0, 100.0], 75.0, True), ([0.0, 25.0, 50.0, 75.0, 100.0], 74.9, False),
    ],
)  # fmt: skip
def test_a_rollout_begins_where_three_of_four_of_its_kind_were_over_in_time(
    tmp_path: Path, durations: list[float], left_s: float | None, admits: bool
) -> None:
    assert dispatch(tmp_path, book=Book(durations), left_s=left_s, admission_quantile=0.75)._admits() is admits


def test_after_faults_of_ours_there_is_a_rest_twice_as_long_each_time_up_to_a_minute(tmp_path: Path) -> None:
    one, rests = dispatch(tmp_path), list[float]()
    fault = replace(ENDED, outcome=Outcome.GATEWAY_FAILED, reward=None)
    for _ in range(10):
        assert one._named(fault) == "gateway_failed"
        rests.append(one._rests_until - time.monotonic())
    assert rests == pytest.approx([0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0], abs=0.2)
    assert not one._may_begin()
    assert (one._named(None), one._rests_until > 0.0) == ("lost", True)
    for outcome in (Outcome.STALE, Outcome.FAILED):
        one._named(fault)
        assert one._named(replace(ENDED, outcome=outcome)) == outcome.value
        assert (one._rests_until, one._may_begin()) == (0.0, True)
    one._named(fault)
    assert one._rests_until - time.monotonic() == pytest.approx(0.4, abs=0.2), "and begins anew"
    one.stop()
    one._rests_until = 0.0
    assert not one._may_begin()


@pytest.mark.parametrize(("attempt", "prepared"), [(0, ["k"]), (2, ["k"]), (3, [])])
def test_a_box_is_made_ready_for_the_next_try_of_a_group_as_long_as_there_is_one(tmp_path: Path, attempt: int, prepared: list[str]) -> None:
    place = Place()
    one = dispatch(tmp_path, place=place, group_size=4)
    tries = group_of(TASK, policy="p", harness=place.harness, size=4)
    one._prepare([])
    one._prepare([replace(tries[0], task="gone")])
    one._prepare([tries[3], tries[attempt]])
    assert place.prepared == prepared


def test_a_group_is_so_many_tries_at_one_task_under_one_name() -> None:
    made = group_of(TASK, policy="p", harness=CodingAgent(), size=3)
    assert [one.attempt for one in made] == [0, 1, 2]
    assert (len({one.id for one in made}), len({one.group for one in made})) == (3, 1)
    assert {(one.task, one.taskset, one.task_hash, one.policy) for one in made} == {("k", "t", TASK.hash, "p")}
    assert by_key([TASK]) == {"k": TASK}
    assert CodingAgent().hash != CodingAgent(search_model="scout").hash


def test_what_is_needed_to_go_on_is_for_our_eyes_alone_and_gone_when_it_is_over(tmp_path: Path) -> None:
    place, book = Place(), Book()
    one = dispatch(tmp_path, place=place, book=book)
    [rollout] = group_of(TASK, policy="p", harness=place.harness, size=1)
    assert one.kept.session(rollout) is None
    for key in ("first", "second"):
        one.kept.keep(rollout, Session(episode="e", key=key))
    assert one.kept.session(rollout) == Session(episode="e", key="second")
    [file] = one.kept.folder.iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert one._attempt(rollout) == ENDED
    assert book.closed == [(rollout.id, ENDED)]
    assert list(one.kept.folder.iterdir()) == []
    assert one.running == {}
    forget(one.kept.folder, rollout)


@pytest.mark.parametrize("error", [LeaseLost("somebody else"), Unavailable("away")])
def test_a_rollout_that_somebody_else_has_or_that_cannot_be_said_is_left(tmp_path: Path, error: Exception) -> None:
    place, book = Place(error), Book()
    one = dispatch(tmp_path, place=place, book=book)
    [rollout] = group_of(TASK, policy="p", harness=place.harness, size=1)
    one.kept.keep(rollout, Session(episode="e", key="k"))
    assert one._attempt(rollout) is None
    assert (book.closed, one.running) == ([], {})
    assert one.kept.session(rollout) is not None, "it is gone on with"


@pytest.mark.parametrize("change", [{"task": "gone"}, {"task_hash": "other"}, {"harness_hash": "other"}, {"taskset": "gone"}])
def test_a_try_at_another_task_or_with_another_harness_is_closed_without_being_worked_on(tmp_path: Path, change: dict[str, str]) -> None:
    place, book = Place(), Book()
    one = dispatch(tmp_path, place=place, book=book)
    [rollout] = group_of(TASK, policy="p", harness=place.harness, size=1)
    closed = one._attempt(replace(rollout, **change))
    assert closed == Closed(outcome=Outcome.SETUP_FAILED, reward=None, duration_s=0.0, turns=0, flags=("another task or harness",))
    assert (place.worked, len(book.closed)) == (0, 1)


def test_leases_are_taken_for_as_long_as_is_configured(tmp_path: Path) -> None:
    book = Book()
    dispatch(tmp_path, book=book, lease_s=40.0)._take(3)
    assert book.taken == [(timedelta(seconds=40), 3)]


def test_the_agent_is_launched_with_its_task_and_an_answer_of_a_thousand_tokens_at_most() -> None:
    launch = CodingAgent().launch("http://box", "secret", TASK, model="composer", python="py")
    assert launch.argv == (
        "/usr/bin/env", "OPENAI_BASE_URL=http://box/v1", "OPENAI_API_KEY=secret", "OPENAI_MODEL=composer", "py", "-I", "-S", "-B",
        ".harness/agent.py", ".harness/task.json",
    )  # fmt: skip
    assert b'"max_tokens":500' in launch.files[".harness/task.json"]
    assert b'"most_turns":7' in launch.files[".harness/task.json"]
    many = CodingAgent(search_model="scout").launch("http://box", "s", replace(TASK, most_tokens=1025), model="m", python="py")
    assert b'"max_tokens":1024' in many.files[".harness/task.json"]
    assert "OPENAI_SEARCH_MODEL=scout" in many.argv
