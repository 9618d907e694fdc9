import math

import numpy as np
import pytest

from pipelines.evaluation.statistics import betting
from pipelines.evaluation.statistics.family import Member, family_evidence
from pipelines.evaluation.statistics.units import Units
from tests.unit.pipelines.evaluation.statistics.draws import drawn_units

HARM = betting.harm(margin=0.0, variance=0.24, targets=(0.1,))


def member(name: str, weight: float, units: Units) -> Member:
    return Member(name=name, weight=weight, process=HARM, units=units)


def failures(closed_at: list[int]) -> Units:
    n = len(closed_at)
    return Units.observed(outcome=[0.0] * n, treated=True, probability=0.5, baseline=0.6, closed_at=closed_at)


def test_family_by_hand() -> None:
    # each treated failure multiplies by 1.125; edits: two failures, errors: one at time 2
    evidence = family_evidence([member("edits", 0.6, failures([1, 3])), member("errors", 0.4, failures([2]))], alpha=0.05)
    assert math.exp(evidence.log_e) == pytest.approx(0.6 * 1.125**2 + 0.4 * 1.125)
    assert math.exp(evidence.log_weighted["errors"]) == pytest.approx(0.45)
    assert evidence.cause == "edits"
    assert not evidence.rejected


def test_the_cause_is_the_metric_that_spent_the_budget() -> None:
    healthy, broken = drawn_units(effect=0.0, n=3000, seed=1), drawn_units(effect=-0.2, n=3000, seed=2)
    evidence = family_evidence([member("task", 0.5, healthy), member("tool_calls", 0.5, broken)], alpha=0.025)
    assert evidence.rejected
    assert evidence.cause == "tool_calls"
    assert evidence.rejected_at is not None
    assert evidence.rejected_at < 1000


def test_rejection_is_remembered_after_the_evidence_fades() -> None:
    bad, good = drawn_units(effect=-0.3, n=1000, seed=1), drawn_units(effect=0.3, n=9000, seed=2)
    both = Units.observed(
        outcome=np.concatenate([bad.outcome, good.outcome]),
        treated=np.concatenate([bad.treated, good.treated]),
        probability=0.5,
        baseline=0.6,
    )
    evidence = family_evidence([member("task", 1.0, both)], alpha=0.025)
    assert evidence.log_e < 0.0 < betting.evidence_needed(0.025) <= evidence.peak_log_e
    assert evidence.rejected


def test_a_metric_without_units_keeps_its_stake() -> None:
    evidence = family_evidence([member("task", 0.5, failures([])), member("edits", 0.5, failures([1]))], alpha=0.05)
    assert math.exp(evidence.log_e) == pytest.approx(0.5 + 0.5 * 1.125)


def test_nothing_closed_is_no_evidence() -> None:
    evidence = family_evidence([member("task", 1.0, failures([]))], alpha=0.05)
    assert evidence.log_e == 0.0
    assert evidence.cause is None
    assert not evidence.rejected


def test_twelve_copies_of_one_metric_are_as_safe_as_one() -> None:
    """Correlation one is the worst case for uncorrected guardrails; the mixture does not notice."""
    units = drawn_units(effect=0.0, n=2000, seed=4)
    alone = family_evidence([member("task", 1.0, units)], alpha=0.05)
    copies = family_evidence([member(str(k), 1 / 12, units) for k in range(12)], alpha=0.05)
    assert copies.log_e == pytest.approx(alone.log_e)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ([], "at least one"),
        ([member("a", 0.7, failures([1])), member("b", 0.7, failures([1]))], "at most 1"),
        ([member("a", 0.0, failures([1]))], "positive"),
        ([member("a", math.nan, failures([1]))], "positive"),
        ([member("a", 0.5, failures([1])), member("a", 0.5, failures([1]))], "twice"),
    ],
)
def test_families_that_would_break_the_budget_are_refused(members: list[Member], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        family_evidence(members, alpha=0.05)
