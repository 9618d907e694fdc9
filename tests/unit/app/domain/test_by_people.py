"""Judged by people: only enough votes of enough people whose interval lies where it has to pass; nothing else ever does."""

import random

import msgspec
import pytest

from app.domain.release.by_people import PeopleTerms, Rule, judge
from app.domain.release.gates import CanaryAction, Verdict
from app.domain.release.pairs import Favoured, preference_interval

F = Favoured
TERMS = PeopleTerms(enabled=True, votes=40, judges=2)
DAY = 86_400.0


def said(candidate: int, champion: int, same: int = 0) -> list[Favoured]:
    """So many of each, in an order drawn once."""
    words = [F.CANDIDATE] * candidate + [F.CHAMPION] * champion + [F.SAME] * same
    random.Random(20261122).shuffle(words)
    return words


def test_votes_for_the_candidate_pass() -> None:
    found = judge(TERMS, said(40, 10, 10), pairs=100, people=2, waited_s=0.0)
    assert (found.action, found.verdict) == (CanaryAction.READY, Verdict.PASS)
    assert found.reason.startswith("judged by people, not by traffic: preference +0.50 [")
    assert found.numbers["net"] == 0.5  # (40 - 10) / 60


@pytest.mark.parametrize(
    ("votes", "people", "why"),
    [
        ([], 0, "nobody has voted"),
        (said(39, 0), 2, "it takes 40 votes of 2 people"),
        (said(60, 0), 1, "it takes 40 votes of 2 people"),
        (said(25, 20), 2, "does not lie above"),
    ],
)
def test_without_enough_votes_of_enough_people_nothing_passes(votes: list[Favoured], people: int, why: str) -> None:
    found = judge(TERMS, votes, pairs=100, people=people, waited_s=0.0)
    assert (found.action, found.verdict) == (CanaryAction.CONTINUE, Verdict.INCONCLUSIVE)
    assert why in found.reason
    late = judge(TERMS, votes, pairs=100, people=people, waited_s=TERMS.longest_s)
    assert (late.action, late.verdict) == (CanaryAction.INCONCLUSIVE, Verdict.INCONCLUSIVE)
    assert "the champion stays" in late.reason


def test_when_every_pair_was_judged_in_vain_it_ends() -> None:
    assert judge(TERMS, said(20, 20), pairs=40, people=2, waited_s=0.0).action is CanaryAction.INCONCLUSIVE


def test_votes_for_the_champion_end_it_at_once() -> None:
    found = judge(TERMS, said(0, 30), pairs=100, people=1, waited_s=0.0)
    assert (found.action, found.verdict) == (CanaryAction.ABORT, Verdict.FAIL)


def test_non_inferior_is_a_weaker_rule_than_superior() -> None:
    weak = msgspec.structs.replace(TERMS, rule=Rule.NON_INFERIOR, margin=0.4)
    even = said(40, 40, 40)
    assert judge(weak, even, pairs=200, people=2, waited_s=0.0).action is CanaryAction.READY
    assert judge(TERMS, even, pairs=200, people=2, waited_s=0.0).action is CanaryAction.CONTINUE


@pytest.mark.parametrize(
    "wrong",
    [
        {"votes": 19}, {"votes": 1001}, {"judges": 0}, {"judges": 21}, {"margin": 0.0}, {"margin": 1.0}, {"holdback": 0.049},
        {"holdback": 0.51}, {"holdback_s": 86_399.0}, {"longest_s": 0.0},
    ],
)  # fmt: skip
def test_terms_that_protect_nobody_are_refused(wrong: dict[str, float]) -> None:
    assert PeopleTerms().problem() is None
    assert PeopleTerms(votes=20, judges=1, margin=0.01, holdback=0.05, holdback_s=86_400.0, longest_s=1.0).problem() is None
    assert PeopleTerms(votes=1000, judges=20, margin=0.99, holdback=0.5).problem() is None
    assert PeopleTerms(**wrong).problem() is not None  # type: ignore[arg-type] - a test's own names


@pytest.mark.parametrize(
    ("votes", "people", "pairs", "waited_s", "action"),
    [
        (said(40, 0), 2, 100, 0.0, CanaryAction.READY), (said(39, 0), 2, 100, 0.0, CanaryAction.CONTINUE),
        (said(40, 0), 1, 100, 0.0, CanaryAction.CONTINUE), (said(20, 20), 2, 41, 0.0, CanaryAction.CONTINUE),
        (said(20, 20), 2, 40, 0.0, CanaryAction.INCONCLUSIVE), (said(20, 20), 2, 100, 14 * DAY, CanaryAction.INCONCLUSIVE),
        (said(20, 20), 2, 100, 14 * DAY - 1.0, CanaryAction.CONTINUE), (said(40, 0), 2, 40, 14 * DAY, CanaryAction.READY),
        (said(0, 9), 0, 1, 0.0, CanaryAction.ABORT), (said(0, 8), 0, 100, 0.0, CanaryAction.CONTINUE),
    ],
)  # fmt: skip
def test_each_bound_of_a_judgement_is_met_from_both_sides(
    votes: list[Favoured], people: int, pairs: int, waited_s: float, action: CanaryAction
) -> None:
    assert judge(TERMS, votes, pairs=pairs, people=people, waited_s=waited_s).action is action


def test_a_judgement_carries_the_numbers_it_was_made_from() -> None:
    found = judge(TERMS, [F.CANDIDATE, F.CHAMPION, F.SAME, F.CANDIDATE], pairs=70, people=2, waited_s=60.0)
    assert found.numbers["said"] == ["candidate", "champion", "same", "candidate"]
    assert found.numbers["needed"] == {"votes": 40, "people": 2, "above": 0.0, "rule": "superior"}
    assert (found.numbers["pairs"], found.numbers["people"], found.numbers["waited_s"], found.numbers["net"]) == (70, 2, 60.0, 0.25)
    assert (found.numbers["low"], found.numbers["high"]) == preference_interval([1.0, -1.0, 0.0, 1.0])
    weak = judge(msgspec.structs.replace(TERMS, rule=Rule.NON_INFERIOR), [], pairs=70, people=0, waited_s=0.0)
    assert (weak.numbers["needed"]["above"], weak.numbers["net"]) == (-0.1, None)


def test_the_terms_are_told_in_a_sentence() -> None:
    assert PeopleTerms().told() == (
        "the offline gate, 60 blind votes of 2 people whose interval lies above 0 within 14 days, then 20% of the people on the champion "
        "before for 30 days"
    )
    assert "lies above -0.25 within" in PeopleTerms(rule=Rule.NON_INFERIOR, margin=0.25).told()


def test_an_interval_that_begins_at_the_bound_does_not_lie_above_it() -> None:
    votes = said(28, 22, 10)
    low, _ = preference_interval([{F.CANDIDATE: 1.0, F.CHAMPION: -1.0, F.SAME: 0.0}[vote] for vote in votes])
    assert -1.0 < low < 0.0
    at, above = (
        judge(msgspec.structs.replace(TERMS, rule=Rule.NON_INFERIOR, margin=margin), votes, pairs=100, people=2, waited_s=0.0)
        for margin in (-low, -low + 1e-9)
    )
    assert (at.action, above.action) == (CanaryAction.CONTINUE, CanaryAction.READY)
