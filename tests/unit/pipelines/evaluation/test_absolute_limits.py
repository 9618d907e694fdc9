"""Absolute limits: all turns count, of people who come back; who burns first decides nothing; one person's failures are theirs."""

import math
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from app.domain.release.gates import CanaryAction
from app.domain.release.sessions import Era, Session
from pipelines.evaluation.counting.drawings import Drawing, canary_drawing, era_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import Decision, decide
from pipelines.evaluation.statistics.limits import LimitProcess
from tests.fakes.evidence import counted
from tests.fakes.sessions import AT, session
from tests.fakes.watching import small_gates

CONFIG = small_gates()
ERA = Era(generation=2, since=AT, until=None, champion="v2", reference="v1", holdback=0.1, anchor="v1", action="promote", release_id="r")
Fails = Callable[[int, str, random.Random], bool]


def _turns(
    count: int, fails: Fails, *, arms: tuple[str, str], treated: float, people: int | None = None, seed: int = 1, **changes: Any
) -> list[Session]:
    """Turns a second apart; `arms` names (treated, control). With `people`, they come back again and again, each on one arm."""
    dice, who = random.Random(seed), random.Random(seed + 1)
    drawn: dict[int, str] = {}
    made: list[Session] = []
    for n in range(count):
        person = n if people is None else who.randrange(people)
        arm = drawn.setdefault(person, arms[0] if dice.random() < treated else arms[1])
        bad = fails(n, arm, dice)
        made.append(
            session(
                n, arm=arm, actor=f"person-{person}", finish_reason="error" if bad else "stop",
                digest="v2" if arm == arms[0] else "v1", **changes,
            )
        )  # fmt: skip
    return made


def _evidence(book: UnitBook, *, seconds: int, **changes: object) -> Evidence:
    last = book.last_session_at
    values: dict[str, object] = {"last_session_at": None if last is None else micros(last), **changes}
    return counted(book, references_of(CONFIG, []), at=micros(AT + timedelta(seconds=seconds)), **values)


def _decided(
    turns: list[Session], drawing: Drawing, judge: Callable[[Evidence], Decision], *, every: int = 20
) -> list[tuple[int, Decision]]:
    """What is decided while the turns come, with the number of turns that had come."""
    book, found = UnitBook(CONFIG, drawing, references_of(CONFIG, [])), list[tuple[int, Decision]]()
    for n in range(0, len(turns), every):
        known = turns[n : n + every]
        seconds = n + every + 5
        book.update(known, now=AT + timedelta(seconds=seconds))
        found.append((n + every, judge(_evidence(book, seconds=seconds))))
        if found[-1][1].action is CanaryAction.ABORT:
            break
    return found


def _champion(turns: list[Session], *, every: int = 20) -> list[tuple[int, Decision]]:
    return _decided(turns, era_drawing(ERA), lambda evidence: decide_champion(CONFIG, evidence), every=every)


def _canary(turns: list[Session], *, every: int = 20) -> list[tuple[int, Decision]]:
    return _decided(turns, canary_drawing(digest="v2", champion="v1"), lambda evidence: decide(CONFIG, evidence), every=every)


def _holdback(count: int, fails: Fails, *, people: int | None = None, seed: int = 1) -> list[Session]:
    return _turns(count, fails, arms=("champion", "previous"), treated=0.9, people=people, seed=seed, holdback=0.1, share=0.0)


def _at_half(count: int, fails: Fails, *, people: int | None = None, seed: int = 1) -> list[Session]:
    return _turns(count, fails, arms=("candidate", "champion"), treated=0.5, people=people, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_fault_of_the_place_is_an_incident_and_no_versions_fault(seed: int) -> None:
    """40 % faults on all versions rolled every one of them back: the treated arm, nine times as large, burnt its limit first."""
    decided = _champion(_holdback(900, lambda n, _arm, dice: dice.random() < (0.4 if n > 300 else 0.005), seed=seed))
    assert {decision.action for _, decision in decided} == {CanaryAction.CONTINUE, CanaryAction.HOLD}
    assert decided[-1][1].cause == "incident"
    assert "nothing moves" in decided[-1][1].reason


def test_a_champion_that_fails_while_its_holdback_does_not_is_rolled_back() -> None:
    decided = _champion(_holdback(900, lambda n, arm, dice: dice.random() < (0.4 if n > 300 and arm == "champion" else 0.005)))
    assert decided[-1][1].action is CanaryAction.ABORT
    assert decided[-1][0] <= 600, "300 healthy turns cost it no more than 300 others"


def test_a_reference_that_burns_says_nothing_against_the_champion() -> None:
    decided = _champion(_holdback(900, lambda n, arm, dice: dice.random() < (0.5 if n > 300 and arm == "previous" else 0.005)))
    assert {decision.action for _, decision in decided} == {CanaryAction.CONTINUE}
    assert decided[-1][1].numbers["reference_burnt"], "the champion beside it is healthier: nobody stays on the reference"


def test_a_reference_is_not_blamed_for_a_fault_of_the_place() -> None:
    decided = _champion(_holdback(900, lambda n, _arm, dice: dice.random() < (0.5 if n > 300 else 0.005)))
    assert not any(decision.numbers["reference_burnt"] for _, decision in decided)


def test_a_burning_control_arm_does_not_abort_the_healthy_candidate() -> None:
    decided = _canary(_at_half(800, lambda _n, arm, dice: dice.random() < (0.5 if arm == "champion" else 0.005)))
    assert CanaryAction.ABORT not in {decision.action for _, decision in decided}


def test_a_candidate_under_an_incident_is_held_and_not_aborted() -> None:
    decided = _canary(_at_half(800, lambda n, _arm, dice: dice.random() < (0.4 if n > 200 else 0.005)))
    assert decided[-1][1].cause == "incident"
    assert CanaryAction.ABORT not in {decision.action for _, decision in decided}


def test_an_incident_that_is_over_holds_nothing() -> None:
    decided = _canary(_at_half(1500, lambda n, _arm, dice: dice.random() < (0.4 if 200 < n <= 400 else 0.005)))
    assert any(decision.cause == "incident" for _, decision in decided)
    assert decided[-1][1].cause != "incident"


def test_a_champion_that_fails_every_answer_to_known_people_is_seen_at_once() -> None:
    """With one unit per person and era, a champion that failed every answer to 600 known people was not rolled back in four hours."""
    decided = _champion(_holdback(3000, lambda n, arm, _dice: n > 2400 and arm == "champion", people=600))
    assert decided[-1][1].cause == "slo"
    assert decided[-1][0] <= 2400 + 240, "some 24 turns of the reference among them: that is what shows it to be healthier"


def test_a_candidate_whose_turns_after_the_first_all_fail_is_seen_at_once() -> None:
    """It was aborted after 57 minutes and 1,888 of 2,158 answers."""
    seen: set[tuple[str, int]] = set()

    def fails(n: int, arm: str, _dice: random.Random) -> bool:
        again = (arm, n // 3) in seen
        seen.add((arm, n // 3))
        return arm == "candidate" and again

    turns = [
        session(n, arm=arm, actor=f"person-{n // 3}", finish_reason="error" if fails(n, arm, random.Random(1)) else "stop")
        for n in range(900)
        for arm in ["candidate" if (n // 3) % 2 else "champion"]
    ]
    decided = _canary(turns)
    assert decided[-1][1].action is CanaryAction.ABORT
    assert decided[-1][0] <= 200


def test_a_candidate_that_fails_every_answer_is_aborted_within_thirty_requests() -> None:
    decided = _canary(_at_half(100, lambda _n, arm, _dice: arm == "candidate"), every=5)
    assert decided[-1][1].action is CanaryAction.ABORT
    assert decided[-1][0] <= 30


def test_one_person_in_a_loop_of_failing_retries_burns_no_limit() -> None:
    """Of ten people one retries for ever, four turns of five in all; everybody else is fine."""
    turns = [
        session(n, arm="champion", actor="looping" if n % 5 else f"person-{n // 5 % 9}", finish_reason="error" if n % 5 else "stop")
        for n in range(3000)
    ]
    assert all(not decision.numbers["burnt"] for _, decision in _canary(turns, every=100))


def test_a_long_healthy_past_hides_no_incident() -> None:
    # log_e needs 6.9 at alpha 0.001; 50,000 turns cost log(t log^2 t) = 10.8 + 4.8 + 0.7 more: 23.2 of evidence, 2.08 per bad turn at 8 L
    process = LimitProcess(limit=0.1)
    for n in range(50_000):
        process.bet(bad=n % 100 == 0, stake=1.0)
    assert process.log_e < -math.log(0.001)
    for _ in range(13):
        process.bet(bad=True, stake=1.0)
    assert process.log_e > -math.log(0.001)


def test_the_limit_is_kept_in_spite_of_peeking_after_every_turn() -> None:
    """At exactly the limit, 300 runs of 3,000 turns, looked at after each: at most alpha of them alarm (alpha 0.05: 15, with 3 SE 26)."""
    dice, alarms = random.Random(3), 0
    for _ in range(300):
        process = LimitProcess(limit=0.1)
        for _ in range(3000):
            process.bet(bad=dice.random() < 0.1, stake=1.0)
            if process.log_e >= -math.log(0.05):
                alarms += 1
                break
    assert alarms <= 26
