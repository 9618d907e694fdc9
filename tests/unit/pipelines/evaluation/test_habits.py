"""What is usual for a person is taken off (CUPED): less variance, the same effect, no more false promotions."""

import math
import random
from datetime import timedelta

import numpy as np
import pytest

from app.domain.release.sessions import Session
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.habits import Habits, Usual, habits_of, with_explained
from pipelines.evaluation.counting.subjects import Plan
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.harm import units_of
from pipelines.evaluation.live.planning import plan_canary
from pipelines.evaluation.statistics.non_inferiority import NonInferiorityPlan, judge
from pipelines.evaluation.statistics.units import Units, running_mean, with_usual
from tests.fakes.sessions import AT, session
from tests.unit.pipelines.evaluation.test_planning import Returning

GATES = GatesConfig(metrics=tuple(m for m in GatesConfig().metrics if m.name == "task_success"))
MARGIN, PEOPLE, TURNS = 0.04, 1500, 6


def past(people: int, turns: int, *, alike: float, seed: int = 1) -> list[Session]:
    """Everybody's turns, person by person in every round; `alike` is a + b of the Beta distribution that their rates come from."""
    dice = random.Random(seed)
    rates = [dice.betavariate(0.6 * alike, 0.4 * alike) for _ in range(people)]
    return [
        session(n, actor=f"p{n % people}", signals={"task_success": dice.random() < rates[n % people]}, reward=0.2)
        for n in range(people * turns)
    ]


def test_habits_explain_what_people_bring_along_and_nothing_where_they_are_alike() -> None:
    """ICC .5, six turns before and six after: half of .24 between people, .02 of either half's mean: 1 - (.02 + .017)/(.14), or .73."""
    differ, alike = (with_explained(GATES, past(300, 12, alike=a))["task_success"].explained for a in (1.0, 500.0))
    assert differ == pytest.approx(0.73, abs=0.08)
    assert alike < 0.05


def test_a_canary_of_people_with_habits_is_planned_shorter() -> None:
    """The same traffic and the same margin; what people bring along is no longer part of what has to be averaged away."""
    product = Returning(12_000, every=timedelta(days=2), history=past(300, 12, alike=1.0))
    strangers = Returning(12_000, every=timedelta(days=2), history=past(3600, 1, alike=1.0))
    plans = [plan_canary(GATES, book, policy="p", champion="v1", now=AT) for book in (product, strangers)]
    assert isinstance(plans[0], Plan)
    assert not isinstance(plans[1], Plan) or (plans[1].lasts_s or 0.0) > (plans[0].lasts_s or 0.0)


def passes(rng: np.random.Generator, effect: float, *, knows: bool) -> bool:
    """Whether a candidate with this effect is found non-inferior; people have rates of their own (ICC .5), and were seen before."""
    rate, treated = rng.beta(0.6, 0.4, PEOPLE), rng.random(PEOPLE) < 0.5
    before = rng.binomial(TURNS, rate)
    outcome = rng.binomial(TURNS, np.clip(rate + effect * treated, 0.0, 1.0)) / TURNS
    usual = np.asarray((1.0 * 0.6 + before) / (1.0 + TURNS), dtype=np.float64) if knows else None
    units = Units.observed(
        outcome=outcome, treated=treated, probability=0.5, usual=usual,
        baseline=running_mean(outcome, prior=0.6) if usual is None else with_usual(outcome, usual),
    )  # fmt: skip
    return judge(NonInferiorityPlan(margin=MARGIN, variance=0.14 * (0.3 if knows else 1.0), n_max=PEOPLE), units).rejected


def test_knowing_what_is_usual_finds_more_harmless_candidates_and_promotes_no_more_bad_ones() -> None:
    """1,500 people of 6 turns, margin 4 points: an equal candidate passes far more often, one that is worse by the margin in 5 % at most.

    People's rates are cut off at 0, so 4.5 points are 4.2.
    """
    rng, n = np.random.default_rng(4), 120
    knowing, blind = (np.mean([passes(rng, 0.0, knows=knows) for _ in range(n)]) for knows in (True, False))
    assert knowing > blind + 0.15
    worse = np.mean([passes(rng, -0.045, knows=True) for _ in range(n)])
    assert worse <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / n)


def test_a_unit_carries_what_was_usual_for_its_person_before() -> None:
    history = past(300, 12, alike=1.0)
    references, habits = with_explained(GATES, history), habits_of(GATES, history, {})
    book = UnitBook(GATES, canary_drawing(digest="v2", champion="v1"), references, habits=habits)
    book.update([session(0, actor="p7"), session(1, actor="somebody new")], now=AT + timedelta(hours=3))
    usual = units_of(book.lanes()[0], "task_success", prior=0.6).usual
    assert usual is not None
    assert usual.tolist() == [habits.usual["task_success"].of("p7"), habits.usual["task_success"].mean]


# --- by hand ----------------------------------------------------------------------------------------------------------------------


def told(*people: list[float]) -> list[Session]:
    """Each person's turns by how they went."""
    turns = [(actor, value) for actor, values in enumerate(people) for value in values]
    return [session(n, actor=f"p{actor}", signals={"task_success": value}, reward=0.2) for n, (actor, value) in enumerate(turns)]


def test_what_is_usual_for_a_person_is_drawn_towards_everybodys_mean() -> None:
    usual = Usual(mean=0.6, worth=2.0, within=0.2, own={"ada": (3.0, 4)})
    assert usual.of("ada") == pytest.approx((2 * 0.6 + 3) / 6)
    assert usual.of("somebody new") == pytest.approx(0.6)
    assert usual.residual(4) == pytest.approx(0.2 * (1 / 4 + 1 / 6))
    assert Usual(mean=0.6, worth=2.0, within=0.001, own={}).residual(4) == 0.0025


def test_variances_within_and_between_people_by_hand() -> None:
    """Thirty people of two turns: ten succeed twice, ten never, ten once. Within: 10 * .5/30 = 1/6; between: (20 * 2 * .25/29 - 1/6)/2."""
    found = habits_of(GATES, told(*[[1.0, 1.0]] * 10, *[[0.0, 0.0]] * 10, *[[1.0, 0.0]] * 10), {}).usual["task_success"]
    between = (10 / 29 - 1 / 6) / 2
    assert (found.mean, found.within, found.worth) == (0.5, pytest.approx(1 / 6), pytest.approx(1 / 6 / between))
    assert found.own["p0"] == (2.0, 2)
    # of unequal turns: 15 people of one, all good, and 15 of three, one good; n = 60, grand mean 16/60, typical (60 - 150/60)/29
    uneven = habits_of(GATES, told(*[[1.0]] * 15, *[[0.0] * 3] * 14, [1.0, 0.0, 0.0]), {}).usual["task_success"]
    assert (uneven.mean, uneven.within) == (pytest.approx((15 + 1 / 3) / 30), pytest.approx(2 / 3 / 30))
    assert uneven.worth == pytest.approx(0.122600, abs=1e-5)
    steady = habits_of(GATES, told(*[[1.0, 1.0]] * 15, *[[0.0, 0.0]] * 15), {}).usual["task_success"]
    assert (steady.worth, steady.within) == (0.1, 0.0), "a tenth of a turn at least"


def test_nothing_is_usual_where_people_are_few_or_came_once_or_are_all_alike() -> None:
    assert habits_of(GATES, told(*[[1.0, 0.0]] * 29), {}) == Habits()
    for people in ([[1.0], [0.0]] * 20, [[1.0, 0.0]] * 30):
        assert habits_of(GATES, told(*people), {}).usual == {}
    silent = [session(n, actor=f"p{n % 30}", labelled=False) for n in range(60)]
    assert habits_of(GATES, silent, {}).usual == {}


def test_the_heaviest_twentieth_had_more_turns_than_most() -> None:
    # 40 people: the 95 % quantile of their turns is that of the second from the top
    few = habits_of(GATES, told(*[[1.0]] * 38, [1.0] * 5, [1.0] * 9), {})
    assert (few.heaviest, few.heavy) == ({"p38", "p39"}, 5)
    assert (habits_of(GATES, told(*[[1.0]] * 40), {}).heaviest, habits_of(GATES, told(*[[1.0]] * 40), {}).heavy) == (set(), 2)
    many = habits_of(GATES, told(*[[1.0] * 3] * 36, *[[1.0] * 4] * 4), {})
    assert (len(many.heaviest), many.heavy) == (4, 4)


def test_a_hundred_people_of_the_later_half_are_enough_to_explain_something_and_nine_tenths_is_the_most() -> None:
    def explained(people: int) -> float:
        always = [session(n, actor=f"p{n % people}", signals={"task_success": float(n % people % 2)}) for n in range(people * 12)]
        return with_explained(GATES, always)["task_success"].explained

    assert (explained(100), explained(99)) == (0.9, 0.0)
    same = [session(n, actor=f"p{n % 100}", signals={"task_success": 1.0}) for n in range(1200)]
    assert with_explained(GATES, same)["task_success"].explained == 0.0
