import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.evaluation.self_test import signs_are_right
from pipelines.evaluation.statistics import betting
from pipelines.evaluation.statistics.betting import Bet, EProcess, Tail
from pipelines.evaluation.statistics.units import Units, cluster
from tests.unit.pipelines.evaluation.statistics.draws import drawn_units

ANY_PROCESS = st.sampled_from(
    [
        betting.harm(margin=0.0, variance=0.24),
        betting.harm(margin=0.0075, variance=0.24),
        betting.harm(margin=0.0, variance=0.004, targets=betting.rate_targets(0.004)),
        betting.non_inferiority(margin=0.015, variance=0.24),
        betting.two_sided(margin=0.03, variance=0.2),
    ]
)
OUTCOMES = st.lists(
    st.tuples(st.floats(0.0, 1.0), st.booleans(), st.sampled_from([0.05, 0.25, 0.5]), st.floats(0.0, 1.0)),
    min_size=1,
    max_size=40,
)


def units_of(rows: list[tuple[float, bool, float, float]]) -> Units:
    outcome, treated, probability, baseline = zip(*rows, strict=True)
    return Units.observed(outcome=outcome, treated=treated, probability=probability, baseline=baseline)


def single(tail: Tail, threshold: float, target: float) -> EProcess:
    return EProcess(legs=(Bet(tail=tail, threshold=threshold, targets=(target,), variance=0.24),))


def test_harm_factor_by_hand() -> None:
    # pi = 0.5, m = 0.6: lambda = min(0.1 * 0.25/0.24, 0.95/1.2) = 0.1041667
    # treated failure Z = -1.2: 1 + 0.1041667 * 1.2 = 1.125; treated success Z = 0.8: 1 - 0.0833333 = 0.9166667
    units = Units.observed(outcome=[0.0, 1.0], treated=True, probability=0.5, baseline=0.6)
    path = betting.log_e_path(single(Tail.BELOW, 0.0, 0.1), units)
    assert np.exp(path).tolist() == pytest.approx([1.125, 1.125 * 0.9166667])


def test_the_stake_is_capped_so_that_a_bet_keeps_a_twentieth() -> None:
    # pi = 0.05, m = 0: zmax = 20; target 1: 0.0475/0.24 = 0.198 > 0.95/20 = 0.0475. Treated success Z = 20: 1 - 0.95
    units = Units.observed(outcome=[1.0], treated=True, probability=0.05, baseline=0.0)
    assert math.exp(betting.log_e_path(single(Tail.BELOW, 0.0, 1.0), units)[0]) == pytest.approx(0.05)


def test_non_inferiority_factor_by_hand() -> None:
    # delta = 0.015, target 0.03: lambda = 0.03 * 0.25/0.24 = 0.03125; Z = 0.8: 1 + 0.03125 * 0.815 = 1.02546875
    units = Units.observed(outcome=[1.0], treated=True, probability=0.5, baseline=0.6)
    assert math.exp(betting.log_e_path(single(Tail.ABOVE, -0.015, 0.03), units)[0]) == pytest.approx(1.02546875)


def test_the_mixture_is_the_plain_average_of_capitals() -> None:
    process = betting.harm(margin=0.0, variance=0.24, targets=(0.1, 0.2))
    # capitals 1.125 and 1 + 0.2083333 * 1.2 = 1.25: mean 1.1875
    units = Units.observed(outcome=[0.0], treated=True, probability=0.5, baseline=0.6)
    assert math.exp(betting.log_e_path(process, units)[0]) == pytest.approx(1.1875)


def test_two_sided_is_the_average_of_both_directions() -> None:
    units = Units.observed(outcome=[0.0], treated=True, probability=0.5, baseline=0.6)
    process = betting.two_sided(margin=0.0, variance=0.24, targets=(0.1,))
    # below: 1.125; above: 1 + 0.1041667 * (-1.2) = 0.875; mean 1
    assert math.exp(betting.log_e_path(process, units)[0]) == pytest.approx(1.0)


def test_targets_of_rare_metrics_follow_their_rate() -> None:
    assert betting.rate_targets(0.004) == pytest.approx((0.002, 0.004, 0.008, 0.016, 0.032, 0.064))
    assert betting.rate_targets(0.2) == pytest.approx((0.1, 0.2, 0.4, 0.8))  # 1.6 and 3.2 are no rates
    assert betting.harm_targets(0.6) == betting.HARM_TARGETS
    assert betting.harm_targets(0.996) == pytest.approx(betting.rate_targets(0.004))
    assert betting.harm_targets(0.02) == betting.rare_success_targets(0.02)
    assert min(betting.harm_targets(0.0) + betting.harm_targets(1.0)) > 0.0
    assert betting.rare_success_targets(0.02) == pytest.approx((0.002, 0.004, 0.008, 0.012, 0.016, 0.02))


@given(rows=OUTCOMES, process=ANY_PROCESS, cut=st.integers(0, 40))
def test_a_stream_cut_anywhere_gives_the_same_number_as_the_batch(
    rows: list[tuple[float, bool, float, float]], process: EProcess, cut: int
) -> None:
    units = units_of(rows)
    wealth = betting.start(process)
    for part in (units.between(0, cut), units.between(cut, len(units))):
        wealth = betting.advance(process, wealth, part)
    assert wealth.units == len(units)
    assert betting.log_e(process, wealth) == pytest.approx(betting.log_e_path(process, units)[-1], abs=1e-12)


@given(rows=OUTCOMES, process=ANY_PROCESS)
def test_one_unit_at_a_time_gives_the_same_number_as_the_batch(rows: list[tuple[float, bool, float, float]], process: EProcess) -> None:
    units = units_of(rows)
    wealth = betting.start(process)
    path: list[float] = []
    for i in range(len(units)):
        wealth = betting.advance(process, wealth, units.between(i, i + 1))
        path.append(betting.log_e(process, wealth))
    assert path == pytest.approx(betting.log_e_path(process, units).tolist(), abs=1e-12)


@given(rows=OUTCOMES, process=ANY_PROCESS)
def test_no_unit_ever_costs_more_than_nineteen_twentieths(rows: list[tuple[float, bool, float, float]], process: EProcess) -> None:
    assert np.exp(betting.log_factors(process, units_of(rows))).min() >= 0.05 - 1e-9


@given(pi=st.floats(0.01, 0.99), m=st.floats(0.0, 1.0), rate=st.floats(0.02, 0.98), process=ANY_PROCESS, gap=st.floats(0, 0.3))
def test_under_the_null_a_bet_wins_nothing_on_average(pi: float, m: float, rate: float, process: EProcess, gap: float) -> None:
    """Exact expectation over the four cells of arm x outcome, at and inside H0, for every leg."""
    units = Units.observed(outcome=[1.0, 0.0, 1.0, 0.0], treated=[1, 1, 0, 0], probability=pi, baseline=m)
    for leg in process.legs:
        inside = gap if leg.tail is Tail.BELOW else -gap
        canary = float(np.clip(rate + leg.threshold + inside, 0.0, 1.0))
        if (canary - rate < leg.threshold) != (leg.tail is Tail.ABOVE) and canary - rate != leg.threshold:
            continue  # clipping left H0
        chance = np.array([pi * canary, pi * (1 - canary), (1 - pi) * rate, (1 - pi) * (1 - rate)])
        gain = chance @ np.exp(betting.log_factors(EProcess(legs=(leg,)), units))
        assert gain.max() <= 1.0 + 1e-9


def test_long_streams_neither_overflow_nor_vanish() -> None:
    process = betting.harm(margin=0.0, variance=0.24)
    terrible = drawn_units(effect=-0.5, n=50_000, seed=1)
    assert math.isfinite(betting.log_e_path(process, terrible)[-1])
    splendid = drawn_units(effect=0.39, n=50_000, seed=1)
    assert math.isfinite(betting.log_e_path(process, splendid)[-1])


def test_an_identical_canary_is_seldom_aborted_under_continuous_peeking() -> None:
    process, needed = betting.harm(margin=0.0, variance=0.24), betting.evidence_needed(0.05)
    aborted = [betting.log_e_path(process, drawn_units(effect=0.0, n=4000, seed=seed)).max() >= needed for seed in range(400)]
    # Ville: at most 0.05; three standard errors at 400 repetitions are 0.033
    assert np.mean(aborted) <= 0.083


def test_a_ten_point_harm_is_found_within_a_thousand_units() -> None:
    process, needed = betting.harm(margin=0.0, variance=0.24), betting.evidence_needed(0.05)
    found = [int(np.argmax(betting.log_e_path(process, drawn_units(effect=-0.1, n=4000, seed=seed)) >= needed)) for seed in range(200)]
    assert 400 < np.median(found) < 1000  # measured 700 (sheet S1)


def test_small_shares_and_rare_successes_do_not_raise_false_alarms() -> None:
    """share 5 %, p = 2 %: vendor sequences abort 48-60 % of healthy canaries here (sheet S3b)."""
    process = betting.harm(margin=0.0, variance=0.0196, targets=betting.rare_success_targets(0.02))
    needed = betting.evidence_needed(0.05)
    aborted = [
        betting.log_e_path(process, drawn_units(effect=0.0, n=5000, seed=s, share=0.05, rate=0.02)).max() >= needed for s in range(400)
    ]
    assert np.mean(aborted) <= 0.083


def test_a_ramp_with_a_drifting_baseline_is_no_effect() -> None:
    """Pooled means would call this A/A canary 5 pp better in every run (sheet S5b)."""
    process, needed = betting.two_sided(margin=0.0, variance=0.25), betting.evidence_needed(0.05)
    share = np.repeat([0.05, 0.25, 0.5], [1000, 2000, 3000])
    rate = 0.6 + 0.08 * np.sin(np.linspace(-np.pi / 2, np.pi / 2, 6000))
    rng = np.random.default_rng(5)
    rejected = 0
    for _ in range(200):
        units = Units.observed(
            outcome=(rng.random(6000) < rate).astype(float),
            treated=rng.random(6000) < share,
            probability=share,
            baseline=0.6,
        )
        rejected += bool(betting.log_e_path(process, units).max() >= needed)
    assert rejected / 200 <= 0.05 + 0.047


def test_the_sign_convention_holds() -> None:
    assert signs_are_right()


@pytest.mark.parametrize(
    ("threshold", "targets", "variance", "sentence"),
    [(2.0, (0.1,), 0.24, "2 pp"), (0.0, (), 0.24, "target"), (0.0, (0.1,), 0.0, "variance"), (math.nan, (0.1,), 0.2, "nan")],
)
def test_a_bet_that_makes_no_sense_is_refused(threshold: float, targets: tuple[float, ...], variance: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Bet(tail=Tail.BELOW, threshold=threshold, targets=targets, variance=variance)


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_swapping_the_arms_swaps_the_tails(seed: int) -> None:
    units = drawn_units(effect=-0.05, n=300, seed=seed)
    swapped = Units.observed(outcome=units.outcome, treated=~units.treated, probability=1 - units.probability, baseline=units.baseline)
    below = betting.log_e_path(single(Tail.BELOW, 0.0, 0.1), units)
    above = betting.log_e_path(single(Tail.ABOVE, 0.0, 0.1), swapped)
    assert below == pytest.approx(above)


def test_people_who_come_back_do_not_raise_false_alarms() -> None:
    """400 people, 20 sessions each, ICC 0.2: sessions as units would abort a third of identical canaries (sheet S5a)."""
    rng, process, needed = np.random.default_rng(11), betting.harm(margin=0.0, variance=0.24), betting.evidence_needed(0.05)
    keys = [str(person) for person in range(400) for _ in range(20)]
    aborted = 0
    for _ in range(150):
        treated, rate = np.repeat(rng.random(400) < 0.5, 20), np.repeat(rng.beta(2.4, 1.6, 400), 20)
        value = (rng.random(8000) < rate).astype(float)
        units = cluster(keys=keys, value=value, treated=treated, probability=0.5, baseline=0.6, closed_at=np.arange(8000))
        aborted += bool(betting.log_e_path(process, units).max() >= needed)
    assert aborted / 150 <= 0.05 + 0.053
