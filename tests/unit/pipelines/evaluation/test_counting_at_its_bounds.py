"""The book of absolute limits and the queue of turns on their way to it: each bound from both sides."""

import math
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from app.domain.release.sessions import Session
from pipelines.evaluation.config import SloConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import micros
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.absolute_limits import COUNTED_KNOWN, REMEMBERED, LimitBook, SloCount, TurnQueue
from pipelines.evaluation.statistics.limits import HealthierProcess, LimitProcess
from tests.fakes.sessions import AT, session
from tests.fakes.watching import small_gates

PATIENCE, SETTLE = timedelta(seconds=30), timedelta(seconds=2)
OPEN: dict[str, Any] = {"served": False, "labelled": False, "finish_reason": None, "reward": None, "terms": None, "signals": None}


def after(seconds: float) -> datetime:
    return AT + timedelta(seconds=seconds)


def failing(number: int, *, actor: str | None = None, bad: bool = True, second: float | None = None) -> Session:
    at = after(number if second is None else second)
    return session(number, actor=actor or f"person-{number}", finish_reason="error" if bad else "stop", exposed_at=at)


def book_of(*turns: tuple[Session, bool], limit: float = 0.1) -> LimitBook:
    book = LimitBook(slos=(SloConfig(source="fault", limit=limit),))
    for turn, treated in turns:
        book.count(turn, treated=treated)
    return book


def process_of(*bets: tuple[bool, float], limit: float = 0.1) -> LimitProcess:
    process = LimitProcess(limit=limit)
    for bad, stake in bets:
        process.bet(bad=bad, stake=stake)
    return process


@pytest.mark.parametrize(("second", "stake"), [(599.0, 1 / 9), (600.0, 1.0), (900.0, 1.0)])
def test_a_persons_turns_of_ten_minutes_stake_less_and_less_and_then_in_full_again(second: float, stake: float) -> None:
    mine = [(failing(n, actor="ada", second=at), True) for n, at in enumerate((0.0, 1.0, second))]
    expected = process_of((True, 1.0), (True, 1 / 4), (True, stake))
    assert book_of(*mine).counts()[0].log_e == pytest.approx(expected.log_e)


def test_arms_and_people_are_counted_apart() -> None:
    book = book_of((failing(0, actor="ada"), True), (failing(1, actor="ada"), False), (failing(2, actor="bob", bad=False), True))
    treated, control = book.counts()
    assert (treated.arm, treated.bad, treated.total, treated.people) == ("treated", 1, 2, 1)
    assert (control.arm, control.bad, control.total, control.people) == ("control", 1, 1, 1)
    assert treated.log_e == pytest.approx(process_of((True, 1.0), (False, 1.0)).log_e)
    assert control.log_e == pytest.approx(process_of((True, 1.0)).log_e)
    assert book_of().counts()[0] == SloCount(source="fault", arm="treated", limit=0.1, bad=0, total=0)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_limit_that_no_rate_can_exceed_or_keep_is_not_asked(limit: float) -> None:
    assert book_of((failing(0), True), limit=limit).counts()[0].total == 0


def test_as_many_of_the_newest_turns_are_remembered() -> None:
    book = book_of(*((failing(n), True) for n in range(REMEMBERED + 1)), limit=0.5)
    assert (book.counts()[0].total, book.counts()[0].bad) == (REMEMBERED, REMEMBERED)


def test_what_is_beside_is_asked_from_some_evidence_on_and_of_the_same_time() -> None:
    """Limit .5 against .75: what each bad turn adds is known; the evidence passes 2.9 with the fifteenth."""
    bad = [(failing(n), True) for n in range(40)]
    enough = next(n for n in range(40) if process_of(*[(True, 1.0)] * n, limit=0.5).log_e >= 2.9)
    good = [(failing(100, second=-5.0, bad=False, actor="early"), False), (failing(101, second=0.0, bad=False, actor="eve"), False)]
    more = [(failing(102, second=1.0, bad=False, actor="eve"), False), (failing(103, second=2.0, bad=True, actor="kim"), False)]
    little = book_of(*good, *more, *bad[: enough - 1], limit=0.5).counts()[0]
    found = book_of(*good, *more, *bad[:enough], limit=0.5).counts()[0]
    assert little.beside == -1e9
    healthier = HealthierProcess(rate=0.5)  # half of all that failed, and the limit
    for is_bad, stake in ((False, 1.0), (False, 0.5), (True, 1.0)):
        healthier.bet(bad=is_bad, stake=stake)
    assert found.beside == pytest.approx(healthier.log_e)


def test_an_arm_that_keeps_the_limit_again_begins_anew() -> None:
    """Against .5 a good turn speaks ln 1.5 for half of it: the eighth after the bad ones is the first with three in all."""
    turns = [(failing(n, bad=n < 30), True) for n in range(38)]
    still, recovered = (book_of(*turns[:count], limit=0.5).counts()[0] for count in (37, 38))
    assert (still.calm, still.bad, still.total) == (pytest.approx(7 * math.log(1.5)), 30, 37)
    assert (recovered.calm, recovered.log_e, recovered.total) == (pytest.approx(8 * math.log(1.5)), -1e9, 0)
    nothing_found = book_of(*((failing(n, bad=n < 12), True) for n in range(20)), limit=0.5).counts()[0]
    assert (nothing_found.total, nothing_found.calm > 3.0) == (20, True), "it had not been above: there is nothing to begin anew"


def queue_of(counted: list[str], *, labelled: bool = False) -> TurnQueue:
    return TurnQueue(
        lambda session, treated: counted.append(session.inference_id + ("" if treated else " beside")), patience=PATIENCE, settle=SETTLE,
        labelled=labelled,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "second", "is_counted"),
    [
        ({}, 1.9, False), ({}, 2.0, True), (OPEN, 29.9, False), (OPEN, 30.0, True), ({"labelled": False}, 2.0, True),
    ],
)  # fmt: skip
def test_a_turn_is_counted_once_it_settled_and_a_lost_one_once_the_patience_is_over(
    changes: dict[str, Any], second: float, is_counted: bool
) -> None:
    counted: list[str] = []
    queue = queue_of(counted)
    queue.add(session(0, **changes), treated=True)
    queue.count_known(after(second))
    assert counted == (["i-0"] if is_counted else [])


@pytest.mark.parametrize(("changes", "second", "is_counted"), [({}, 2.0, True), ({"labelled": False}, 1e6, False), (OPEN, 30.0, True)])
def test_where_labels_count_a_served_turn_waits_for_its_own(changes: dict[str, Any], second: float, is_counted: bool) -> None:
    counted: list[str] = []
    queue = queue_of(counted, labelled=True)
    queue.add(session(0, **changes), treated=False)
    queue.count_known(after(second))
    assert counted == (["i-0 beside"] if is_counted else [])


def test_turns_are_counted_in_order_once_and_one_that_is_gone_holds_nobody_back() -> None:
    counted: list[str] = []
    queue = queue_of(counted)
    for one in (session(2), session(0), session(1, **OPEN), session(0)):
        queue.add(one, treated=True)
    queue.count_known(after(10))
    assert counted == ["i-0"]
    assert queue.frontier(after(10)) == after(1)
    assert queue.unknown(after(2.9)) == []
    assert queue.unknown(after(3.0)) == ["i-1"]
    queue.drop("i-1")
    queue.add(session(0), treated=True)
    queue.count_known(after(10))
    assert counted == ["i-0", "i-2"]
    assert queue.frontier(after(10)) == after(8)
    assert queue.unknown(after(10)) == []


def test_the_oldest_two_hundred_that_nothing_is_known_of_are_asked_for() -> None:
    queue = queue_of([])
    for n in range(205):
        queue.add(session(n, **OPEN), treated=True)
    assert queue.unknown(after(1e4)) == [f"i-{n}" for n in range(200)]
    assert queue.unknown(after(1e4), most=3) == ["i-0", "i-1", "i-2"]


def test_reading_again_what_was_counted_long_ago_counts_nothing_twice() -> None:
    counted: list[str] = []
    queue, one = queue_of(counted), session(0)
    for n in range(COUNTED_KNOWN + 2):
        queue.add(replace(one, inference_id=str(n), exposed_at=after(n)), treated=True)
    queue.count_known(after(1e6))
    assert len(counted) == COUNTED_KNOWN + 2
    for n in (0, 1, 2, COUNTED_KNOWN + 1):
        queue.add(replace(one, inference_id=str(n), exposed_at=after(n)), treated=True)
    queue.add(replace(one, inference_id="late", exposed_at=after(1)), treated=True)
    queue.add(replace(one, inference_id="new", exposed_at=after(1.5)), treated=True)
    queue.count_known(after(1e6))
    assert counted[COUNTED_KNOWN + 2 :] == ["new"], "what came at the moment of one that is forgotten is late"


# --- units, which close by the same clock ---------------------------------------------------------------------------------------------

CONFIG = small_gates()


def units_of(*sessions: Session, second: float) -> UnitBook:
    book = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references_of(CONFIG, []))
    book.update(sessions, now=after(second))
    return book


@pytest.mark.parametrize(("second", "closed"), [(0.9, [0, 0]), (1.0, [1, 0]), (10.9, [1, 0]), (11.0, [1, 1])])
def test_a_unit_closes_in_each_lane_when_its_window_is_over_and_has_settled(second: float, closed: list[int]) -> None:
    lanes = units_of(session(0), second=second).lanes()
    assert [(lane.window_s, len(lane)) for lane in lanes] == [(0.0, closed[0]), (10.0, closed[1])]


def test_a_closed_unit_says_when_it_closed_and_what_came_within_its_window() -> None:
    good = {"task_success": True}
    mine = [session(n, actor="ada", arm="candidate", signals=said) for n, said in ((0, None), (10, good), (11, {"task_success": False}))]
    lane = units_of(*mine, second=60).lanes()[-1]
    assert lane.array("task_success").tolist() == [0.5], "at the end of the window is inside"
    assert (list(lane.closed_at), list(lane.covered)) == (list(micros(after(10)).to_bytes(8, "little")), [1])
    assert (list(lane.treated), lane.missing["task_success"]) == ([1], 0)


@pytest.mark.parametrize(("second", "closed"), [(29.9, 0), (30.0, 1)])
def test_an_exposure_that_got_no_turn_holds_the_others_back_until_the_patience_is_over(second: float, closed: int) -> None:
    assert len(units_of(session(0, **OPEN), second=second).lanes()[0]) == closed


def test_what_became_of_everybody_is_counted_by_stratum_and_arm() -> None:
    many = [session(0), session(1, arm="candidate", signals=None), session(2, arm="candidate"), session(3, stage="canary-1", share=0.25)]
    book = units_of(*many, second=60)
    found = {a.stratum: (a.probability, a.treated, a.control, a.covered_treated, a.covered_control) for a in book.assigned()}
    assert found == {2: (0.5, 2, 1, 1, 1), 1: (0.25, 0, 1, 0, 1)}
    assert (book.last_session_at, book.resume_at) == (after(3), after(3) - timedelta(minutes=1))
    assert units_of(second=0).resume_at is None


def test_whoever_is_first_read_after_later_units_were_counted_is_late() -> None:
    book = units_of(session(5), session(9), second=60)
    book.update([session(4), session(9, actor="another"), session(10)], now=after(120))
    assert (book.late, len(book.lanes()[0])) == (1, 4)


def test_a_thousand_that_hold_the_others_back_are_asked_for_at_once() -> None:
    unlabelled: dict[str, Any] = {**OPEN, "served": True}
    book = units_of(*(session(n, **unlabelled) for n in range(1005)), second=2000)
    assert len(set(book.waiting(after(2000)))) == len(book.waiting(after(2000))) == 1000
