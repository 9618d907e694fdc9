"""The numbers under `suspects`, each worked out by hand or from its definition, on both sides of every bound."""

from collections.abc import Sequence
from datetime import timedelta
from math import comb, exp, floor, log, log1p

import pytest

from pipelines.batching.raters import Cell, Verdict, _differ, _group, _log_odds, _log_ratio, _poisson_tail, features, quarantined, suspects
from tests.fakes.learning import NOON
from tests.unit.pipelines.batching.test_choosing import turn

SHARES = (0.01, 0.03, 0.06, 0.12, 0.25)
EVEN: Cell = (12, 6, 4, 2)
"""Somebody whose good verdicts are spread evenly: their odds ratio is 1."""
BOUGHT: Cell = (16, 6, 6, 6)


def test_an_answer_is_known_by_its_first_two_hundred_words_their_pairs_and_its_length() -> None:
    answer = turn(0, completion=" ".join(f"W{n}" for n in range(202)), completion_tokens=9)
    found = features(answer, long=8)
    assert {"w0", "w199", "w0 w1", "w198 w199", "<long>"} <= found
    assert not {"w200", "w199 w200", "W0"} & found
    assert len(found) == 200 + 199 + 1
    assert "<long>" not in features(answer, long=9)


@pytest.mark.parametrize(
    ("count", "mean", "tail"),
    [(0, 1.0, 1.0), (1, 2.0, 1 - exp(-2)), (3, 1.0, 1 - 2.5 * exp(-1)), (2, 3.0, 1 - 4 * exp(-3)), (400, 3.0, 0.0)],
)
def test_the_tail_of_a_poisson_law_is_one_minus_what_is_below_it(count: int, mean: float, tail: float) -> None:
    assert _poisson_tail(count, mean) == pytest.approx(tail, abs=1e-12)
    assert _poisson_tail(count, mean) >= 0.0


@pytest.mark.parametrize(
    ("theirs", "others", "differ"),
    [(22, 22, False), (26, 26, True), (16, 1_000, False), (17, 1_000, True), (0, 50, False), (50, 0, False)],
)
def test_shares_differ_above_four_standard_errors(theirs: int, others: int, *, differ: bool) -> None:
    """All of theirs and half of the others': among 24 each the error is sqrt(3/4 x 1/4 x 2/24) = 1/8, and half is four times that."""
    all_good, half = [True] * theirs, [True, False] * (others // 2)
    assert _differ(all_good, half) is differ
    assert _differ([not good for good in all_good], half) is differ
    assert not _differ([True] * 50, [True] * 50)


@pytest.mark.parametrize(
    ("cells", "odds"),
    [
        ([], 0.0),
        ([EVEN], 0.0),
        ([(8, 4, 4, 4)], 1.5),  # (0.5 + 4 x 4 / 8) / 0.5 = 5, whose logarithm is 1.61
        ([(10, 5, 4, 3)], 1.0),  # (0.5 + 3 x 4 / 10) / (0.5 + 1 x 2 / 10) = 17 / 7: 0.89
        ([(10, 5, 4, 1)], -1.0),
        ([(8, 4, 4, 4), (10, 5, 4, 3)], 1.5),  # (0.5 + 2 + 1.2) / (0.5 + 0.2): 1.67
        ([(12, 12, 4, 4)], 0.0),  # who likes everything
        ([(16, 8, 8, 8)], 2.0),  # (0.5 + 8 x 8 / 16) / 0.5 = 9, whose logarithm is 2.2
        ([(1_600, 800, 800, 800)], 2.0),  # as if of sixteen: 800 x 800 / 1600 x 16 / 1600 = 4, and 9 once more
    ],
)
def test_everybody_s_odds_are_told_in_halves(cells: Sequence[Cell], odds: float) -> None:
    assert _log_odds(cells) == odds


def likelihood(cell: Cell, psi: float) -> float:
    """Fisher's noncentral hypergeometric distribution, by its definition."""
    verdicts, good, seen, liked = cell
    ways = {
        j: comb(good, j) * comb(verdicts - good, seen - j) * psi**j for j in range(seen + 1) if seen - j <= verdicts - good and j <= good
    }
    return ways[liked] / sum(ways.values())


@pytest.mark.parametrize("cell", [EVEN, BOUGHT, (10, 7, 5, 3), (10, 3, 9, 2), (9, 8, 4, 3), (20, 11, 6, 6), (5, 2, 2, 0)])
def test_the_ratio_is_that_of_two_noncentral_draws(cell: Cell) -> None:
    for usual, step in ((0.0, log(200)), (-0.5, -log(200)), (1.5, 2.0)):
        told = likelihood(cell, exp(usual + step)) / likelihood(cell, exp(usual))
        assert exp(_log_ratio(*cell, usual, usual + step)) == pytest.approx(told)


@pytest.mark.parametrize("disliked", [False, True])
def test_a_group_is_found_where_its_evidence_exceeds_two_questions_a_feature_at_one_in_a_hundred(*, disliked: bool) -> None:
    """The e-value is the best of five shares, divided by five; then as many features may be asked about as it pays for."""
    bought: Cell = (16, 10, 6, 0) if disliked else BOUGHT
    table = {f"bought-{n}": bought for n in range(3)} | {f"even-{n}": EVEN for n in range(24)}
    usual, step = (-0.5, -log(200)) if disliked else (0.5, log(200))
    assert _log_odds(table.values()) == usual
    ratios = [likelihood(cell, exp(usual + step)) / likelihood(cell, exp(usual)) for cell in table.values()]
    evidence = max(sum(log1p(share * (ratio - 1)) for ratio in ratios) for share in SHARES) - log(5)
    most = floor(exp(evidence) * 0.01 / 2)
    assert most > 3, (most, _log_odds(table.values()))
    assert _group(table, features=most) == ["bought-0", "bought-1", "bought-2"]
    assert _group(table, features=most + 1) == []


def test_a_group_has_three_raters_however_plain_the_evidence() -> None:
    plain: Cell = (40, 20, 20, 20)
    honest = {f"even-{n}": (40, 20, 20, 10) for n in range(200)}
    assert _group({"a": plain, "b": plain} | honest, features=1) == []
    assert _group({"a": plain, "b": plain, "c": plain} | honest, features=1) == ["a", "b", "c"]


def test_a_rater_belongs_to_a_group_with_four_chances_of_five() -> None:
    unsure: dict[str, Cell] = {f"{v}-{g}": (v, g, g, g) for v in range(4, 12) for g in (2, 3)}
    table = {f"bought-{n}": (16, 6, 6, 6) for n in range(8)} | {f"even-{n}": (16, 8, 8, 4) for n in range(200)} | unsure
    assert _log_odds(table.values()) == 0.0
    ratios = {name: likelihood(cell, 200.0) / likelihood(cell, 1.0) for name, cell in table.items()}
    share = max(SHARES, key=lambda s: sum(log1p(s * (ratio - 1)) for ratio in ratios.values()))
    chance = {name: share * ratio / (1 - share + share * ratio) for name, ratio in ratios.items()}
    assert any(0.7 < one < 0.8 for one in chance.values())
    assert any(0.8 < one < 0.9 for one in chance.values())
    assert _group(table, features=1) == [name for name, one in chance.items() if one > 0.8]


def verdict(rater: str, hour: float, *, good: bool, newcomer: bool = False) -> Verdict:
    return Verdict(rater=rater, newcomer=newcomer, good=good, at=NOON + timedelta(hours=hour), features=frozenset())


def town(*, sybils: int, known: int, hours: int = 3) -> list[Verdict]:
    """One newcomer in the first hour, the sybils in the last, who like everything, and known people who like every second thing."""
    return [
        verdict("first", 0, good=False, newcomer=True),
        *(verdict(f"s{n}", hours - 1, good=True, newcomer=True) for n in range(sybils) for _ in range(20)),
        *(verdict(f"k{n}", 0, good=m % 2 == 0) for n in range(known) for m in range(20)),
    ]


@pytest.mark.parametrize(
    ("sybils", "known", "hours", "found"),
    [
        (8, 20, 3, True),  # usually 1 an hour, so at most 2 are expected: 8 and more have 0.0011 of chance, below 0.01 / 3
        (7, 20, 3, False),  # 0.0045
        (8, 20, 2, False),  # nothing is usual in two hours
        (7, 20, 9, True),  # usually none: 7 and more of an expected 1 have 0.00008, below 0.01 / 9
        (6, 20, 9, True),  # 0.0006
        (5, 20, 9, False),  # 0.0037
        (8, 8, 3, True),  # 8 of 17
        (8, 7, 3, False),  # half of all
    ],
)
def test_newcomers_of_one_hour_are_suspected_where_that_many_are_no_chance_and_they_are_less_than_half(
    sybils: int, known: int, hours: int, *, found: bool
) -> None:
    told = suspects(town(sybils=sybils, known=known, hours=hours))
    assert set(told) == ({f"s{n}" for n in range(sybils)} if found else set())
    assert suspects([]) == {}


def test_newcomers_of_one_hour_say_how_many_they_are_and_how_many_are_usual() -> None:
    told = suspects(town(sybils=8, known=20))
    assert set(told.values()) == {"8 newcomers of one hour (usually 1) judge unlike everybody else"}


def test_a_newcomer_begins_with_the_first_verdict_and_an_hour_is_the_clock_s() -> None:
    later = [verdict(f"s{n}", 5, good=True, newcomer=True) for n in range(8)]
    spread = [verdict(f"s{n}", n % 2 * 0.98 + 2, good=True, newcomer=True) for n in range(8) for _ in range(20)]
    assert len(suspects([*later, *town(sybils=0, known=20), *spread])) == 8
    apart = [verdict(f"s{n}", n % 2 * 1.02 + 2, good=True, newcomer=True) for n in range(8) for _ in range(20)]
    assert suspects([*later, *town(sybils=0, known=20), *apart]) == {}


def test_nothing_is_asked_of_turns_of_which_nobody_said_anything() -> None:
    silent = [turn(n, has_outcome=False) for n in range(3)] + [turn(9, exclusion="no_signal")]
    assert quarantined(silent, {}) == {}
