"""Each guard, by hand: what passes and what is held, with its reason."""

import math

import msgspec
import pytest

from app.domain.errors import Held
from app.domain.release.versions import HoldReason
from pipelines.training import guards
from pipelines.training.config import GuardLimits
from pipelines.training.guards import Estimate, ratio_report
from pipelines.training.judgement import Judgement

LIMITS = GuardLimits()
LOG2 = math.log(2)


def test_the_ratio_report_by_hand() -> None:
    # ratios 1, 2, 1/2: mean 7/6, ESS (3.5)²/(3 · 5.25) = 0.7778, KL = mean of (0, 1 − ln 2, −0.5 + ln 2) = 0.5/3
    report = ratio_report([-1.0, -1.0, -1.0], [-1.0, -1.0 - LOG2, -1.0 + LOG2])
    assert report.mean_ratio == pytest.approx(7 / 6)
    assert report.effective_share == pytest.approx(12.25 / 15.75)
    assert report.kl == pytest.approx(0.5 / 3)
    assert report.mean_gap == pytest.approx(2 * LOG2 / 3)
    assert report.p99_gap == pytest.approx(LOG2)


def held(reason: HoldReason) -> "pytest.RaisesExc[Held]":
    return pytest.raises(Held, check=lambda error: error.reason == reason)


def test_too_few_turns() -> None:
    guards.check_turns(8, LIMITS)
    with held(HoldReason.TOO_FEW_LABELS):
        guards.check_turns(7, LIMITS)


def test_equal_rewards() -> None:
    guards.check_rewards([0.0, 1e-3])
    with held(HoldReason.EQUAL_REWARDS):
        guards.check_rewards([0.0, 0.0])


def test_an_engine_that_logs_something_else() -> None:
    guards.check_mismatch(ratio_report([-1.0] * 4, [-1.01] * 4), LIMITS)
    with held(HoldReason.ENGINE_MISMATCH):
        guards.check_mismatch(ratio_report([-1.0] * 4, [-2.0] * 4), LIMITS)
    with held(HoldReason.ENGINE_MISMATCH):
        guards.check_mismatch(ratio_report([math.nan], [-2.0]), LIMITS)


def test_where_turns_were_served_in_low_precision_that_is_named_as_the_likely_cause() -> None:
    far = ratio_report([-1.0] * 4, [-2.0] * 4)
    with pytest.raises(Held, match=r"low precision \(2 in mxfp8 and 9 in nvfp4\), which is the likely cause: serve with --precision bf16"):
        guards.check_mismatch(far, LIMITS, rounded={"nvfp4": 9, "mxfp8": 2})
    with pytest.raises(Held, match=r"compare their versions, templates, sampling parameters and dtypes$"):
        guards.check_mismatch(far, LIMITS)
    guards.check_mismatch(ratio_report([-1.0] * 4, [-1.01] * 4), LIMITS, rounded={"mxfp8": 4})


@pytest.mark.parametrize("gap", [0.36, 0.28])
def test_what_a_healthy_engine_never_shows_is_a_mismatch(gap: float) -> None:
    # KL ≈ gap²/2: raw log-probabilities at temperature 0.7 give 0.066 nats a token, a forgotten top-p 0.039 (SmolLM2)
    logged = [-1.0 + sign * gap for sign in (1, -1)] * 50
    with held(HoldReason.ENGINE_MISMATCH):
        guards.check_mismatch(ratio_report([-1.0] * 100, logged), LIMITS)
    guards.check_mismatch(ratio_report([-1.0] * 100, [-1.0 + sign * 0.05 for sign in (1, -1)] * 50), LIMITS)  # 0.00125: bf16 beside fp32


def test_a_few_tokens_that_are_quite_wrong_do_not_hide_in_the_mean() -> None:
    # two tokens in a hundred 0.9 too low: 0.02 · (e^-0.9 − 1 + 0.9) = 0.0061 nats on average
    report = ratio_report([-1.9] * 2 + [-1.0] * 98, [-1.0] * 100)
    assert report.kl < LIMITS.max_mismatch
    with held(HoldReason.ENGINE_MISMATCH):
        guards.check_mismatch(report, LIMITS)


def test_the_interval_of_a_divergence_by_hand() -> None:
    # turns of 2 and 1 tokens: mean (1 + 3 + 5)/3 = 3; residuals 4 − 6 = −2 and 5 − 3 = 2; error √((4 + 4) · 2/1)/3 = 4/3
    found = guards.estimate([[1.0, 3.0], [5.0]])
    assert found.mean == pytest.approx(3.0)
    assert found.upper == pytest.approx(3.0 + 1.645 * 4 / 3)
    assert guards.estimate([[1.0, 3.0]]).upper == math.inf


def test_a_small_effective_sample() -> None:
    # one ratio of 20 among nine of 1: (29)²/(10 · 409) = 0.2056
    report = ratio_report([0.0] * 9 + [math.log(20)], [0.0] * 10)
    assert report.effective_share == pytest.approx(841 / 4090)
    with held(HoldReason.LOW_ESS):
        guards.check_ratio(report, LIMITS)


def test_how_far_back_the_ratios_are_within_their_bounds() -> None:
    # an effective share of exp(−σ²) = 0.2056 has to become 0.3: σ shrinks by √(ln 0.3 / ln 0.2056) = 0.8724, and a little more
    report = ratio_report([0.0] * 9 + [math.log(20)], [0.0] * 10)
    limits = msgspec.structs.replace(LIMITS, max_mean_ratio=10.0)
    assert guards.share_within(report, limits) == pytest.approx(0.95 * 0.8724, abs=1e-4)
    # a mean of 4 has to become 2, and the way to it is twice that to 2 on the logarithm's scale
    assert guards.share_within(ratio_report([math.log(4)] * 3, [0.0] * 3), LIMITS) == pytest.approx(0.95 * 0.5)
    assert guards.share_within(ratio_report([0.1, -0.1], [0.0, 0.0]), LIMITS) == 1.0


@pytest.mark.parametrize("gap", [math.nan, -math.inf])
def test_no_step_back_makes_a_number_of_what_is_none(gap: float) -> None:
    with held(HoldReason.LOW_ESS):
        guards.share_within(ratio_report([gap] * 3, [0.0] * 3), LIMITS)


@pytest.mark.parametrize("ratio", [0.4, 2.1])
def test_a_mean_ratio_out_of_range(ratio: float) -> None:
    with held(HoldReason.MEAN_RATIO):
        guards.check_ratio(ratio_report([math.log(ratio)] * 3, [0.0] * 3), LIMITS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(value: float) -> None:
    with held(HoldReason.NOT_FINITE):
        guards.check_finite("loss", value)


def test_entropy_that_collapses() -> None:
    guards.check_entropy(2.0, 1.0, LIMITS)
    with held(HoldReason.ENTROPY_COLLAPSE):
        guards.check_entropy(2.0, 0.99, LIMITS)


@pytest.mark.parametrize("reason", [HoldReason.KL_CHAMPION, HoldReason.KL_ANCHOR])
def test_a_divergence_above_its_budget(reason: HoldReason) -> None:
    guards.check_kl(reason, guards.Estimate(mean=0.1, error=0.0999 / 1.645), 0.2)
    with held(reason):
        guards.check_kl(reason, guards.Estimate(mean=0.1, error=0.11 / 1.645), 0.2)


def test_how_far_back_a_candidate_is_inside_the_anchors_budget_counts_the_doubt_about_the_champion_itself() -> None:
    # champion 0.8 ± 0.05 (up to 0.88225), candidate 1.0 ± 0.1 (up to 1.1645): of the 0.28225 on the way 0.11775 fit into 1.0
    judged = Judgement(
        champion=Estimate(mean=0.0, error=0.0), anchor=Estimate(mean=1.0, error=0.1), anchor_before=Estimate(mean=0.8, error=0.05),
        entropy_before=1.0, entropy_after=1.0, drift=0.0,
    )  # fmt: skip
    assert judged.kept(GuardLimits(max_kl_anchor=1.0)) == pytest.approx(0.95 * 0.11775 / 0.28225)
    assert judged.kept(GuardLimits(max_kl_anchor=0.88)) is None  # the champion itself may be outside: no step back helps
    assert judged.kept(GuardLimits(max_kl_anchor=1.2)) is None  # all of the way is inside
