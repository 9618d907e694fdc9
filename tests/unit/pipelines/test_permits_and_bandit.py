"""Who may ask the engines, and which task is tried next."""

import pytest

from pipelines.rollouts.bandit import Learnability
from pipelines.rollouts.permits import Permits, Pressure

IDLE, BUSY = Pressure(first_token_p95_s=None, waiting=0), Pressure(first_token_p95_s=3.0, waiting=0)


class Felt:
    """Pressure by hand."""

    def __init__(self) -> None:
        self.now: Pressure | None = IDLE

    def __call__(self) -> Pressure | None:
        return self.now


def permits(felt: Felt) -> Permits:
    return Permits(probe=felt, most=8, bound_s=2.0, most_waiting=2, probe_s=0.0, allowed=0.0)


def test_permits_grow_by_one_while_nobody_waits_and_end_at_the_most() -> None:
    kept = permits(Felt())
    assert [kept.may_ask() and kept.allowed for _ in range(10)] == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]


def test_pressure_leaves_none_at_the_next_probe_and_nearly_pressure_halves() -> None:
    felt = Felt()
    kept = permits(felt)
    for _ in range(8):
        kept.may_ask()
    felt.now = Pressure(first_token_p95_s=1.7, waiting=0)
    kept.may_ask()
    assert kept.allowed == 4
    for pressure in (BUSY, Pressure(first_token_p95_s=None, waiting=3), None):
        felt.now = IDLE
        kept.may_ask()
        felt.now = pressure
        assert not kept.take(), "what is not known is not idle"
        assert kept.allowed == 0
        assert kept.zero_since is not None


def test_no_more_go_out_than_there_are_permits() -> None:
    kept = permits(Felt())
    assert kept.take()
    assert kept.take(), "the second probe brought the second permit"
    kept.allowed, kept.probe_s = 2.0, 1e9
    assert not kept.may_ask()
    assert not kept.take()
    kept.give_back()
    assert kept.may_ask()
    assert kept.take()


def test_tasks_that_come_out_differently_are_tried_most() -> None:
    bandit = Learnability(["always", "never", "mixed"], seed=1)
    for n in range(40):
        bandit.learn("always", True)
        bandit.learn("never", False)
        bandit.learn("mixed", n % 2 == 0)
    drawn = [bandit.draw(1)[0] for _ in range(300)]
    assert drawn.count("mixed") > 240
    assert drawn.count("always") > 3, "nothing is forgotten for good"
    assert drawn.count("never") > 3


def test_a_task_never_tried_is_tried_and_a_held_one_never() -> None:
    bandit = Learnability([f"t{n}" for n in range(20)], seed=2)
    assert sorted(bandit.draw(20)) == sorted(bandit.tasks), "each once before any twice"
    assert "t3" not in bandit.draw(40, held={"t3": "cheated"})
    assert Learnability(["a"], seed=0).draw(3, held={"a": "held"}) == []


@pytest.mark.parametrize(
    ("wait_s", "waiting", "allowed"),
    [
        (None, 0, 5.0), (None, 2, 5.0), (None, 3, 0.0),
        (1.6, 0, 5.0), (1.61, 0, 2.0), (2.0, 0, 2.0), (2.01, 0, 0.0), (0.0, 2, 5.0), (1.61, 3, 0.0),
    ],
)  # fmt: skip
def test_the_bounds_of_pressure_are_met_from_both_sides(wait_s: float | None, waiting: int, allowed: float) -> None:
    kept = permits(Felt())
    kept.allowed = 4.0
    kept.feel(Pressure(first_token_p95_s=wait_s, waiting=waiting))
    assert kept.allowed == allowed


def test_who_says_nothing_more_begins_with_one_permit_and_makes_room_for_anybody_who_waits() -> None:
    felt = Felt()
    kept = Permits(probe=felt, most=8, bound_s=2.0)
    assert kept.take()
    assert (kept.allowed, kept.used) == (2.0, 1)
    kept.feel(Pressure(first_token_p95_s=None, waiting=1))
    assert kept.allowed == 0.0


def test_it_is_remembered_since_when_there_has_been_no_permit() -> None:
    kept = permits(Felt())
    kept.feel(BUSY)
    since = kept.zero_since
    assert since is not None
    kept.feel(None)
    assert kept.zero_since == since
    kept.feel(IDLE)
    assert (kept.allowed, kept.zero_since) == (1.0, None)
    kept.feel(Pressure(first_token_p95_s=1.7, waiting=0))
    assert kept.allowed == 0.5
    assert kept.zero_since is not None, "half a permit is none"


def test_an_earlier_try_counts_nine_tenths_for_each_later_one() -> None:
    bandit = Learnability(["a"])
    for solved in (True, False, True):
        bandit.learn("a", solved)
    assert bandit.solved["a"] == pytest.approx(0.9 * 0.9 + 1.0)
    assert bandit.failed["a"] == pytest.approx(0.9)


def test_every_round_holds_each_open_task_once_and_the_same_seed_draws_the_same() -> None:
    tasks = [f"t{n}" for n in range(5)]
    drawn = Learnability(tasks, seed=3).draw(12, held={"t4": "flagged"})
    assert [sorted(drawn[at : at + 4]) for at in (0, 4, 8)] == [tasks[:4]] * 3
    assert Learnability(tasks, seed=3).draw(12, held={"t4": "flagged"}) == drawn
    assert Learnability(tasks).draw(5) == Learnability(tasks, seed=0).draw(5)
