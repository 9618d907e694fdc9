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
    grader_agrees,
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


def test_nine_votes_of_one_mind_are_enough_and_eight_are_not() -> None:
    """Against "at most 0" the stakes s make (1 + s)^n, on average: 26.6 with eight votes, 45.6 with nine; 2 / 0.05 = 40 are needed."""
    assert preference_interval([1.0] * 8)[0] < 0.0 < preference_interval([1.0] * 9)[0]
    assert preference_interval([-1.0] * 9)[1] < 0.0 < preference_interval([-1.0] * 8)[1]
    assert preference_interval([1.0] * 9)[1] == 1.0
    assert preference_interval([1.0] * 8, alpha=0.1)[0] > 0.0, "half of it at each end: 20 are enough"


@pytest.mark.parametrize("n", range(2, 22))
def test_the_end_of_an_interval_is_rejected_and_a_ten_thousandth_further_is_not(n: int) -> None:
    values = [1.0] * n + [0.0] * (n // 3)
    low, _ = preference_interval(values)
    assert rejects(values, low, alpha=0.025)
    assert not rejects(values, low + 1e-4, alpha=0.025)


def test_a_gambler_who_had_enough_once_has_won_whatever_came_later() -> None:
    assert rejects([1.0] * 9 + [-1.0] * 50, 0.0, alpha=0.025)
    assert not rejects([-1.0] * 50 + [1.0] * 9, 0.0, alpha=0.025)


@pytest.mark.parametrize(("pairs", "judges", "part"), [(1, 2, 1), (5, 2, 3), (6, 2, 3), (7, 3, 3), (60, 1, 60)])
def test_a_part_is_rounded_up_so_that_no_pair_is_nobodys(pairs: int, judges: int, part: int) -> None:
    assert part_of(pairs, judges=judges) == part


@pytest.mark.parametrize(
    ("scores", "favoured", "agrees"),
    [
        ((0.2, 0.3), Favoured.CANDIDATE, True), ((0.2, 0.3), Favoured.CHAMPION, False), ((0.3, 0.2), Favoured.CHAMPION, True),
        ((0.3, 0.2), Favoured.CANDIDATE, False), ((0.3, 0.3), Favoured.CANDIDATE, None), ((0.2, 0.3), Favoured.SAME, None),
        ((0.2, 0.3), Favoured.NEITHER, None),
    ],
)  # fmt: skip
def test_a_grader_agrees_where_both_favour_the_same_answer(scores: tuple[float, float], favoured: Favoured, agrees: bool | None) -> None:
    assert grader_agrees(*scores, favoured) is agrees


def test_a_pair_whose_words_are_gone_still_counts_and_the_grader_is_not_asked_about_it() -> None:
    found = preference_of([], [vote(0, Favoured.CANDIDATE), vote(1, Favoured.CANDIDATE), vote(2, Favoured.CHAMPION)])
    assert (found.pairs, found.counted, found.graders_asked, found.people_asked) == (3, 3, 0, 0)
    assert found.net == pytest.approx(1 / 3)


def test_what_people_say_of_a_release_is_one_sentence() -> None:
    assert preference_of([], []).sentence().startswith("no blind pairs were kept")
    assert preference_of([pair(0)], []).sentence() == "1 blind pairs, none judged yet"
    said = [vote(0, Favoured.CANDIDATE), vote(1, Favoured.CHAMPION), vote(2, Favoured.CANDIDATE), vote(3, Favoured.SAME)]
    alone = preference_of([pair(n) for n in range(6)], said).sentence()
    assert "by +0.25 [" in alone
    assert alone.endswith("(2 candidate, 1 champion, 1 the same, 0 both bad; 4 of 6 pairs, 1 person)")
    both = preference_of([pair(n) for n in range(6)], [*said, vote(4, Favoured.NEITHER, by="user:bob")]).sentence()
    assert both.endswith("(2 candidate, 1 champion, 1 the same, 1 both bad; 5 of 6 pairs, 2 people)")
