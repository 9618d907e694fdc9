"""Blind pairs: sides are drawn and told to nobody, each pair counts once, and the interval is good at every look."""

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.release.pairs import (
    STAKES,
    BlindPair,
    BlindVote,
    Choice,
    Favoured,
    next_for,
    part_of,
    preference_interval,
    preference_of,
    rejects,
)

START = datetime(2026, 1, 1, tzinfo=UTC)


def pair(n: int, *, lead: float = 1.0) -> BlindPair:
    return BlindPair(
        id=f"{n:03}", release_id="r", policy="p", suite="s", task=f"t{n}", cluster="", messages=[], champion_answer="old",
        candidate_answer="new", champion_score=0.0, candidate_score=lead, salt=f"salt {n}",
    )  # fmt: skip


def vote(n: int, favoured: Favoured, *, by: str = "user:ada", counted: bool = True, proven: bool = True) -> BlindVote:
    return BlindVote(
        pair_id=f"{n:03}", voter=by, favoured=favoured, candidate_left=True, counted=counted, proven=proven,
        voted_at=START + timedelta(seconds=n),
    )  # fmt: skip


def draws(rng: random.Random, n: int, *, win: float, loss: float) -> list[float]:
    return [1.0 if (u := rng.random()) < win else -1.0 if u < win + loss else 0.0 for _ in range(n)]


def test_sides_are_drawn_for_each_pair_and_person_and_stay() -> None:
    sides = [pair(n).candidate_is_left(who) for n in range(500) for who in ("user:ada", "user:bob")]
    assert 430 < sum(sides) < 570  # 1,000 fair draws: 500 plus or minus 4.4 standard deviations
    assert sum(a is b for a, b in zip(sides[::2], sides[1::2], strict=True)) < 320, "two people are not drawn alike"
    assert pair(1).candidate_is_left("user:ada") is pair(1).candidate_is_left("user:ada")


def test_a_choice_comes_to_the_version_that_stood_there() -> None:
    for n in range(20):
        one = pair(n)
        left, right = one.sides("user:ada")
        assert one.favoured(Choice.LEFT, "user:ada") is (Favoured.CANDIDATE if left == "new" else Favoured.CHAMPION)
        assert one.favoured(Choice.RIGHT, "user:ada") is (Favoured.CANDIDATE if right == "new" else Favoured.CHAMPION)
        assert one.favoured(Choice.SAME, "user:ada") is Favoured.SAME
        assert one.favoured(Choice.NEITHER, "user:ada") is Favoured.NEITHER


def test_two_votes_by_hand() -> None:
    # "at most 0" after two votes for the candidate: the mean over the stakes s of (1 + s)^2
    capital = math.fsum((1 + s) ** 2 for s in STAKES) / len(STAKES)
    assert rejects([1.0, 1.0], 0.0, alpha=1.0 / (capital - 1e-9))
    assert not rejects([1.0, 1.0], 0.0, alpha=1.0 / (capital + 1e-9))


def test_nothing_known_is_the_whole_range_and_much_known_is_narrow() -> None:
    assert preference_interval([]) == (-1.0, 1.0)
    low, high = preference_interval(draws(random.Random(1), 400, win=0.5, loss=0.25))
    assert 0.0 < low < 0.25 < high < 0.5


@pytest.mark.parametrize(("win", "loss"), [(0.5, 0.5), (0.3, 0.3), (0.1, 0.1), (0.25, 0.35)])
def test_an_equal_or_worse_candidate_is_hardly_ever_favoured_however_often_one_looks(win: float, loss: float) -> None:
    rng = random.Random(20261122)
    found = sum(rejects(draws(rng, 200, win=win, loss=loss), 0.0, alpha=0.025) for _ in range(400))
    assert found <= 400 * 0.025 + 3 * math.sqrt(400 * 0.025 * 0.975)


def test_a_candidate_that_most_favour_is_found_with_a_hundred_votes() -> None:
    rng = random.Random(20261122)
    found = sum(rejects(draws(rng, 100, win=0.6, loss=0.2), 0.0, alpha=0.025) for _ in range(200))
    assert found >= 170


def test_only_votes_that_count_are_added_up_and_others_show_agreement() -> None:
    said = [
        vote(0, Favoured.CANDIDATE), vote(1, Favoured.CHAMPION), vote(2, Favoured.SAME), vote(3, Favoured.NEITHER),
        vote(0, Favoured.CANDIDATE, by="user:bob", counted=False), vote(1, Favoured.CANDIDATE, by="user:bob", counted=False),
    ]  # fmt: skip
    found = preference_of([pair(n) for n in range(5)], said)
    assert (found.candidate, found.champion, found.same, found.neither) == (1, 1, 1, 1)
    assert (found.pairs, found.votes, found.counted, found.people, found.net) == (5, 6, 4, 1, 0.0)
    assert (found.people_agree, found.people_asked) == (1, 2)
    # the grader favours the candidate in every pair; it and people are asked about the two pairs that somebody decided
    assert (found.graders_agree, found.graders_asked) == (1, 2)


def test_whom_nothing_proves_are_one_person() -> None:
    said: Sequence[BlindVote] = [vote(n, Favoured.SAME, by=f"user:{n}", proven=n == 0) for n in range(4)]
    assert preference_of([pair(n) for n in range(4)], said).people == 2


def test_nobody_is_given_more_than_their_part_while_others_have_not_judged() -> None:
    pairs = [f"{n:03}" for n in range(6)]
    part = part_of(6, judges=2)
    said: list[BlindVote] = []
    while (chosen := next_for("user:ada", pairs, said, part=part)) is not None:
        said.append(vote(int(chosen), Favoured.SAME))
    assert [one.pair_id for one in said] == pairs[:3]
    bob = [next_for("user:bob", pairs, said, part=part)]
    assert bob == ["003"], "first those that nobody judged"
    said += [vote(n, Favoured.SAME, by="user:bob") for n in (3, 4, 5)]
    assert next_for("user:ada", pairs, said, part=part) == "003", "then others' ones, which show agreement"
