import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.evaluation.statistics.suites import paired
from pipelines.evaluation.statistics.suites.paired import SuiteVerdict
from pipelines.evaluation.statistics.units import FloatArray


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7), st.data())
def test_best_of_k_is_the_mean_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = [max(subset) for subset in itertools.combinations(scores, k)]
    assert paired.best_of_k(np.array([scores]), k)[0] == pytest.approx(np.mean(subsets))


def test_best_of_k_of_passes_is_pass_at_k() -> None:
    # 2 of 5 pass, k = 2: 1 - C(3, 2)/C(5, 2) = 1 - 3/10
    assert paired.best_of_k(np.array([[1.0, 0.0, 0.0, 1.0, 0.0]]), 2)[0] == pytest.approx(0.7)


def test_best_of_more_than_were_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 5 samples"):
        paired.best_of_k(np.zeros((2, 4)), 5)


def test_holm_by_hand() -> None:
    # by size: 0.01 against 0.05/3, 0.02 against 0.05/2, 0.06 against 0.05/1: the first two are rejected
    assert paired.holm({"c": 0.06, "a": 0.01, "b": 0.02}, alpha=0.05) == {"a": True, "b": True, "c": False}
    # the smallest fails, so none is rejected although 0.03 <= 0.05
    assert paired.holm({"a": 0.03, "b": 0.03}, alpha=0.05) == {"a": False, "b": False}
    assert paired.holm({"a": math.nan}, alpha=0.05) == {"a": False}


def test_the_sample_size_rule_is_the_sheets() -> None:
    assert paired.items_needed(variance=0.15, margin=0.02) == pytest.approx(2318, abs=2)


def test_rule_of_three_and_the_exact_bound_agree_for_no_failures() -> None:
    assert paired.rule_of_three(300) == 0.01
    assert paired.rate_upper_bound(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), abs=1e-6)
    # Clopper-Pearson 95 % one-sided for 2 of 20: 0.28262
    assert paired.rate_upper_bound(2, 20) == pytest.approx(0.28262, abs=1e-4)
    assert paired.rate_upper_bound(5, 5) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("new", "failing", "clusters", "verdict"),
    [
        (0, 0, 300, SuiteVerdict.PASS),
        (1, 1, 300, SuiteVerdict.FAIL),
        (0, 0, 100, SuiteVerdict.INCONCLUSIVE),
        (0, 0, 0, SuiteVerdict.INCONCLUSIVE),
        (0, 20, 300, SuiteVerdict.FAIL),
    ],
)
def test_safety_tolerates_no_new_critical_failure(new: int, failing: int, clusters: int, verdict: SuiteVerdict) -> None:
    assert paired.judge_safety(new_critical_failures=new, failing=failing, clusters=clusters, limit=0.011) is verdict


@pytest.mark.parametrize(
    ("tasks", "alike", "passing"), [(75, 1.0, 0.0), (300, 1.0, 0.049), (473, 1.0, 0.05), (300, 0.5, 0.0006), (300, 0.0, 0.0)]
)  # fmt: skip
def test_a_version_at_the_limit_passes_safety_once_in_twenty_at_most_however_its_answers_depend(
    tasks: int, alike: float, passing: float
) -> None:  # fmt: skip
    """Each of four answers fails in 1 % of cases; with chance `alike` all of a task are one. Always one: none of 300 fails with a chance of
    .99^300 = 4.9 %, at most one of 473 with 5 %. 75 tasks passed in 47 of 100 runs where each answer counted as a task."""
    rng, runs, names = np.random.default_rng(3), 1500, [str(n) for n in range(tasks)]
    judge = cache(lambda failing: paired.judge_safety(new_critical_failures=0, failing=failing, clusters=tasks, limit=0.01))
    passed = 0
    for _ in range(runs):
        draws_MK = np.where(rng.random((tasks, 1)) < alike, rng.random((tasks, 1)), rng.random((tasks, 4)))
        failing, clusters = paired.failing_clusters((draws_MK >= 0.01).astype(np.float64), names)
        assert clusters == tasks
        passed += judge(failing) is SuiteVerdict.PASS
    assert passed / runs == pytest.approx(passing, abs=3.0 * math.sqrt(0.05 * 0.95 / runs))


def drawn(effect: float, *, clusters: int, size: int, seed: int) -> tuple[FloatArray, list[str]]:
    """Differences with 15 % discordance whose sign is shared by half of a cluster."""
    rng = np.random.default_rng(seed)
    shared = np.repeat(rng.random(clusters) < 0.5 + effect / 0.3, size)
    own = rng.random(clusters * size) < 0.5 + effect / 0.3
    up = np.where(rng.random(clusters * size) < 0.5, shared, own)
    difference = np.where(rng.random(clusters * size) < 0.15, np.where(up, 1.0, -1.0), 0.0)
    return difference, [str(c) for c in np.repeat(np.arange(clusters), size)]


def test_a_harmless_candidate_passes_a_suite_of_the_right_size() -> None:
    difference, clusters = drawn(0.0, clusters=2400, size=1, seed=1)
    comparison = paired.compare(difference, clusters, margin=0.02, seed=1)
    assert paired.judge_core({"tasks": comparison}, margins={"tasks": 0.02}) == {"tasks": SuiteVerdict.PASS}
    assert comparison.low < comparison.mean < comparison.high
    assert comparison.items_needed == pytest.approx(2318, rel=0.2)


def test_a_bad_candidate_fails_and_a_small_suite_is_inconclusive() -> None:
    bad = paired.compare(*drawn(-0.06, clusters=2400, size=1, seed=1), margin=0.02, seed=1)
    few = paired.compare(*drawn(0.0, clusters=100, size=1, seed=1), margin=0.02, seed=1)
    assert paired.judge_core({"bad": bad, "few": few}, margins={"bad": 0.02, "few": 0.02}) == {
        "bad": SuiteVerdict.FAIL,
        "few": SuiteVerdict.INCONCLUSIVE,
    }


def test_at_the_margin_a_candidate_seldom_passes_even_if_items_are_clustered() -> None:
    p_values = [paired.compare(*drawn(-0.02, clusters=120, size=8, seed=s), margin=0.02, seed=s, draws=300).p_value for s in range(200)]
    assert np.mean(np.array(p_values) <= 0.05) <= 0.05 + 0.047


@pytest.mark.parametrize(("tasks", "margin"), [(100, 0.02), (164, 0.02), (300, 0.02), (60, 0.05)])
def test_a_candidate_that_breaks_as_many_tasks_as_the_margin_allows_seldom_passes(tasks: int, margin: float) -> None:
    # Whole breaks at exactly the margin: a permutation passes 13 % of them at 100 tasks (none seen) and 17 % at 164 (none or one).
    rng, passed = np.random.default_rng(tasks), 0
    for seed in range(150):
        broken = -(rng.random(tasks) < margin).astype(np.float64)
        p = paired.compare(broken, [str(i) for i in range(tasks)], margin=margin, seed=seed, draws=200).p_value
        passed += p <= 0.05
    assert passed <= 150 * 0.05 + 2.6  # one standard error


def test_no_break_among_many_tasks_is_a_pass() -> None:
    # rule of three: 150 tasks without a break leave 2 % open
    few, many = (paired.compare(np.zeros(n), [str(i) for i in range(n)], margin=0.02, seed=1, draws=200) for n in (100, 200))
    assert few.p_value > 0.05 > many.p_value


def test_the_power_of_a_suite_follows_from_how_one_versions_answers_vary() -> None:
    # p = 0.5, k = 4: variance of D 2 x 0.25 / 4 = 0.125; 800 tasks: error sqrt(0.125 x 800 + 1) / 801 = 0.01255
    # margin 0.04: (0.04 - 0.00125) / 0.01255 - 1.645 = 1.443 → 0.925
    rng = np.random.default_rng(1)
    one, other = (rng.binomial(1, 0.5, (800, 4)).astype(np.float64) for _ in range(2))
    assert paired.power_of(one, other, margin=0.04) == pytest.approx(0.925, abs=0.01)
    assert paired.attainable_margin(one, other, power=0.925) == pytest.approx(0.04, abs=0.001)


def test_the_same_seed_gives_the_same_numbers() -> None:
    difference, clusters = drawn(0.0, clusters=50, size=4, seed=1)
    one, two = (paired.compare(difference, clusters, margin=0.02, seed=7) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("difference", [np.array([]), np.array([math.nan]), np.array([2.0])])
def test_missing_scores_are_refused(difference: FloatArray) -> None:
    with pytest.raises(ValueError, match="rerun the suite"):
        paired.compare(difference, ["a"] * len(difference), margin=0.02, seed=1)


def test_a_comparison_by_hand() -> None:
    # 200 up and 200 down: mean 0, variance 1, standard error 1/20; z(.95) = 1.645
    half = [1.0, -1.0] * 200
    found = paired.compare(np.array(half), [str(i) for i in range(400)], margin=0.1, seed=1)
    assert (found.mean, found.items, found.clusters) == (0.0, 400, 400)
    assert (found.low, found.high) == (pytest.approx(-0.0822, abs=0.006), pytest.approx(0.0822, abs=0.006))
    assert found.items_needed == 619  # ceil(6.1826 / 0.01)
    doubled = paired.compare(np.array(half), [str(i // 2) for i in range(400)], margin=0.1, seed=1)
    assert (doubled.clusters, doubled.low, doubled.high) == (200, 0.0, 0.0), "each cluster has one up and one down"


def test_a_p_value_is_the_larger_of_the_normal_one_and_the_resampled_one() -> None:
    # s = (2, -1), n = (4, 2), and a break (-3, 3): mean -2/9, error sqrt((26² + 5² + 21²)/81)/9 = 0.417; margin .9: t = 1.6246
    sums, sizes = np.array([2.0, -1.0]), np.array([4.0, 2.0])
    sample, first_twice = [1.0, 6.0, 5.0, 10.0, 20.0], [4.0, 8.0, 8.0, 16.0, 32.0]
    assert paired.p_value_of(sums, sizes, np.array([sample] * 99), margin=0.9) == pytest.approx(0.052127, abs=1e-6)
    assert paired.p_value_of(sums, sizes, np.array([sample] * 9), margin=0.9) == pytest.approx(0.1), "one in ten at the least"
    # margin .4: t = .426; the first cluster twice: mean 1/11, error sqrt(1944)/121 = .3644, t = .859 exceeds it
    mixed = np.array([sample] * 49 + [first_twice] * 50)
    assert paired.p_value_of(sums, sizes, mixed, margin=0.4) == pytest.approx(0.51)


def test_without_a_break_the_p_value_is_one_in_as_many_resamples_as_were_drawn() -> None:
    still, each = np.zeros(200), [str(i) for i in range(200)]
    assert paired.compare(still, each, margin=0.05, seed=1).p_value == pytest.approx(1 / 4001)
    assert paired.compare(still, each, margin=0.05, seed=1, draws=260).p_value == pytest.approx(1 / 261)


def test_resampled_totals_are_of_as_many_clusters_as_there_are() -> None:
    totals = paired.resampled_totals(np.array([3.0, 3.0]), np.array([2.0, 2.0]), seed=1, draws=251)
    assert totals.shape == (251, 5)
    assert np.array_equal(totals, np.tile([6.0, 4.0, 18.0, 12.0, 8.0], (251, 1)))


def test_the_power_of_a_suite_with_one_answer_a_task_by_hand() -> None:
    # differences 0, -1, 1, 0: variance 1/2; shift 1/5, error sqrt(.5 * 4 + 1)/5 = .34641; (1 - .2)/.34641 - 1.64485 = .66455
    one, other = np.array([[1.0], [0.0], [1.0], [0.0]]), np.array([[1.0], [1.0], [0.0], [0.0]])
    assert paired.power_of(one, other, margin=1.0) == pytest.approx(0.746830, abs=1e-5)
    assert paired.attainable_margin(one, other, power=0.8) == pytest.approx(1.061340, abs=1e-5)


def seen(*, p_value: float, high: float = 0.0) -> paired.PairedComparison:
    return paired.PairedComparison(mean=0.0, low=-1.0, high=high, p_value=p_value, items=1, clusters=1, items_needed=1)


@pytest.mark.parametrize(
    ("comparison", "level", "verdict"),
    [
        (seen(p_value=0.05), None, SuiteVerdict.PASS),
        (seen(p_value=0.0501), None, SuiteVerdict.INCONCLUSIVE),
        (seen(p_value=0.04), 0.05, SuiteVerdict.PASS),
        (seen(p_value=0.025), 0.025, SuiteVerdict.PASS),
        (seen(p_value=0.0251), 0.025, SuiteVerdict.INCONCLUSIVE),
        (seen(p_value=1e-9), 0.0, SuiteVerdict.INCONCLUSIVE),
        (seen(p_value=0.9, high=-0.02), None, SuiteVerdict.INCONCLUSIVE),
        (seen(p_value=0.9, high=-0.0201), None, SuiteVerdict.FAIL),
    ],
)
def test_a_core_suite_passes_at_its_level_and_fails_beyond_its_margin(
    comparison: paired.PairedComparison, level: float | None, verdict: SuiteVerdict
) -> None:
    levels = None if level is None else {"tasks": level}
    assert paired.judge_core({"tasks": comparison}, margins={"tasks": 0.02}, levels=levels) == {"tasks": verdict}


def test_core_suites_share_one_level() -> None:
    two = {"a": seen(p_value=0.026), "b": seen(p_value=0.03)}
    assert set(paired.judge_core(two, margins={"a": 0.02, "b": 0.02}).values()) == {SuiteVerdict.INCONCLUSIVE}
    two["a"] = seen(p_value=0.025)
    assert set(paired.judge_core(two, margins={"a": 0.02, "b": 0.02}).values()) == {SuiteVerdict.PASS}


def test_safety_is_judged_up_to_its_limit() -> None:
    bound = paired.rate_upper_bound(0, 300)
    for limit, verdict in ((bound, SuiteVerdict.PASS), (bound - 1e-6, SuiteVerdict.INCONCLUSIVE)):
        assert paired.judge_safety(new_critical_failures=0, failing=0, clusters=300, limit=limit) is verdict
    for failing, verdict in ((1, SuiteVerdict.INCONCLUSIVE), (2, SuiteVerdict.FAIL)):
        assert paired.judge_safety(new_critical_failures=0, failing=failing, clusters=100, limit=0.01) is verdict


def test_a_hypothesis_is_rejected_at_exactly_its_level_and_best_of_none_is_refused() -> None:
    assert paired.holm({"a": 0.05}, alpha=0.05) == {"a": True}
    with pytest.raises(ValueError, match="best of 0"):
        paired.best_of_k(np.zeros((2, 4)), 0)
    with pytest.raises(ValueError, match="one cluster each"):
        paired.compare(np.zeros(3), ["a", "b"], margin=0.02, seed=1)
