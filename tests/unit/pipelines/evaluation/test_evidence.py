"""Units: one per person and stage, closed in order, counted once, and whatever is left out is counted."""

import random
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from app.domain.release.sessions import Era, Session
from pipelines.evaluation.counting.drawings import canary_drawing, era_drawing
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from tests.fakes.sessions import AT, people, session
from tests.fakes.watching import small_gates

CONFIG = small_gates()


def _book() -> UnitBook:
    return UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references_of(CONFIG, []))


def _outcomes(book: UnitBook, metric: str) -> list[float]:
    window = next(CONFIG.window_of(m) for m in CONFIG.metrics if m.name == metric)
    return next(lane for lane in book.lanes() if lane.window_s == window).array(metric).tolist()


def test_a_person_with_many_sessions_is_one_unit_with_their_mean() -> None:
    """Sessions as units turn 3 % false aborts into 61 % (sheet S5a)."""
    mine = [session(n, actor="ada", signals={"task_success": n < 3}) for n in range(4)]
    book = _book()
    book.update(mine, now=AT + timedelta(hours=1))
    assert _outcomes(book, "task_success") == [0.75]  # three of four


def test_sessions_after_the_window_do_not_count() -> None:
    mine = [session(0, actor="ada"), session(11, actor="ada", signals={"task_success": False})]  # the window is ten seconds
    book = _book()
    book.update(mine, now=AT + timedelta(hours=1))
    assert _outcomes(book, "task_success") == [1.0]


def test_the_fast_lane_takes_the_first_turn_alone() -> None:
    mine = [session(0, actor="ada"), session(1, actor="ada", finish_reason="error")]
    book = _book()
    book.update(mine, now=AT + timedelta(hours=1))
    assert _outcomes(book, "fault") == [1.0]  # good is up: no fault


def test_an_exposure_without_a_turn_is_a_fault_once_the_wait_is_over() -> None:
    lost = session(0, served=False, finish_reason=None, labelled=False, reward=None, terms=None, signals=None)
    book = _book()
    book.update([lost], now=AT + timedelta(seconds=20))
    assert _outcomes(book, "fault") == []
    book.update([lost], now=AT + timedelta(seconds=31))
    assert _outcomes(book, "fault") == [0.0]
    assert _outcomes(book, "task_success") == [0.0]  # intention to treat: no answer is the worst outcome


def test_a_missing_signal_counts_as_the_metric_says() -> None:
    book = _book()
    book.update([session(0, signals=None)], now=AT + timedelta(hours=1))
    assert _outcomes(book, "task_success") == [0.0]
    assert book.lanes()[-1].missing["task_success"] == 1


def test_the_first_unit_that_is_not_complete_holds_back_all_after_it() -> None:
    """Who is counted when must not depend on how it went: slow labels do not let quick ones pass."""
    sessions = people(5)
    waiting = [s if n != 2 else replace(s, labelled=False, reward=None, terms=None, signals=None) for n, s in enumerate(sessions)]
    book = _book()
    book.update(waiting, now=AT + timedelta(minutes=5))
    assert len(_outcomes(book, "task_success")) == 2
    book.update(sessions, now=AT + timedelta(minutes=6))
    assert len(_outcomes(book, "task_success")) == 5


def test_closed_units_stay_as_they_are_however_often_they_are_read() -> None:
    sessions = people(30)
    book = _book()
    book.update(sessions, now=AT + timedelta(hours=1))
    before = _outcomes(book, "task_success")
    changed = [session(n, signals={"task_success": False}) for n in range(30)]
    book.update(changed, now=AT + timedelta(hours=2))
    book.update(sessions, now=AT + timedelta(hours=2))
    assert _outcomes(book, "task_success") == before


def test_any_way_of_reading_gives_the_same_units() -> None:
    """A watch that was killed and reads everything again closes the same units in the same order."""
    sessions = people(200, share=0.25, stage="canary-1")
    whole, pieces, dice = _book(), _book(), random.Random(7)
    whole.update(sessions, now=AT + timedelta(hours=1))
    for seconds in range(0, 260, 13):
        known = [s for s in sessions if s.exposed_at <= AT + timedelta(seconds=seconds)]
        pieces.update(known[max(0, len(known) - dice.randint(60, 90)) :], now=AT + timedelta(seconds=seconds))
    pieces.update(sessions, now=AT + timedelta(hours=1))
    for one, other in zip(whole.lanes(), pieces.lanes(), strict=True):
        assert one == other


def test_a_person_seen_in_two_arms_is_left_out_and_counted() -> None:
    book = _book()
    book.update([session(0, actor="ada"), session(1, actor="ada", arm="candidate"), session(2)], now=AT + timedelta(hours=1))
    assert book.duplicates == 1
    assert len(_outcomes(book, "task_success")) == 1


def test_a_person_seen_in_two_arms_does_not_hold_the_others_back() -> None:
    unlabelled = session(0, actor="ada", labelled=False, reward=None, terms=None, signals=None)
    book = _book()
    book.update([unlabelled, session(1, actor="ada", arm="candidate"), session(2)], now=AT + timedelta(hours=1))
    assert _outcomes(book, "task_success") == [1.0]


def test_an_arm_that_its_version_contradicts_is_left_out_and_counted() -> None:
    """growthbook#6020: control and treatment were swapped."""
    book = _book()
    book.update([session(0, arm="candidate", digest="v1"), session(1, digest="v2"), session(2)], now=AT + timedelta(hours=1))
    assert book.swapped == 2
    assert sum(a.treated + a.control for a in book.assigned()) == 1


def test_each_stage_draws_a_person_anew() -> None:
    mine = [session(0, actor="ada", stage="canary-0", share=0.05), session(60, actor="ada", arm="candidate")]
    book = _book()
    book.update(mine, now=AT + timedelta(hours=1))
    assert book.duplicates == 0
    assert np.frombuffer(book.lanes()[0].probability, dtype="<f8").tolist() == [0.05, 0.5]  # of the candidate


def test_each_day_a_person_is_a_unit_of_their_own() -> None:
    """One unit per person and era: once everybody had been seen, the watch was blind."""
    mine = [
        session(n, actor="ada", exposed_at=AT + n * timedelta(days=1), stage=f"canary-2.{20_000 + n}", arm=("champion", "candidate")[n])
        for n in range(2)
    ]
    book = _book()
    book.update(mine, now=AT + timedelta(days=2))
    assert book.duplicates == 0
    assert np.frombuffer(book.lanes()[0].treated, dtype="u1").tolist() == [0, 1]
    era = Era(
        generation=2, since=AT, until=None, champion="v2", reference="v1", holdback=0.1, anchor="v1", action="promote", release_id="r"
    )
    held = UnitBook(CONFIG, era_drawing(era), references_of(CONFIG, []))
    served = [
        session(n, actor="ada", arm="champion", digest="v2", holdback=0.1, share=0.0, stage=f"holdback.{20_000 + n // 2}") for n in range(4)
    ]
    held.update(served, now=AT + timedelta(days=3))
    assert sum(a.treated + a.control for a in held.assigned()) == 2


@pytest.mark.parametrize("arm", ["candidate", "champion"])
def test_a_person_who_was_erased_holds_nobody_back(arm: str) -> None:
    """One erasure froze the evidence: closing in order waited for an exposure that was gone."""
    sessions = [session(n, arm=arm) for n in range(5)]
    unlabelled = replace(sessions[1], labelled=False, reward=None, terms=None, signals=None)
    book, later = _book(), AT + timedelta(minutes=5)
    book.update([sessions[0], unlabelled, *sessions[2:]], now=later)
    assert len(_outcomes(book, "task_success")) == 1
    assert book.waiting(later) == ["i-1"], "what holds the others back is asked for again"
    book.update([], now=later, gone={"i-1"})
    assert len(_outcomes(book, "task_success")) == 4
    assert sum(a.treated + a.control for a in book.assigned()) == 4, "gone from the sample ratio, too, whichever arm it was"


def test_what_is_read_again_does_not_grow_with_what_is_open() -> None:
    """A tick read every open session again: 1.7 s at 20,000 of them, against an interval of 1.5 s."""
    slow = small_gates(window_s=7200.0)
    book = UnitBook(slow, canary_drawing(digest="v2", champion="v1"), references_of(slow, []))
    for count in (2000, 6000):
        sessions = [session(n, labelled=False, reward=None, terms=None, signals=None) for n in range(count)]
        now = sessions[-1].exposed_at + timedelta(seconds=2)
        book.update(sessions, now=now)
        assert book.resume_at == sessions[-1].exposed_at - timedelta(seconds=60)
        assert book.waiting(now) == [], "their windows are open: nobody waits for them yet"
    assert len(book.waiting(now + timedelta(hours=3))) <= 1000


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.9), (0.5, 0.8181818181818182)])
def test_the_holdback_compares_with_the_probability_that_was_drawn(share: float, expected: float) -> None:
    # h = 0.1: champion 0.9 (1 - s), reference 0.1; with s = 0.5: 0.45 / (0.45 + 0.1) = 0.8182
    era = Era(
        generation=2, since=AT, until=None, champion="v2", reference="v1", holdback=0.1, anchor="v1", action="promote", release_id="r"
    )
    served: Session = session(0, arm="champion", digest="v2", holdback=0.1, share=share)
    drawn = era_drawing(era)(served)
    assert drawn is not None
    assert drawn.treated
    assert drawn.probability == pytest.approx(expected)
