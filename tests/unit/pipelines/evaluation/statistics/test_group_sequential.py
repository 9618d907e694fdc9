import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.evaluation.statistics import non_inferiority
from pipelines.evaluation.statistics.betting import Tail
from pipelines.evaluation.statistics.group_sequential import (
    GroupSequentialPlan,
    Totals,
    boundaries,
    evaluate,
    expected_events,
    look_counts,
    score_z,
    totals_at,
)
from pipelines.evaluation.statistics.non_inferiority import NonInferiorityPlan
from pipelines.evaluation.statistics.units import FloatArray, Units
from tests.unit.pipelines.evaluation.statistics.draws import drawn_units


def totals(nt: float, nc: float, st_: float, sc: float) -> Totals:
    def one(x: float) -> FloatArray:
        return np.array([x])

    return Totals(n_treated=one(nt), n_control=one(nc), sum_treated=one(st_), sum_control=one(sc), sum_squares=one(st_ + sc))


def test_a_single_look_spends_everything_at_the_fixed_sample_quantile() -> None:
    assert boundaries(0.025, 1)[0] == pytest.approx(1.959964, abs=1e-5)


def test_boundaries_spend_what_lan_and_demets_allow() -> None:
    """One million Brownian paths: alpha t^2 is spent by t = 0.25, 0.5, 0.75, 1."""
    rng, alpha = np.random.default_rng(0), 0.025
    crossed = np.zeros(20)
    bounds = np.array(boundaries(alpha, 20))
    for _ in range(10):
        paths = np.cumsum(rng.standard_normal((100_000, 20)), axis=1) / np.sqrt(np.arange(1, 21))
        first = (paths >= bounds).cumsum(axis=1) > 0
        crossed += first.mean(axis=0) / 10
    for look in (5, 10, 15, 20):
        assert crossed[look - 1] == pytest.approx(alpha * (look / 20) ** 2, abs=4 * (alpha / 1e6) ** 0.5)


def test_boundaries_fall_from_look_to_look() -> None:
    assert np.all(np.diff(boundaries(0.025, 20)) < 0)
    assert np.all(np.array(boundaries(0.04, 20)) < np.array(boundaries(0.025, 20)))


def test_score_statistic_by_hand() -> None:
    # 100 v 100, 50 v 60 successes: pooled 0.55, diff -0.1, var 0.2475 * (2/100) * 200/199 = 0.00497487; z = -1.41776
    assert score_z(totals(100, 100, 50, 60), 0.0).item() == pytest.approx(-1.41776, abs=1e-4)


def test_score_statistic_for_non_inferiority_by_hand() -> None:
    # threshold -0.1 at 50 v 60: difference 0, so z = 0 whatever the variance
    assert score_z(totals(100, 100, 50, 60), -0.1).item() == pytest.approx(0.0, abs=1e-12)
    # 60 v 60, threshold -0.1: rates under H0 0.55 and 0.65, var (0.2475 + 0.2275)/100 * 200/199 = 0.00477387; z = 1.44733
    assert score_z(totals(100, 100, 60, 60), -0.1).item() == pytest.approx(1.44733, abs=1e-4)


def test_one_lost_success_at_a_small_share_is_not_significant() -> None:
    """The Wald variance of an arm with 0 of 20 is zero, so its z is minus infinity in effect; the score says -0.6."""
    assert score_z(totals(20, 380, 0, 8), 0.0).item() == pytest.approx(-0.654, abs=0.01)


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_score_is_antisymmetric_in_the_arms(seed: int) -> None:
    nt, nc, a, b = np.random.default_rng(seed).integers(1, 50, 4)
    one = score_z(totals(nt + a, nc + b, a, b), 0.0).item()
    other = score_z(totals(nc + b, nt + a, b, a), 0.0).item()
    assert one == pytest.approx(-other)


def test_strata_keep_a_ramp_with_drift_from_becoming_an_effect() -> None:
    """Simpson: both arms succeed at 0.4 in stratum 0 and at 0.8 in stratum 1, but the canary grew in between."""
    rows = Totals(
        n_treated=np.array([50.0, 500.0]),
        n_control=np.array([950.0, 500.0]),
        sum_treated=np.array([20.0, 400.0]),
        sum_control=np.array([380.0, 400.0]),
        sum_squares=np.array([400.0, 800.0]),
    )
    assert score_z(rows, 0.0).item() == pytest.approx(0.0, abs=1e-12)
    pooled = totals(550, 1450, 420, 780)
    assert score_z(pooled, 0.0).item() > 8.0


def test_looks_come_at_twentieths_of_the_declared_information() -> None:
    plan = GroupSequentialPlan(n_max=2000, alpha=0.025)
    assert look_counts(plan, drawn_units(effect=0.0, n=450, seed=1)).tolist() == [100, 200, 300, 400]
    # at 5 % a unit is worth 0.0475/0.25 = 0.19 of one at 50 %: the first look needs 100/0.19 = 527 units
    assert look_counts(plan, drawn_units(effect=0.0, n=600, seed=1, share=0.05)).tolist() == [527]


def test_looks_with_too_few_expected_events_cannot_reject() -> None:
    plan = GroupSequentialPlan(n_max=2000, alpha=0.025)
    result = evaluate(plan, drawn_units(effect=0.0, n=2000, seed=1, rate=0.005), threshold=0.0, tail=Tail.BELOW)
    assert result.is_exhausted
    assert not any(look.counted for look in result.looks)


def test_expected_events_by_hand() -> None:
    # pooled 10/400: canary 20 * 0.025 = 0.5 successes
    assert expected_events(totals(20, 380, 0, 10)).item() == pytest.approx(0.5)


def test_harm_is_found_and_gain_is_not_harm() -> None:
    plan = GroupSequentialPlan(n_max=5000, alpha=0.025)
    worse = evaluate(plan, drawn_units(effect=-0.08, n=5000, seed=3), threshold=0.0, tail=Tail.BELOW)
    better = evaluate(plan, drawn_units(effect=0.08, n=5000, seed=3), threshold=0.0, tail=Tail.BELOW)
    assert worse.rejected
    assert worse.rejected_at in [look.units for look in worse.looks]
    assert not better.rejected


def test_units_beyond_the_declared_end_change_nothing() -> None:
    plan = GroupSequentialPlan(n_max=1000, alpha=0.025)
    units = drawn_units(effect=0.0, n=3000, seed=2)
    assert evaluate(plan, units, threshold=0.0, tail=Tail.BELOW) == evaluate(plan, units.first(1000), threshold=0.0, tail=Tail.BELOW)


def test_a_declared_end_too_small_for_twenty_looks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 200"):
        GroupSequentialPlan(n_max=100, alpha=0.025)


def test_an_identical_canary_is_seldom_aborted_at_a_small_share() -> None:
    """share 5 %, p = 2 %: the Wald variance aborts 40 % (sheet S3b)."""
    plan = GroupSequentialPlan(n_max=20_000, alpha=0.05, share=0.05)
    rejected = [
        evaluate(
            plan,
            drawn_units(effect=0.0, n=20_000, seed=s, share=0.05, rate=0.02),
            threshold=0.0,
            tail=Tail.BELOW,
        ).rejected
        for s in range(200)
    ]
    assert np.mean(rejected) <= 0.05 + 0.047


def test_totals_are_sums_over_the_first_units() -> None:
    units = Units.observed(outcome=[1.0, 0.5, 0.0, 1.0], treated=[1, 0, 1, 0], probability=0.5, baseline=0.5, stratum=[0, 0, 1, 1])
    sums = totals_at(units, [2, 4])
    assert sums.n_treated.tolist() == [[1, 0], [1, 1]]
    assert sums.sum_control.tolist() == [[0.5, 0], [0.5, 1]]
    assert sums.sum_squares.tolist() == [[1.25, 0], [1.25, 1]]


PLAN = NonInferiorityPlan(margin=0.05, variance=0.24, n_max=4000)


def test_a_harmless_candidate_is_non_inferior_and_one_at_the_margin_seldom() -> None:
    promoted = {
        true: np.mean([non_inferiority.judge(PLAN, drawn_units(effect=true, n=4000, seed=s)).rejected for s in range(300)])
        for true in (0.0, -0.05)
    }
    # 1.3 x 6.18 x 0.24/(0.25 x 0.0025) = 3085 units give 80 %; 4000 give about 88 %
    assert promoted[0.0] >= 0.80
    assert promoted[-0.05] <= 0.05 + 0.038


def test_constant_outcomes_never_promote() -> None:
    """Kayenta passes identical data; a metric that never moves is a broken instrument."""
    units = Units.observed(outcome=np.ones(4000), treated=np.arange(4000) % 2, probability=0.5, baseline=0.6)
    verdict = non_inferiority.judge(PLAN, units)
    assert verdict.is_constant
    assert not verdict.rejected


def test_no_units_never_promote() -> None:
    verdict = non_inferiority.judge(PLAN, drawn_units(effect=0.0, n=1, seed=0).first(0))
    assert not verdict.rejected


def test_a_declared_end_of_ten_units_a_look_is_enough() -> None:
    assert GroupSequentialPlan(n_max=200, alpha=0.025).looks == 20
    for n_max, looks in ((199, 20), (29, 3)):
        with pytest.raises(ValueError, match=f"at least {10 * looks}"):
            GroupSequentialPlan(n_max=n_max, alpha=0.025, looks=looks)


@pytest.mark.parametrize(
    ("n", "rate", "counted"), [(80, 0.5, True), (76, 0.5, False), (200, 0.2, True), (190, 0.2, False), (160, 0.75, True)]
)
def test_a_look_counts_from_twenty_expected_events_and_non_events_in_an_arm(n: int, rate: float, counted: bool) -> None:
    # 80 units, 40 an arm, half of them good: 20 of each; 76: 19
    outcome = np.repeat([1.0, 0.0], [round(n * rate), n - round(n * rate)])
    units = Units.observed(outcome=outcome, treated=np.arange(n) % 2, probability=0.5, baseline=0.5)
    result = evaluate(GroupSequentialPlan(n_max=n, alpha=0.025, looks=1), units, threshold=0.0, tail=Tail.BELOW)
    assert [(look.number, look.units, look.counted) for look in result.looks] == [(1, n, counted)]


def test_expected_non_events_by_hand() -> None:
    # pooled 390/400: canary 20 * 0.025 = 0.5 failures
    assert expected_events(totals(20, 380, 20, 370)).item() == pytest.approx(0.5)
    # two strata add up: 20 * 0.1 + 30 * 0.2 = 8 expected in the canary
    rows = Totals(
        n_treated=np.array([20.0, 30.0]), n_control=np.array([80.0, 70.0]), sum_treated=np.array([2.0, 6.0]),
        sum_control=np.array([8.0, 14.0]), sum_squares=np.array([10.0, 20.0]),
    )  # fmt: skip
    assert expected_events(rows).item() == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("rows", "threshold", "z"),
    [
        # 2 of 100 each, threshold -.1: rates 0 (not -.03) and .07, variance .07 * .93/100 * 200/199; .1 over its root
        (totals(100, 100, 2, 2), -0.1, 3.909498),
        (totals(100, 100, 98, 98), 0.1, -3.909498),
        # one unit an arm: pooled 1/2, variance (1/4 + 1/4) * 2/1
        (totals(1, 1, 1, 0), 0.0, 1.0),
        (totals(10, 10, 10, 10), 0.0, 0.0),
        (totals(10, 0, 5, 0), 0.0, 0.0),
        (totals(0, 10, 0, 5), 0.0, 0.0),
        # outcomes of .5 only vary less than 0/1: no dispersion, no evidence
        (Totals(n_treated=np.array([4.0]), n_control=np.array([4.0]), sum_treated=np.array([2.0]), sum_control=np.array([2.0]),
                sum_squares=np.array([2.0])), 0.1, 0.0),
        # 0, .5, .5, 1 in both arms, .5 of each moved: dispersion (12/32 - 1/4)/(1/4) = 1/2
        (Totals(n_treated=np.array([16.0]), n_control=np.array([16.0]), sum_treated=np.array([10.0]), sum_control=np.array([6.0]),
                sum_squares=np.array([12.0])), 0.0, 1.968502),
    ],
)  # fmt: skip
def test_the_score_at_its_edges_by_hand(rows: Totals, threshold: float, z: float) -> None:
    assert score_z(rows, threshold).item() == pytest.approx(z, abs=1e-5)


def test_a_stratum_with_one_arm_only_says_nothing() -> None:
    alone = score_z(totals(100, 100, 50, 60), 0.0).item()
    rows = Totals(
        n_treated=np.array([100.0, 10.0]), n_control=np.array([100.0, 0.0]), sum_treated=np.array([50.0, 10.0]),
        sum_control=np.array([60.0, 0.0]), sum_squares=np.array([110.0, 10.0]),
    )  # fmt: skip
    assert score_z(rows, 0.0).item() == alone


def test_what_is_usual_is_taken_off_before_the_arms_are_compared() -> None:
    # 50 of 100 against 60 of 100, everybody's usual value .3: z at 0 stays, and the threshold of -.1 is exactly what is seen
    outcome, treated = np.repeat([1.0, 0.0, 1.0, 0.0], [50, 50, 60, 40]), np.repeat([True, False], 100)
    plan = GroupSequentialPlan(n_max=200, alpha=0.025, looks=1)
    for threshold, z in ((0.0, 1.41776), (-0.1, 0.0)):
        units = Units.observed(outcome=outcome, treated=treated, probability=0.5, baseline=0.3, usual=0.3)
        assert evaluate(plan, units, threshold=threshold, tail=Tail.BELOW).looks[0].z == pytest.approx(z, abs=1e-4)
    known = Units.observed(outcome=outcome, treated=treated, probability=0.5, baseline=0.3, usual=outcome)
    assert evaluate(plan, known, threshold=0.0, tail=Tail.BELOW).looks[0].z == 0.0


def test_a_look_rejects_at_its_boundary_and_says_after_how_many_units() -> None:
    plan = GroupSequentialPlan(n_max=400, alpha=0.025, looks=2)
    # all of the canary's fail: the first look, at 200, is already beyond its boundary
    n = np.arange(400)
    units = Units.observed(outcome=np.where(n % 2, 0.0, n % 4 == 0), treated=n % 2, probability=0.5, baseline=0.5)
    result = evaluate(plan, units, threshold=0.0, tail=Tail.BELOW)
    assert ([look.units for look in result.looks], result.rejected_at, result.is_exhausted) == ([200, 400], 200, True)
    early = evaluate(plan, units.first(399), threshold=0.0, tail=Tail.BELOW)
    assert ([look.units for look in early.looks], early.is_exhausted) == ([200], False)
    assert evaluate(plan, units, threshold=0.0, tail=Tail.ABOVE).rejected_at is None
