import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluation.statistics.units import Units, cluster, effect, effect_lower_bound, effect_upper_bound, running_mean, with_usual

inside = st.floats(0.01, 0.99)


def test_effect_by_hand() -> None:
    # (1 - 0.6)/0.5 = 0.8 treated, -0.8 control; (0 - 0.6)/0.05 = -12 treated; (0 - 0.6) * -1/0.95 = 0.631578...
    units = Units.observed(
        outcome=[1.0, 1.0, 0.0, 0.0],
        treated=[True, False, True, False],
        probability=[0.5, 0.5, 0.05, 0.05],
        baseline=0.6,
    )
    assert effect(units).tolist() == pytest.approx([0.8, -0.8, -12.0, 0.6 / 0.95])
    # zmax = max(0.4/0.05, 0.6/0.95) = 8, zmin = -max(0.6/0.05, 0.4/0.95) = -12
    assert effect_upper_bound(units).tolist() == pytest.approx([1.2, 1.2, 8.0, 8.0])
    assert effect_lower_bound(units).tolist() == pytest.approx([-1.2, -1.2, -12.0, -12.0])


@given(p_champion=inside, p_canary=inside, pi=inside, m=st.floats(0.0, 1.0))
def test_the_mean_of_z_is_the_effect_for_any_baseline_and_share(p_champion: float, p_canary: float, pi: float, m: float) -> None:
    cells = list(itertools.product([1.0, 0.0], [True, False]))
    units = Units.observed(outcome=[y for y, _ in cells], treated=[a for _, a in cells], probability=pi, baseline=m)
    rate = np.where(units.treated, p_canary, p_champion)
    chance = np.where(units.treated, pi, 1 - pi) * np.where(units.outcome == 1.0, rate, 1 - rate)
    assert float(chance @ effect(units)) == pytest.approx(p_canary - p_champion, abs=1e-9)


@given(y=st.floats(0.0, 1.0), pi=inside, m=st.floats(0.0, 1.0), treated=st.booleans())
def test_z_stays_within_its_bounds(y: float, pi: float, m: float, treated: bool) -> None:
    units = Units.observed(outcome=[y], treated=treated, probability=pi, baseline=m)
    assert effect_lower_bound(units)[0] - 1e-9 <= effect(units)[0] <= effect_upper_bound(units)[0] + 1e-9


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("outcome", [math.nan, 0.0], "outcome is missing"),
        ("outcome", [1.5, 0.0], "outside"),
        ("probability", [math.nan, 0.5], "assignment probability"),
        ("probability", [1.0, 0.5], "assignment probability"),
        ("baseline", [math.nan, 0.5], "baseline"),
        ("closed_at", [2, 1], "closing order"),
        ("keys", ["a", "a"], "appears twice"),
    ],
)
def test_evidence_that_must_not_be_used_is_refused(field: str, value: list[object], sentence: str) -> None:
    good: dict[str, object] = {
        "outcome": [1.0, 0.0],
        "treated": [True, False],
        "probability": 0.5,
        "baseline": 0.5,
        "closed_at": [1, 2],
        "keys": ["a", "b"],
    }
    with pytest.raises(ValueError, match=sentence):
        Units.observed(**{**good, field: value})  # pyright: ignore[reportArgumentType]


def test_units_are_frozen() -> None:
    units = Units.observed(outcome=[1.0], treated=True, probability=0.5, baseline=0.5)
    with pytest.raises(ValueError, match="read-only"):
        units.outcome[0] = 0.0


def test_sessions_of_one_person_become_one_unit_that_closes_last() -> None:
    # ann: (1 + 0 + 0)/3 closing at 30; bob: 1 closing at 20. bob closes first.
    units = cluster(
        keys=["ann", "bob", "ann", "ann"],
        value=[1.0, 1.0, 0.0, 0.0],
        treated=[True, False, True, True],
        probability=0.25,
        baseline=0.5,
        closed_at=[10, 20, 30, 15],
    )
    assert units.outcome.tolist() == pytest.approx([1.0, 1 / 3])
    assert units.treated.tolist() == [False, True]
    assert units.closed_at.tolist() == [20, 30]


def test_a_unit_seen_in_two_arms_is_refused() -> None:
    with pytest.raises(ValueError, match="two arms"):
        cluster(keys=["ann", "ann"], value=[1.0, 0.0], treated=[True, False], probability=0.5, baseline=0.5, closed_at=0)


def test_constant_data_says_so() -> None:
    assert Units.observed(outcome=[1.0, 1.0], treated=[True, False], probability=0.5, baseline=0.5).is_constant
    assert not Units.observed(outcome=[1.0, 0.0], treated=[True, False], probability=0.5, baseline=0.5).is_constant


def test_running_mean_by_hand() -> None:
    # prior 0.5 worth 2 units: 1/2, (1 + 1)/3, (1 + 1 + 0)/4
    assert running_mean(np.array([1.0, 0.0, 1.0]), prior=0.5, strength=2.0).tolist() == pytest.approx([0.5, 2 / 3, 0.5])


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30), st.integers(0, 1000))
def test_baselines_never_look_at_their_own_or_later_outcomes(outcomes: list[float], seed: int) -> None:
    covariate = np.random.default_rng(seed).standard_normal(len(outcomes))
    whole, changed = np.array(outcomes), np.array(outcomes)
    changed[-1] = 1.0 - changed[-1]
    assert np.array_equal(running_mean(whole, prior=0.5), running_mean(changed, prior=0.5))
    usual = np.clip(0.5 + covariate / 10.0, 0.0, 1.0)
    assert np.array_equal(with_usual(whole, usual), with_usual(changed, usual))


def test_what_is_usual_shrinks_the_variance_of_z_by_what_it_explains() -> None:
    rng = np.random.default_rng(3)
    covariate = rng.standard_normal(20_000)
    outcome = np.clip(0.5 + 0.2 * covariate + 0.1 * rng.standard_normal(20_000), 0.0, 1.0)
    treated = rng.random(20_000) < 0.5
    plain = Units.observed(outcome=outcome, treated=treated, probability=0.5, baseline=0.5)
    cuped = Units.observed(
        outcome=outcome,
        treated=treated,
        probability=0.5,
        baseline=with_usual(outcome, np.clip(0.5 + 0.2 * covariate, 0.0, 1.0)),
    )
    # R^2 = 0.04/(0.04 + 0.01) = 0.8 before clipping
    assert effect(cuped).var() / effect(plain).var() == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("outcome", [0.0, 1.0], [-0.001, 1.0]),
        ("outcome", [1.0, 0.0], [1.0, 1.001]),
        ("probability", [0.001, 0.999], [0.0, 0.5]),
        ("probability", [0.5, 0.5], [0.5, 1.0]),
        ("baseline", [0.0, 1.0], [-0.001, 1.0]),
        ("baseline", [1.0, 0.0], [1.0, 1.001]),
        ("usual", [0.0, 1.0], [-0.001, 1.0]),
        ("usual", [1.0, 0.0], [1.0, 1.001]),
        ("usual", [0.5, 0.5], [0.5, math.nan]),
        ("closed_at", [2, 2], [2, 1]),
        ("keys", ["a", "b"], ["a", "a"]),
    ],
)
def test_evidence_is_taken_up_to_each_of_its_bounds(field: str, taken: list[object], refused: list[object]) -> None:
    good: dict[str, object] = {"outcome": [1.0, 0.0], "treated": [True, False], "probability": 0.5, "baseline": 0.5}
    assert len(Units.observed(**{**good, field: taken})) == 2  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        Units.observed(**{**good, field: refused})  # pyright: ignore[reportArgumentType]


def test_what_nobody_said_is_one_stratum_and_the_order_of_the_rows() -> None:
    units = Units.observed(outcome=[1.0, 0.0, 1.0], treated=True, probability=0.5, baseline=0.5, usual=[0.1, 0.2, 0.3])
    assert (units.stratum.tolist(), units.closed_at.tolist()) == ([0, 0, 0], [0, 1, 2])
    part = units.between(1, 3)
    assert part.usual is not None
    assert (len(part), part.closed_at.tolist(), part.usual.tolist()) == (2, [1, 2], [0.2, 0.3])
    assert (units.is_constant, units.between(1, 2).is_constant, units.first(0).is_constant) == (False, True, True)


def test_a_prior_is_worth_a_hundred_units() -> None:
    # half of a hundred, then 51 of 101 and 51 of 102
    assert running_mean(np.array([1.0, 0.0, 1.0]), prior=0.5).tolist() == pytest.approx([0.5, 51 / 101, 51 / 102])
    # what differs: +.5, then nothing known of it for the first
    assert with_usual(np.array([1.0, 0.0]), np.array([0.5, 0.5])).tolist() == pytest.approx([0.5, 0.5 + 0.5 / 101])
    assert with_usual(np.array([1.0, 1.0]), np.array([0.0, 1.0])).tolist() == [0.0, 1.0], "no more than one"


@pytest.mark.parametrize("field", ["treated", "probability", "stratum"])
def test_whoever_was_drawn_twice_is_no_unit(field: str) -> None:
    rows: dict[str, object] = {"treated": [True, True], "probability": [0.5, 0.5], "stratum": [1, 1], field: [False, True]}
    if field != "treated":
        rows[field] = [0.25, 0.5] if field == "probability" else [1, 2]
    with pytest.raises(ValueError, match="two arms"):
        cluster(keys=["a", "a"], value=[1.0, 0.0], baseline=0.5, closed_at=[1, 2], **rows)  # pyright: ignore[reportArgumentType]
