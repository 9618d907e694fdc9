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
from pipelines.evaluation.counting.evidence import Assigned, Evidence, Lane, TurnLook, hash_of, micros, packed, unpacked
from pipelines.evaluation.counting.references import Reference, references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import decide
from pipelines.evaluation.live.doubts import doubts
from pipelines.evaluation.live.harm import Harm, LookSummary, effect_of, harm_of, process_for
from pipelines.evaluation.statistics.family import FamilyEvidence
from pipelines.evaluation.statistics.units import Units
from tests.fakes.evidence import calm, counted
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


def _unmeasured(evidence: Evidence) -> Evidence:
    """Every value stands for a signal that nobody gave."""
    return _lanes(evidence, lambda lane: msgspec.structs.replace(lane, missing={**lane.missing, "task_success": len(lane)}))


def _certain(evidence: Evidence) -> Evidence:
    return _lanes(evidence, lambda lane: msgspec.structs.replace(lane, probability=np.ones(len(lane)).tobytes()))


@pytest.mark.parametrize(
    "spoil",
    [
        _nan,
        _outside,
        _constant,
        _missing,
        _unmeasured,
        _certain,
        lambda e: msgspec.structs.replace(e, duplicates=200),
        lambda e: msgspec.structs.replace(e, swapped=1),
        lambda e: msgspec.structs.replace(e, lag_s=600.0),
        lambda e: msgspec.structs.replace(e, at=e.at + 3600 * 1_000_000),
        lambda e: msgspec.structs.replace(e, found_earlier=("sample-ratio mismatch",)),
        lambda e: msgspec.structs.replace(e, stage=1),
        lambda e: msgspec.structs.replace(e, hard=("no engine can load it",)),
    ],
    ids=[
        "NaN", "outside", "constant", "missing", "unmeasured", "impossible",
        "duplicated", "swapped", "lagging", "stale", "mismatch", "early", "hard",
    ],
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


# --- reasons to doubt, each from both sides ---------------------------------------------------------------------------------------

NOON = micros(AT)
SECOND = 1_000_000


def _doubts(**changes: object) -> list[str]:
    return doubts(CONFIG, calm(**{"at": NOON, **changes}))  # type: ignore[arg-type] - a test's own names


def _assigned(treated: int, control: int, *, covered: tuple[int, int] = (0, 0)) -> tuple[Assigned, ...]:
    return (Assigned(stratum=2, probability=0.5, treated=treated, control=control, covered_treated=covered[0], covered_control=covered[1]),)


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"lag_s": 300.0}, None),
        ({"lag_s": 300.1}, "labels are 300 s overdue: are `ratchet ingest` and `ratchet label` running?"),
        ({"swapped": 1}, "1 sessions name an arm that their version contradicts"),
        ({"last_session_at": NOON - 600 * SECOND, "since": NOON - 9999 * SECOND, "stage_since": NOON - 9999 * SECOND}, None),
        (
            {"last_session_at": NOON - 601 * SECOND, "since": NOON - 9999 * SECOND, "stage_since": NOON - 9999 * SECOND},
            "no request for 10 min: is there traffic?",
        ),
        ({"last_session_at": NOON - 601 * SECOND, "since": NOON - 9999 * SECOND, "stage_since": NOON - 600 * SECOND}, None),
        (
            {"last_session_at": None, "since": NOON - 601 * SECOND, "stage_since": NOON - 601 * SECOND},
            "no request for 10 min: is there traffic?",
        ),
        ({"last_session_at": None, "since": NOON - 601 * SECOND, "stage_since": NOON - 601 * SECOND, "state": "READY"}, None),
        ({"last_session_at": NOON - 1200 * SECOND, "stage_since": NOON - 9999 * SECOND, "lasts_s": 2 * 7200.0}, None),
        (
            {"last_session_at": NOON - 1201 * SECOND, "stage_since": NOON - 9999 * SECOND, "lasts_s": 2 * 7200.0},
            "no request for 20 min: is there traffic?",
        ),
        (
            {"last_session_at": NOON - 601 * SECOND, "stage_since": NOON - 9999 * SECOND, "lasts_s": 60.0},
            "no request for 10 min: is there traffic?",
        ),
        ({"assigned": _assigned(500, 500, covered=(250, 250))}, None),
        ({"assigned": _assigned(900, 100)}, "sample-ratio mismatch: 0.900 of the units got the candidate, which chance does not explain"),
        (
            {"found_earlier": ("sample-ratio mismatch",)},
            "sample-ratio mismatch: 0.000 of the units got the candidate, which chance does not explain",
        ),
        (
            {"assigned": _assigned(500, 500, covered=(450, 50))},
            "feedback coverage: the arms differ in how often anybody reacts (0.900 of covered units got the candidate)",
        ),
        (
            {"found_earlier": ("feedback coverage",)},
            "feedback coverage: the arms differ in how often anybody reacts (0.000 of covered units got the candidate)",
        ),
    ],
)
def test_evidence_is_doubted_for_each_of_its_faults_and_not_sooner(changes: dict[str, object], doubt: str | None) -> None:
    assert _doubts(**changes) == ([] if doubt is None else [doubt])


def test_one_in_a_hundred_seen_in_two_arms_is_no_doubt_and_more_is(good: Evidence) -> None:
    """`units` are those of the last lane: all that were counted."""
    n = good.units
    most = n // 99  # d of n + d are at most one in a hundred up to n/99
    assert not [d for d in doubts(CONFIG, msgspec.structs.replace(good, duplicates=most)) if "two arms" in d]
    found = [d for d in doubts(CONFIG, msgspec.structs.replace(good, duplicates=most + 1)) if "two arms" in d]
    assert found == [f"{most + 1} of {n + most + 1} units were seen in two arms"]


def _coverage_look(log_e: float, *, test: str = "feedback coverage per turn, all turns") -> TurnLook:
    return TurnLook(test=test, at=NOON, units=10, n_treated=5, turns=20, log_e=log_e, treated=0.25, control=0.5)


def test_what_all_turns_say_of_feedback_is_doubted_from_one_in_a_hundred_on() -> None:
    # one look of 64 has a 64th of the evidence: log E has to reach ln 100 + ln 64
    needed = math.log(100.0) + math.log(64.0)
    said = "feedback coverage per turn: somebody reacts to 50.0% of the champion's turns and to 75.0% of the candidate's"
    assert _doubts(turn_looks=(_coverage_look(needed + 1e-9),)) == [said]
    assert _doubts(turn_looks=(_coverage_look(needed - 1e-6),)) == []
    assert _doubts(turn_looks=(_coverage_look(50.0, test="fault, all turns"),)) == []
    both = math.log(math.exp(needed) / 2.0)
    assert _doubts(turn_looks=(_coverage_look(both + 1e-9), _coverage_look(both + 1e-9))) == [said]


# --- harm, and how it is said -----------------------------------------------------------------------------------------------------


def _family(peak: float, *, rejected: bool = False, cause: str = "task_success") -> FamilyEvidence:
    return FamilyEvidence(log_e=0.0, peak_log_e=peak, rejected_at=5 if rejected else None, cause=cause, log_weighted={})


EFFECTS = {name: {"treated": 0.5, "control": 0.625, "n_treated": 1.0, "n_control": 1.0} for name in ("task_success", "asks")}


@pytest.mark.parametrize(("peak", "changed", "found"), [(3.0, True, True), (2.9999, True, False), (3.0, False, False)])
def test_half_the_evidence_is_enough_beside_changed_behaviour(peak: float, changed: bool, found: bool) -> None:
    needed = 3.0 + math.log(2.0)
    behaviour = _family(9.0, rejected=changed, cause="asks")
    harm = Harm(family=_family(peak), needed=needed, looks=(), behaviour=behaviour, effects=EFFECTS)
    assert harm.found is found
    if found:
        assert harm.reason == (
            "harm on task_success: log E 3.00 reached 3.00; 0.500 against 0.625 (good is up), "
            "and asks changed: 0.500 against 0.625 (good is up)"
        )


def test_harm_is_said_by_the_half_that_found_it() -> None:
    alone = Harm(family=_family(4.0, rejected=True), needed=3.5, looks=())
    assert (alone.found, alone.changed, alone.reason) == (True, None, "harm on task_success: log E 4.00 reached 3.50; no units")
    quiet = LookSummary(metric="reward", rejected_at=None, looks=1, z=0.0, boundary=3.0)
    crossed = LookSummary(metric="task_success", rejected_at=400, looks=2, z=3.5, boundary=3.0)
    by_look = Harm(family=_family(0.0), needed=3.5, looks=(quiet, crossed), effects=EFFECTS)
    assert by_look.reason == "harm on task_success: group-sequential look crossed at 400 units; 0.500 against 0.625 (good is up)"
    assert not Harm(family=_family(0.0), needed=3.5, looks=(quiet,)).found
    assert by_look.numbers()["found"] is True


def test_turns_that_are_no_numbers_and_arms_without_anybody() -> None:
    with pytest.raises(ValueError, match="looks that are no numbers"):
        harm_of(CONFIG, _evidence(people(20), turn_looks=(_coverage_look(math.nan, test="fault, all turns"),)))
    alone = effect_of(Units.observed(outcome=[1.0, 0.5], treated=True, probability=0.5, baseline=0.5))
    assert alone == {"treated": 0.75, "control": 0.0, "n_treated": 2.0, "n_control": 0.0}


def test_a_margin_after_a_promotion_replaces_a_narrower_one_only() -> None:
    reference = Reference(mean=0.6, variance=0.24, units=0)
    metric = next(m for m in CONFIG.metrics if m.name == "task_success")  # its own abort margin is .02
    thresholds = [process_for(CONFIG, metric, reference, margin=m).legs[0].threshold for m in (None, 0.01, 0.05)]
    assert thresholds == [-0.02, -0.02, -0.05]
    changed = next(m for m in CONFIG.metrics if m.name == "asks")
    assert [leg.threshold for leg in process_for(CONFIG, changed, reference).legs] == [-0.03, 0.03]
