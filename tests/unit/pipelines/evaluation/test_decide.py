"""decide(): the order of its questions, and that no broken evidence ever promotes (invariants I1 and I4)."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from app.domain.release.gates import CanaryAction, Verdict
from app.domain.release.sessions import Session
from pipelines.evaluation.config import MetricConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import Evidence, Lane, hash_of, micros, packed, unpacked
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import decide
from pipelines.evaluation.live.harm import harm_of
from tests.fakes.evidence import counted
from tests.fakes.sessions import AT, people, session
from tests.fakes.watching import small_gates

CONFIG = small_gates()
PEOPLE = 1500


def _evidence(sessions: list[Session], *, stage: int = 2, **changes: object) -> Evidence:
    """Evidence from these sessions, taken when all of them are complete."""
    references = references_of(CONFIG, [])
    book = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references)
    now = (sessions[-1].exposed_at if sessions else AT) + timedelta(seconds=60)
    book.update(sessions, now=now)
    last = book.last_session_at
    values: dict[str, Any] = {
        "at": micros(now), "stage": stage, "last_session_at": None if last is None else micros(last),
        "n_max": {"task_success": PEOPLE, "reward": PEOPLE},
    }  # fmt: skip
    return counted(book, references, **{**values, **changes})


@pytest.fixture(scope="module")
def good() -> Evidence:
    return _evidence(people(PEOPLE, candidate=0.65))


@pytest.fixture(scope="module")
def bad() -> Evidence:
    return _evidence(people(PEOPLE, candidate=0.3))


def test_a_good_candidate_is_ready_and_a_bad_one_aborted(good: Evidence, bad: Evidence) -> None:
    assert (decide(CONFIG, good).action, decide(CONFIG, good).verdict) == (CanaryAction.READY, Verdict.PASS)
    assert (decide(CONFIG, bad).action, decide(CONFIG, bad).verdict) == (CanaryAction.ABORT, Verdict.FAIL)


def test_the_same_evidence_gives_the_same_decision_also_from_storage(good: Evidence) -> None:
    again = unpacked(packed(good))
    assert hash_of(again) == hash_of(good)
    assert decide(CONFIG, again) == decide(CONFIG, good)


def _lanes(evidence: Evidence, change: Callable[[Lane], Lane]) -> Evidence:
    return msgspec.structs.replace(evidence, lanes=tuple(change(lane) for lane in evidence.lanes))


def _with(lane: Lane, metric: str, values: Callable[[np.ndarray], np.ndarray]) -> Lane:  # type: ignore[type-arg] - of floats
    if metric not in lane.outcomes:
        return lane
    return msgspec.structs.replace(lane, outcomes={**lane.outcomes, metric: values(lane.array(metric).copy()).tobytes()})


def _nan(evidence: Evidence) -> Evidence:
    return _lanes(evidence, lambda lane: _with(lane, "task_success", lambda y: np.where(np.arange(len(y)) == 7, np.nan, y)))


def _outside(evidence: Evidence) -> Evidence:
    return _lanes(evidence, lambda lane: _with(lane, "task_success", lambda y: y * 2.0))


def _constant(evidence: Evidence) -> Evidence:
    return _lanes(evidence, lambda lane: _with(lane, "task_success", lambda y: np.ones_like(y)))


def _missing(evidence: Evidence) -> Evidence:
    return _lanes(
        evidence,
        lambda lane: msgspec.structs.replace(
            _with(lane, "task_success", lambda y: np.zeros_like(y)), missing={**lane.missing, "task_success": len(lane)}
        ),
    )


def _certain(evidence: Evidence) -> Evidence:
    return _lanes(evidence, lambda lane: msgspec.structs.replace(lane, probability=np.ones(len(lane)).tobytes()))


@pytest.mark.parametrize(
    "spoil",
    [
        _nan,
        _outside,
        _constant,
        _missing,
        _certain,
        lambda e: msgspec.structs.replace(e, duplicates=200),
        lambda e: msgspec.structs.replace(e, swapped=1),
        lambda e: msgspec.structs.replace(e, lag_s=600.0),
        lambda e: msgspec.structs.replace(e, at=e.at + 3600 * 1_000_000),
        lambda e: msgspec.structs.replace(e, found_earlier=("sample-ratio mismatch",)),
        lambda e: msgspec.structs.replace(e, stage=1),
        lambda e: msgspec.structs.replace(e, hard=("no engine can load it",)),
    ],
    ids=["NaN", "outside", "constant", "missing", "impossible", "duplicated", "swapped", "lagging", "stale", "mismatch", "early", "hard"],
)  # fmt: skip
def test_evidence_that_is_broken_in_one_way_never_promotes(good: Evidence, spoil: Callable[[Evidence], Evidence]) -> None:
    decision = decide(CONFIG, spoil(good))
    assert decision.action is not CanaryAction.READY
    assert decision.verdict is not Verdict.PASS


@pytest.mark.parametrize("count", [0, 1, 2, 30])
def test_too_few_people_never_promote(count: int) -> None:
    assert decide(CONFIG, _evidence(people(count, candidate=0.9))).verdict is Verdict.INCONCLUSIVE


def test_no_evidence_by_the_deadline_is_inconclusive() -> None:
    """argo-rollouts analysis.go: a run that ended without a measurement is Successful there."""
    late = _evidence([], at=micros(AT) + 7201 * 1_000_000, last_session_at=micros(AT) + 7200 * 1_000_000)
    assert decide(CONFIG, late).action is CanaryAction.INCONCLUSIVE


def test_a_mismatch_does_not_mask_harm(bad: Evidence) -> None:
    """GrowthBook asks for the mismatch first, which hides a rollback."""
    assert decide(CONFIG, msgspec.structs.replace(bad, found_earlier=("sample-ratio mismatch",))).action is CanaryAction.ABORT


def test_dwell_does_not_mask_harm(bad: Evidence) -> None:
    """GrowthBook holds while a step's interval runs, before it looks at guardrails."""
    assert decide(CONFIG, msgspec.structs.replace(bad, stage=0, stage_since=bad.at)).action is CanaryAction.ABORT


def test_sparse_errors_are_caught() -> None:
    """kayenta#426, kayenta#799: errors in the canary alone, too rare for a rank test, pass there."""
    sessions = [
        session(n, arm="candidate" if n % 2 else "champion", finish_reason="error" if n % 2 and n % 20 == 1 else "stop")
        for n in range(2000)
    ]
    decision = decide(CONFIG, _evidence(sessions))
    assert decision.action is CanaryAction.ABORT
    assert "fault" in decision.reason


def test_swapped_arms_are_seen_as_the_harm_they_are(good: Evidence) -> None:
    """growthbook#6020: with the arms swapped, a better candidate has to look like a worse one."""
    better = _evidence(people(PEOPLE, candidate=0.8, champion=0.5))
    swapped = _lanes(
        better, lambda lane: msgspec.structs.replace(lane, treated=(1 - np.frombuffer(lane.treated, dtype="u1")).astype("u1").tobytes())
    )
    assert decide(CONFIG, better).action is CanaryAction.READY
    assert decide(CONFIG, swapped).action is CanaryAction.ABORT


def test_a_skewed_assignment_holds_and_after_two_hours_aborts() -> None:
    skewed = [s for n, s in enumerate(people(PEOPLE, candidate=0.65)) if s.arm == "champion" or n % 3]
    held = _evidence(skewed)
    decision = decide(CONFIG, held)
    assert (decision.action, decision.cause) == (CanaryAction.HOLD, "data")
    waited = msgspec.structs.replace(held, held_since=held.at - int(7200e6))
    assert decide(CONFIG, waited).action is CanaryAction.ABORT


def test_a_reward_that_rises_alone_raises_an_alarm() -> None:
    """Sycophancy (GPT-4o, April 2025): the reward goes up, what it stands for does not."""
    sessions = [
        session(n, arm="candidate" if n % 2 else "champion", reward=0.8 if n % 2 else 0.1, signals={"task_success": n % 10 < 6})
        for n in range(PEOPLE)
    ]
    assert decide(CONFIG, _evidence(sessions)).numbers["alarms"] == ["proxy_gold_gap"]


def _otherwise(success: float, *, champion: float = 0.6, asks: float) -> list[Session]:
    """People whose candidate asks back this often, where the champion does in every fifth answer."""
    dice = random.Random(4)
    rates = {"champion": 0.2, "candidate": asks}
    return [
        replace(s, completion="Which file do you mean?") if dice.random() < rates[s.arm] else s
        for s in people(PEOPLE, candidate=success, champion=champion)
    ]


def test_an_improvement_that_changes_behaviour_is_no_harm_and_asks_people() -> None:
    """Gold and reward +5 points with fewer clarifying questions was aborted 60 times of 60."""
    decision = decide(CONFIG, _evidence(_otherwise(0.65, asks=0.0)))
    assert decision.action is CanaryAction.READY
    assert decision.numbers["alarms"] == ["behaviour: acts"]  # a question is no act
    assert "two people have to look" in decision.reason


def test_changed_behaviour_halves_the_evidence_of_harm_that_is_needed() -> None:
    harm = harm_of(CONFIG, _evidence(_otherwise(0.6, asks=0.0)))
    assert not harm.found
    for share, found in ((0.51, True), (0.49, False)):
        peak = math.log(share) + harm.needed
        assert replace(harm, family=replace(harm.family, peak_log_e=peak)).found is found
    assert not replace(harm, behaviour=None, family=replace(harm.family, peak_log_e=harm.needed - 0.1)).found


def test_a_champion_whose_behaviour_people_have_accepted_is_not_taken_back_for_it() -> None:
    assert decide_champion(CONFIG, _evidence(_otherwise(0.6, asks=0.0), state="CHAMPION")).action is CanaryAction.CONTINUE


def test_the_declared_number_of_units_without_an_answer_is_inconclusive() -> None:
    strict = small_gates(metrics=tuple(_tight(metric) for metric in CONFIG.metrics))
    evidence = _evidence(people(PEOPLE), n_max={"task_success": 400, "reward": 400})
    assert decide(strict, evidence).cause == "n_max"


def _tight(metric: MetricConfig) -> MetricConfig:
    return metric if metric.margin is None else msgspec.structs.replace(metric, margin=0.001)
