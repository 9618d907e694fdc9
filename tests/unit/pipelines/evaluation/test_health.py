"""G0: hard limits fail, half of them warns, and what was not measured never passes."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from app.domain.release.gates import GateResult, Verdict, canonical_json
from app.domain.release.versions import PastRun, RunStatus, TrainingRun
from pipelines.evaluation.config import GatesConfig, HealthConfig
from pipelines.evaluation.health import anchor_budget, judge_health
from pipelines.evaluation.pretraining_health import judge_pretraining

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SOUND: dict[str, Any] = {
    "kl_champion": 0.001, "kl_anchor": 0.002, "length_mean": 200.0, "entropy_before": 1.0, "entropy_after": 1.05, "reward_std": 0.4,
    "term_shares": {"edit_persistence": 0.44, "rating": 0.3, "length": 0.26}, "ceiling_rate": 0.1, "effective_share": 0.9,
}  # fmt: skip


def _run(changes: dict[str, Any] | None = None, *, status: RunStatus = RunStatus.SUCCEEDED) -> TrainingRun:
    return TrainingRun(
        id="run",
        policy="tab",
        batch_id="b",
        parent="v1",
        status=status,
        candidate="v2",
        metrics={**SOUND, **(changes or {})},
        started_at=NOW,
    )


def _judge(changes: dict[str, Any] | None = None, *, status: RunStatus = RunStatus.SUCCEEDED) -> tuple[Verdict, str]:
    result = judge_health(_run(changes, status=status), config=GatesConfig(), now=NOW)
    canonical_json(result.evidence)  # whatever was measured, the record can be hashed
    return result.verdict, result.reason


def test_a_sound_update_passes_without_a_word() -> None:
    assert _judge() == (Verdict.PASS, "sound")


@pytest.mark.parametrize(
    ("figure", "value", "named"),
    [
        ("kl_champion", 0.25, "token_kl_champion is 0.25"),
        ("kl_champion_upper", 0.25, "token_kl_champion is 0.25"),
        ("kl_anchor", 1.1, "token_kl_anchor is 1.1"),
        ("entropy_after", 0.4, "entropy_ratio is 0.4"),
        ("reward_std", 0.01, "reward_std is 0.01"),
        ("term_shares", {"rating": 0.95, "undo": 0.05}, "component_share is 0.95"),
        ("ceiling_rate", 0.85, "ceiling_rate is 0.85"),
        ("effective_share", 0.2, "effective_share is 0.2"),
    ],
)
def test_every_hard_limit_fails_by_name(figure: str, value: object, named: str) -> None:
    verdict, reason = _judge({figure: value})
    assert verdict is Verdict.FAIL
    assert named in reason


@pytest.mark.parametrize("figure", [name for name in SOUND if name not in ("entropy_before", "length_mean")])
def test_nan_fails_and_a_missing_figure_never_passes(figure: str) -> None:
    nan: object = {"rating": math.nan} if figure == "term_shares" else math.nan
    assert _judge({figure: nan})[0] is Verdict.FAIL
    assert _judge({figure: None})[0] is Verdict.INCONCLUSIVE


def test_a_long_answer_has_the_budget_of_its_tokens() -> None:
    # 0.01 nat a token is 20 nat in an answer of 2,000 tokens: the same policy, asked for more
    assert _judge({"kl_champion": 0.01, "length_mean": 2000.0})[0] is Verdict.PASS
    limited = GatesConfig(health=HealthConfig(response_kl_max=3.0))
    assert judge_health(_run({"kl_champion": 0.02}), config=limited, now=NOW).verdict is Verdict.FAIL


def test_the_gate_holds_a_run_to_the_budget_it_was_made_under() -> None:
    tight = replace(_run({"kl_champion": 0.05}), config={"guards": {"max_kl_champion": 0.04, "max_kl_anchor": 1.0}})
    assert judge_health(tight, config=GatesConfig(), now=NOW).verdict is Verdict.FAIL


def test_who_comes_nearer_to_the_anchor_is_not_stopped_for_being_far_from_it() -> None:
    assert _judge({"kl_anchor": 1.2, "kl_anchor_before": 1.3})[0] is Verdict.PASS
    assert _judge({"kl_anchor": 1.2, "kl_anchor_before": 1.1})[0] is Verdict.FAIL


@pytest.mark.parametrize("channel", ["rating", "edit_persistence"])
def test_the_only_channel_that_people_have_does_not_dominate(channel: str) -> None:
    assert _judge({"term_shares": {channel: 1.0}})[0] is Verdict.PASS
    assert _judge({"term_shares": {channel: 0.97, "length": 0.03, "undo": 0.0}})[0] is Verdict.PASS
    assert "component_share is 0.95" in _judge({"term_shares": {channel: 0.05, "length": 0.95}})[1]
    assert "component_share is 0.95" in _judge({"term_shares": {channel: 0.95, "undo": 0.05}})[1]


def test_what_the_run_asks_of_people_is_said_before_anything_else() -> None:
    verdict, reason = _judge({"alarms": ["85% of the KL budget to the anchor is used: renew it"]})
    assert verdict is Verdict.PASS
    assert "renew it" in reason


def test_half_of_a_limit_warns() -> None:
    verdict, reason = _judge({"ceiling_rate": 0.5})
    assert verdict is Verdict.PASS
    assert "ceiling_rate is 0.5" in reason


def test_a_run_that_made_nothing_fails() -> None:
    assert _judge(status=RunStatus.HELD)[0] is Verdict.FAIL


def test_the_anchor_budget_is_fitted_on_the_peak_of_the_gold_metric() -> None:
    # R = d (a - b log d) with a = 0.6, b = 0.3 peaks at d* = exp(0.6/0.3 - 1) = 2.71828; budget (0.8 d*)^2 = 4.7290
    history = [(d * d, d * (0.6 - 0.3 * math.log(d))) for d in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)]
    assert anchor_budget(history) == pytest.approx(4.7290, abs=1e-3)


def test_a_gold_metric_that_only_rises_gives_no_budget() -> None:
    # R = d (0.1 + 0.2 log d): b is negative, the curve has no peak
    assert anchor_budget([(d * d, d * (0.1 + 0.2 * math.log(d))) for d in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)]) is None


def test_too_few_versions_give_no_budget() -> None:
    assert anchor_budget([(1.0, 0.1)] * 5) is None


def _past(candidate: str, metrics: dict[str, Any], *, anchor: str = "v0", gold: float | None = None) -> PastRun:
    canary = None if gold is None else {"harm": {"effects": {"task_success": {"treated": gold}}}}
    return PastRun(candidate=candidate, anchor=anchor, metrics={**SOUND, **metrics}, canary=canary)


def _compared(changes: dict[str, Any], *, before: dict[str, Any]) -> GateResult:
    run = TrainingRun(
        id="run", policy="tab", batch_id="b", parent="v1", status=RunStatus.SUCCEEDED, candidate="v2", metrics={**SOUND, **changes},
        started_at=NOW,
    )  # fmt: skip
    return judge_health(run, config=GatesConfig(), now=NOW, history=[_past("v1", before)])


def test_a_reward_that_stopped_varying_since_the_champions_batch_fails() -> None:
    # 0.06 passes the absolute limit of 0.05, and is 4 % of what it was
    result = _compared({"reward_std": 0.06}, before={"reward_std": 1.5})
    assert result.verdict is Verdict.FAIL
    assert "variance_collapse is at 0.04" in result.reason


def test_answers_that_grew_by_more_than_three_deviations_fail() -> None:
    result = _compared({"length_mean": 200.0}, before={"length_mean": 50.0, "length_std": 40.0})
    assert result.verdict is Verdict.FAIL
    assert "length_drift is at 3.75" in result.reason
    assert _compared({"length_mean": 200.0}, before={"length_mean": 180.0, "length_std": 40.0}).verdict is Verdict.PASS


def test_exclusions_coverage_and_foreign_turns_are_told_and_fail_nothing() -> None:
    ours = {"batch_left_out": {"empty_completion": 60, "no_signal": 200, "actor_cap": 500}, "turns": 940, "on_policy_share": 1 / 3}
    before = {"batch_left_out": {"empty_completion": 1, "no_signal": 20}, "turns": 980, "length_std": 40.0}
    result = _compared(ours, before=before)
    assert result.verdict is Verdict.PASS
    levels = {found["monitor"]: found["level"] for found in result.evidence["monitors"]}
    assert levels == {
        "on_policy_share": "warn", "variance_collapse": "ok", "length_drift": "ok", "exclusion_rate": "alert", "coverage": "alert",
    }  # fmt: skip
    assert sum("monitor" in warning for warning in result.evidence["warnings"]) == 3


def test_the_run_is_compared_with_its_own_parents_only() -> None:
    result = _compared({"reward_std": 0.06}, before={"reward_std": 1.5})
    assert result.verdict is Verdict.FAIL
    stranger = TrainingRun(
        id="run", policy="tab", batch_id="b", parent="v9", status=RunStatus.SUCCEEDED, candidate="v2",
        metrics={**SOUND, "reward_std": 0.06}, started_at=NOW,
    )  # fmt: skip
    assert judge_health(stranger, config=GatesConfig(), now=NOW, history=[_past("v1", {"reward_std": 1.5})]).verdict is Verdict.PASS


def test_the_anchor_budget_comes_from_the_line_of_versions_since_the_anchor() -> None:
    # gold = d (0.6 - 0.3 log d): budget (0.8 e)^2 = 4.729 nat per response; this run is at 0.03 x 200 = 6
    line = [
        _past(f"v{n}", {"kl_anchor": d * d / 200.0}, gold=d * (0.6 - 0.3 * math.log(d)))
        for n, d in enumerate((0.5, 1.0, 1.5, 2.0, 3.0, 4.0))
    ]
    run = TrainingRun(
        id="run", policy="tab", batch_id="b", parent="v9", status=RunStatus.SUCCEEDED, candidate="v2",
        metrics={**SOUND, "kl_anchor": 0.03, "anchor": "v0"}, started_at=NOW,
    )  # fmt: skip
    fitted = judge_health(run, config=GatesConfig(), now=NOW, history=line)
    assert fitted.evidence["limits"]["response_kl_anchor"] == pytest.approx(4.729, abs=1e-3)
    assert fitted.verdict is Verdict.FAIL
    renewed = judge_health(replace(run, metrics={**run.metrics, "anchor": "v5"}), config=GatesConfig(), now=NOW, history=line)
    assert ("response_kl_anchor" in renewed.evidence["limits"], renewed.verdict) == (False, Verdict.PASS)


def _judge_pretrained(before: dict[str, float], after: dict[str, float]) -> tuple[Verdict, str]:
    run = replace(_run(), metrics={"perplexity_before": before, "perplexity_after": after})
    result = judge_pretraining(run, config=GatesConfig(), now=NOW)
    canonical_json(result.evidence)  # whatever was measured, the record can be hashed
    return result.verdict, result.reason


@pytest.mark.parametrize("after", [6.0, 8.0, 8.4])
def test_pretraining_may_forget_a_twentieth_of_a_domain(after: float) -> None:
    # a twentieth above 8 is 8.4
    assert _judge_pretrained({"code": 8.0}, {"code": after}) == (Verdict.PASS, f"held-out perplexity: code 8 → {after:.3g}")


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [(8.0, 8.5, "8 → 8.5"), (8.0, math.nan, "8 → nan"), (math.inf, 8.0, "inf → 8"), (math.inf, math.inf, "inf → inf")],
)
def test_pretraining_that_forgot_more_of_any_domain_or_measured_no_number_fails(before: float, after: float, shown: str) -> None:
    verdict, reason = _judge_pretrained({"prose": 20.0, "code": before}, {"prose": 10.0, "code": after})
    assert (verdict, reason) == (Verdict.FAIL, f"held-out perplexity rose by more than 5%: code {shown}")


@pytest.mark.parametrize(("before", "after"), [({}, {}), ({"code": 8.0, "prose": 20.0}, {"code": 8.0}), ({"code": 8.0}, {"prose": 8.0})])
def test_pretraining_that_was_not_measured_on_every_domain_never_passes(before: dict[str, float], after: dict[str, float]) -> None:
    assert _judge_pretrained(before, after)[0] is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("status", "candidate"), [(RunStatus.FAILED, "v2"), (RunStatus.SUCCEEDED, None), (RunStatus.FAILED, None)]
)  # fmt: skip
def test_pretraining_that_did_not_succeed_or_left_nothing_fails_whatever_it_measured(status: RunStatus, candidate: str | None) -> None:
    run = replace(_run(status=status), candidate=candidate, metrics={"perplexity_before": {"code": 8.0}, "perplexity_after": {"code": 6.0}})
    result = judge_pretraining(run, config=GatesConfig(), now=NOW)
    assert (result.verdict, result.reason) == (Verdict.FAIL, f"run run is {status}: it made no candidate")


# --- each limit from both sides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "passes", "fails"),
    [
        ("kl_champion", 0.2, 0.2001),
        ("kl_anchor", 1.0, 1.0001),
        ("entropy_after", 0.5, 0.4999),
        ("reward_std", 0.05, 0.0499),
        ("term_shares", {"rating": 0.9, "undo": 0.1}, {"rating": 0.901, "undo": 0.099}),
        ("ceiling_rate", 0.8, 0.8001),
        ("effective_share", 0.3, 0.2999),
    ],
)
def test_a_figure_at_its_limit_passes_and_one_beyond_it_fails(figure: str, passes: object, fails: object) -> None:
    assert _judge({figure: passes})[0] is Verdict.PASS
    assert _judge({figure: fails})[0] is Verdict.FAIL


@pytest.mark.parametrize(
    ("figure", "quiet", "warned"),
    [
        ("kl_champion", 0.1, 0.1001), ("kl_anchor", 0.5, 0.5001), ("entropy_after", 1.0, 0.9999), ("reward_std", 0.1, 0.0999),
        ("ceiling_rate", 0.4, 0.4001), ("effective_share", 0.6, 0.5999),
    ],
)  # fmt: skip
def test_half_way_to_a_limit_is_quiet_and_beyond_it_is_a_warning(figure: str, quiet: float, warned: float) -> None:
    assert _judge({figure: quiet}) == (Verdict.PASS, "sound")
    verdict, reason = _judge({figure: warned})
    assert (verdict, reason.startswith("sound, with warnings: ")) == (Verdict.PASS, True)


def test_the_record_holds_the_figures_the_limits_and_the_share_of_the_budget() -> None:
    result = judge_health(_run({"kl_anchor": 0.6, "left_out": {"short": 3}}), config=GatesConfig(), now=NOW)
    assert result.evidence["figures"]["token_kl_anchor"] == 0.6
    assert result.evidence["limits"]["token_kl_anchor"] == 1.0
    assert result.evidence["limits"]["token_kl_champion"] == 0.2
    assert result.evidence["anchor_budget_used"] == pytest.approx(0.6)
    assert result.evidence["left_out"] == {"short": 3}
    assert result.evidence["warnings"] == ["token_kl_anchor is 0.6, the limit is 1"]
    assert (result.digest, result.decided_at) == ("v2", NOW)
    unknown = judge_health(_run({"kl_anchor": None}), config=GatesConfig(), now=NOW)
    assert unknown.evidence["anchor_budget_used"] == 1.0, "what is not known is all of it"
    infinite = judge_health(_run({"kl_champion": math.inf}), config=GatesConfig(), now=NOW)
    assert infinite.evidence["figures"]["token_kl_champion"] == "inf"
    assert "token_kl_champion: not a finite number" in infinite.reason


@pytest.mark.parametrize("value", [True, "0.4", None])
def test_what_is_no_number_was_not_measured(value: object) -> None:
    verdict, reason = _judge({"reward_std": value})
    assert (verdict, reason) == (Verdict.INCONCLUSIVE, "reward_std: not measured by the run")


def test_an_entropy_that_was_none_has_no_ratio() -> None:
    assert _judge({"entropy_before": 0.0})[0] is Verdict.INCONCLUSIVE
    assert _judge({"entropy_before": None})[0] is Verdict.INCONCLUSIVE


def test_six_versions_give_a_budget_and_none_of_them_is_the_anchor_itself() -> None:
    points = [(d * d, d * (0.6 - 0.3 * math.log(d))) for d in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)]
    assert anchor_budget([(0.0, 9.0), *points]) == anchor_budget(points)
    assert anchor_budget([(0.0, 9.0), *points[:5]]) is None
    # a peak far beyond what was seen is cut off at exp(50)
    flat = [(d * d, d * (0.6 - 0.001 * math.log(d))) for d in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)]
    assert anchor_budget(flat) == pytest.approx((0.8 * math.exp(50.0)) ** 2)


def test_who_is_as_far_from_the_anchor_as_its_parent_came_no_nearer() -> None:
    assert _judge({"kl_anchor": 1.2, "kl_anchor_before": 1.2})[0] is Verdict.FAIL
    near = judge_health(_run({"kl_anchor": 1.2, "kl_anchor_before": 1.21, "kl_champion": 0.21}), config=GatesConfig(), now=NOW)
    assert near.verdict is Verdict.FAIL, "the champion's budget binds all the same"


def test_a_few_answers_left_out_and_a_share_on_policy_from_both_sides() -> None:
    before = {"batch_left_out": {"empty_completion": 1, "no_signal": 20}, "turns": 980, "length_std": 40.0}
    for share, level in ((0.5, "ok"), (0.4999, "warn")):
        found = _compared({"on_policy_share": share}, before=before)
        assert [m["level"] for m in found.evidence["monitors"] if m["monitor"] == "on_policy_share"] == [level]
    # without turns of either side there is nothing to compare
    assert not [m for m in _compared({}, before=before).evidence["monitors"] if m["monitor"] in ("exclusion_rate", "coverage")]
    steady = _compared({"length_mean": 202.0}, before={"length_mean": 200.0, "length_std": 0.0})
    assert [m["value"] for m in steady.evidence["monitors"] if m["monitor"] == "length_drift"] == [2.0], "a token at least"
