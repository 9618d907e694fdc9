"""G0: hard limits fail, half of them warns, and what was not measured never passes."""

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from app.domain.gates import Verdict, canonical_json
from app.domain.versions import RunStatus, TrainingRun
from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.health import anchor_budget, judge_health

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SOUND: dict[str, Any] = {
    "kl_champion": 0.001, "kl_anchor": 0.002, "length_mean": 200.0, "entropy_before": 1.0, "entropy_after": 1.05, "reward_std": 0.4,
    "term_shares": {"edit_persistence": 0.44, "rating": 0.3, "length": 0.26}, "ceiling_rate": 0.1, "effective_share": 0.9,
}  # fmt: skip


def _judge(changes: dict[str, Any] | None = None, *, status: RunStatus = RunStatus.SUCCEEDED) -> tuple[Verdict, str]:
    run = TrainingRun(
        id="run",
        policy="tab",
        batch_id="b",
        parent="v1",
        status=status,
        candidate="v2",
        metrics={**SOUND, **(changes or {})},
        started_at=NOW,
    )
    result = judge_health(run, config=GatesConfig(), now=NOW)
    canonical_json(result.evidence)  # whatever was measured, the record can be hashed
    return result.verdict, result.reason


def test_a_sound_update_passes_without_a_word() -> None:
    assert _judge() == (Verdict.PASS, "sound")


@pytest.mark.parametrize(
    ("figure", "value", "named"),
    [
        ("kl_champion", 0.02, "response_kl_champion is 4"),  # 0.02 nat per token x 200 tokens = 4 nat per response, limit 3
        ("kl_anchor", 0.06, "response_kl_anchor is 12"),
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


@pytest.mark.parametrize("figure", [name for name in SOUND if name != "entropy_before"])
def test_nan_fails_and_a_missing_figure_never_passes(figure: str) -> None:
    nan: object = {"rating": math.nan} if figure == "term_shares" else math.nan
    assert _judge({figure: nan})[0] is Verdict.FAIL
    assert _judge({figure: None})[0] is Verdict.INCONCLUSIVE


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
