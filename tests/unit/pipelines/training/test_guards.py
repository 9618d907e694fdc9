"""Each guard, by hand: what passes and what is held, with its reason."""

import math
from dataclasses import replace

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


REPORT = guards.RatioReport(tokens=100, mean_ratio=1.0, effective_share=1.0, kl=0.0, mean_gap=0.0, p99_gap=0.0)


def test_each_limit_is_met_and_one_beyond_it_is_held() -> None:
    limits = GuardLimits(
        min_turns=3, max_mismatch=0.01, max_mismatch_p99=0.5, min_effective_sample_share=0.25, min_mean_ratio=0.5, max_mean_ratio=2.0,
        min_entropy_share=0.5,
    )  # fmt: skip
    for taken, refused, reason in (
        (lambda: guards.check_turns(3, limits), lambda: guards.check_turns(2, limits), HoldReason.TOO_FEW_LABELS),
        (
            lambda: guards.check_mismatch(replace(REPORT, kl=0.01, p99_gap=0.5), limits),
            lambda: guards.check_mismatch(replace(REPORT, kl=0.0101), limits), HoldReason.ENGINE_MISMATCH,
        ),
        (
            lambda: guards.check_ratio(replace(REPORT, effective_share=0.25, mean_ratio=0.5), limits),
            lambda: guards.check_ratio(replace(REPORT, effective_share=0.2499), limits), HoldReason.LOW_ESS,
        ),
        (
            lambda: guards.check_ratio(replace(REPORT, mean_ratio=2.0), limits),
            lambda: guards.check_ratio(replace(REPORT, mean_ratio=2.001), limits), HoldReason.MEAN_RATIO,
        ),
        (lambda: guards.check_rewards([1e-9]), lambda: guards.check_rewards([-9e-10]), HoldReason.EQUAL_REWARDS),
        (lambda: guards.check_rewards([-1e-9, 0.0]), lambda: guards.check_rewards([]), HoldReason.EQUAL_REWARDS),
        (
            lambda: guards.check_kl(HoldReason.KL_ANCHOR, Estimate(mean=0.25, error=0.0), 0.25),
            lambda: guards.check_kl(HoldReason.KL_ANCHOR, Estimate(mean=0.2501, error=0.0), 0.25), HoldReason.KL_ANCHOR,
        ),
        (lambda: guards.check_entropy(2.0, 1.0, limits), lambda: guards.check_entropy(2.0, math.nan, limits), HoldReason.NOT_FINITE),
    ):  # fmt: skip
        taken()
        with held(reason):
            refused()
    with held(HoldReason.ENGINE_MISMATCH):
        guards.check_mismatch(replace(REPORT, p99_gap=0.501), limits)
    with held(HoldReason.MEAN_RATIO):
        guards.check_ratio(replace(REPORT, mean_ratio=0.499), limits)


def test_the_one_gap_in_a_hundred_is_told() -> None:
    gaps = [n / 1000 for n in range(200)]
    assert ratio_report(gaps, [0.0] * 200).p99_gap == pytest.approx(0.198)
    assert ratio_report(gaps[:99], [0.0] * 99).p99_gap == pytest.approx(0.098)
    assert ratio_report([0.5], [0.0]).tokens == 1
    assert ratio_report([60.0], [0.0]).mean_ratio == pytest.approx(math.exp(50.0))
    assert ratio_report([-math.inf], [0.0]).effective_share == 0.0


def test_two_estimates_add_up_as_independent_ones() -> None:
    both = Estimate(mean=1.0, error=0.3).plus(Estimate(mean=0.5, error=0.4))
    assert (both.mean, both.error) == (1.5, pytest.approx(0.5))


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"effective_share": LIMITS.min_effective_sample_share}, 1.0),
        ({"mean_ratio": LIMITS.max_mean_ratio}, 1.0),
        ({"mean_ratio": LIMITS.min_mean_ratio}, 1.0),
        ({"mean_ratio": LIMITS.min_mean_ratio**2}, 0.475),
        ({"effective_share": LIMITS.min_effective_sample_share**4}, 0.475),
        ({"effective_share": LIMITS.min_effective_sample_share**4, "mean_ratio": LIMITS.max_mean_ratio**4}, 0.2375),
    ],
)
def test_the_way_back_is_as_long_as_the_furthest_of_the_bounds(changes: dict[str, float], share: float) -> None:
    assert guards.share_within(replace(REPORT, **changes), LIMITS) == pytest.approx(share)  # pyright: ignore[reportArgumentType]


def test_a_divergence_says_from_whom_and_what_to_do() -> None:
    for reason, said in ((HoldReason.KL_CHAMPION, "from the champion"), (HoldReason.KL_ANCHOR, "renew the anchor")):
        with pytest.raises(Held, match=said) as error:
            guards.check_kl(reason, Estimate(mean=1.0, error=0.0), 0.5)
        assert ("renew" in str(error.value)) is (reason is HoldReason.KL_ANCHOR)


def test_a_divergence_of_which_nothing_is_known_is_held_as_no_number() -> None:
    with held(HoldReason.NOT_FINITE):
        guards.check_kl(HoldReason.KL_CHAMPION, guards.estimate([[0.001, 0.002]]), 0.2)
    with held(HoldReason.NOT_FINITE):
        guards.check_kl(HoldReason.KL_ANCHOR, Estimate(mean=math.nan, error=0.0), 0.2)
