import dataclasses
import math

import numpy as np
import pytest

from pipelines.evaluation.statistics import off_policy
from pipelines.evaluation.statistics.off_policy import LoggedResponses, OffPolicyHint, OffPolicyStatus


def responses(*, kl: float, lift: float, n: int, seed: int) -> LoggedResponses:
    """Log-normal weights, for which KL(candidate||logger) = kl and ESS/n -> exp(-2 kl); reward tilts with the weight.

    log w ~ N(-kl, 2 kl). The reward of a response is Bernoulli(0.5 + lift * tanh(z)) with z its standardised log weight.
    """
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(n)
    log_w = -kl + math.sqrt(2 * kl) * z
    reward = (rng.random(n) < 0.5 + lift * np.tanh(z)).astype(float)
    logged = rng.normal(-200.0, 20.0, n)
    return LoggedResponses(log_candidate=logged + log_w, log_logged=logged, reward=reward, is_fully_supported=True, engine_gap=0.002)


def true_effect(kl: float, lift: float) -> float:
    rng = np.random.default_rng(0)
    z = rng.standard_normal(2_000_000)
    return float(np.mean(np.exp(-kl + math.sqrt(2 * kl) * z) * lift * np.tanh(z)))


def test_weight_health_by_hand() -> None:
    # weights 1, 1, 2: ESS 16/6, mean 4/3, largest half of the sum
    health = off_policy.weight_health(np.log(np.array([1.0, 1.0, 2.0])))
    assert health.ess == pytest.approx(16 / 6)
    assert health.mean == pytest.approx(4 / 3)
    assert health.max_share == pytest.approx(0.5)
    assert health.mean_error == pytest.approx(math.sqrt(2 / 9) / math.sqrt(3))


def test_very_unlikely_responses_do_not_overflow() -> None:
    assert off_policy.weight_health(np.array([-2000.0, -1990.0])).ess == pytest.approx(1.0, abs=1e-3)
    assert math.isfinite(off_policy.weight_health(np.array([2000.0, -5.0])).ess)


@pytest.mark.parametrize("kl", [0.1, 0.3, 0.6, 1.0])
def test_effective_sample_size_falls_like_exp_of_minus_two_kl(kl: float) -> None:
    sample = responses(kl=kl, lift=0.0, n=200_000, seed=1)
    health = off_policy.weight_health(sample.log_candidate - sample.log_logged)
    assert health.ess / health.n == pytest.approx(math.exp(-2 * kl), abs=0.03)


def test_a_small_step_is_informative_and_its_interval_holds_the_truth() -> None:
    truth = true_effect(0.2, 0.2)
    missed = 0
    for seed in range(60):
        result = off_policy.estimate(responses(kl=0.2, lift=0.2, n=5000, seed=seed), margin=0.02)
        assert result.status is OffPolicyStatus.INFORMATIVE
        assert result.low is not None
        assert result.high is not None
        missed += not result.low <= truth <= result.high
    assert missed <= 4  # 2 % at alpha 0.01 a side


def test_a_large_step_is_uninformative() -> None:
    result = off_policy.estimate(responses(kl=1.8, lift=0.2, n=10_000, seed=1), margin=0.02)
    assert result.status is OffPolicyStatus.UNINFORMATIVE
    assert result.hint is OffPolicyHint.NONE
    assert result.effect is None


def test_too_few_responses_are_uninformative() -> None:
    result = off_policy.estimate(responses(kl=0.1, lift=0.2, n=900, seed=1), margin=0.02)
    assert result.status is OffPolicyStatus.UNINFORMATIVE


def test_a_clear_loss_is_vetoed_and_a_clear_win_starts_fast() -> None:
    loss = off_policy.estimate(responses(kl=0.3, lift=-0.4, n=20_000, seed=1), margin=0.02)
    win = off_policy.estimate(responses(kl=0.3, lift=0.4, n=20_000, seed=1), margin=0.02)
    assert (loss.hint, win.hint) == (OffPolicyHint.VETO, OffPolicyHint.FAST)


def test_weights_that_do_not_average_one_are_uninformative() -> None:
    good = responses(kl=0.1, lift=0.0, n=5000, seed=1)
    wrong = dataclasses.replace(good, log_candidate=good.log_candidate + 0.5)
    assert off_policy.estimate(wrong, margin=0.02).status is OffPolicyStatus.UNINFORMATIVE


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"is_fully_supported": False}, "support"),
        ({"engine_gap": 0.02}, "engines"),
        ({"engine_gap": math.nan}, "engines"),
        ({"log_logged": np.full(5000, math.nan)}, "missing"),
        ({"reward": np.full(5000, math.nan)}, "rewards"),
    ],
)
def test_logs_that_cannot_support_an_estimate_say_why(change: dict[str, object], word: str) -> None:
    good = responses(kl=0.1, lift=0.0, n=5000, seed=1)
    result = off_policy.estimate(dataclasses.replace(good, **change), margin=0.02)  # pyright: ignore[reportArgumentType]
    assert result.status is OffPolicyStatus.UNSUPPORTED
    assert word in result.reason


def test_capping_lowers_only_the_lower_bound() -> None:
    sample = responses(kl=0.5, lift=0.3, n=5000, seed=1)
    weights = np.exp(sample.log_candidate - sample.log_logged)
    free = off_policy.effect_bounds(weights, sample.reward, alpha=0.01, cap=math.inf)
    capped = off_policy.effect_bounds(weights, sample.reward, alpha=0.01, cap=2.0)
    assert capped[0] < free[0]
    assert capped[1] == free[1]


def test_a_model_of_the_reward_makes_the_estimate_doubly_robust() -> None:
    # w = (0.5, 1.5), r = (0, 1), q = r exactly: nothing is left to correct
    weights, reward = np.array([0.5, 1.5]), np.array([0.0, 1.0])
    assert off_policy.effect_estimate(weights, reward, model=reward) == 0.0
    # q = 0: ((0.5 - 1) * 0 + (1.5 - 1) * 1)/2
    assert off_policy.effect_estimate(weights, reward, model=0.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "informative"),
    [
        ({}, True),
        ({"n": 10_001}, False),  # a tenth of them is more than a thousand
        ({"n": 9_000, "ess": 999.9}, False),
        ({"mean": 1.376}, False),  # three errors from one
        ({"mean": 0.625}, True),
        ({"mean": 0.624}, False),
        ({"max_share": 0.0501}, False),
    ],
)
def test_weights_are_informative_up_to_each_of_their_bounds(changes: dict[str, float], informative: bool) -> None:
    values = {"n": 10_000, "ess": 1000.0, "mean": 1.375, "mean_error": 0.125, "max_share": 0.05} | changes
    assert off_policy.WeightHealth(**values).is_informative is informative  # pyright: ignore[reportArgumentType]


def test_no_weights_are_as_uneven_as_can_be() -> None:
    assert off_policy.weight_health(np.array([])) == off_policy.WeightHealth(n=0, ess=0.0, mean=0.0, mean_error=0.0, max_share=1.0)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"engine_gap": 0.01}, OffPolicyStatus.INFORMATIVE),
        ({"engine_gap": 0.0101}, OffPolicyStatus.UNSUPPORTED),
        ({"reward": np.tile([0.0, 1.0], 2500)}, OffPolicyStatus.INFORMATIVE),
        ({"reward": np.tile([0.0, 1.001], 2500)}, OffPolicyStatus.UNSUPPORTED),
        ({"reward": np.tile([-0.001, 1.0], 2500)}, OffPolicyStatus.UNSUPPORTED),
    ],
)
def test_a_log_is_taken_up_to_each_of_its_bounds(change: dict[str, object], status: OffPolicyStatus) -> None:
    good = responses(kl=0.1, lift=0.0, n=5000, seed=1)
    assert off_policy.estimate(dataclasses.replace(good, **change), margin=0.02).status is status  # pyright: ignore[reportArgumentType]


def test_nobody_to_judge_it_on_is_said() -> None:
    none = np.array([])
    nobody = LoggedResponses(log_candidate=none, log_logged=none, reward=none, is_fully_supported=True, engine_gap=0.0)
    result = off_policy.estimate(nobody, margin=0.02)
    assert (result.status, "no turn" in result.reason) == (OffPolicyStatus.UNSUPPORTED, True)


def test_a_bound_on_a_mean_by_hand() -> None:
    # mean stake c = .95 (2 - 2^-10)/11 = .172643: one value of 1 against mu multiplies by 1 - c + c/mu, which is 1/alpha = 2 at c/(1 + c)
    assert off_policy.mean_lower_bound(np.array([1.0]), floor=0.0, alpha=0.5) == pytest.approx(0.147225, abs=2e-5)
    assert off_policy.mean_lower_bound(np.array([0.0]), floor=-1.0, alpha=0.5) == pytest.approx(-0.852775, abs=2e-5)
    assert off_policy.mean_lower_bound(np.array([]), floor=-1.0, alpha=0.5) == -1.0
    # what was rejected once stays rejected, whatever comes after it
    assert off_policy.mean_lower_bound(np.array([1.0, 0.5]), floor=0.0, alpha=0.5) >= 0.1472


def test_a_weight_counts_as_fifty_at_most_for_the_better_and_in_full_for_the_worse() -> None:
    weights, reward = np.array([60.0, 0.5, 0.8, 1.0] * 20), np.array([1.0, 0.0, 1.0, 0.0] * 20)
    low, high = off_policy.effect_bounds(weights, reward, alpha=0.01)
    assert low == off_policy.effect_bounds(np.minimum(weights, 50.0), reward, alpha=0.01)[0]
    assert low < off_policy.effect_bounds(weights, reward, alpha=0.01, cap=60.0)[0]
    assert high == pytest.approx(min(1.0, -off_policy.mean_lower_bound((weights - 1.0) * (1.0 - reward), floor=-1.0, alpha=0.01)))


def test_one_in_a_hundred_is_the_level_of_an_estimate() -> None:
    sample = responses(kl=0.1, lift=0.2, n=5000, seed=2)
    weights = np.exp(sample.log_candidate - sample.log_logged)
    result = off_policy.estimate(sample, margin=0.02)
    assert (result.low, result.high) == off_policy.effect_bounds(weights, sample.reward, alpha=0.01)
    assert result.effect == off_policy.effect_estimate(weights, sample.reward)
    assert result.low is not None
    for margin, hint in ((-result.low, OffPolicyHint.NONE), (-result.low + 1e-9, OffPolicyHint.FAST)):
        assert off_policy.estimate(sample, margin=margin).hint is hint
