"""The bets against an absolute limit, by hand; what `decide()` makes of them is in test_absolute_limits."""

import math

import pytest

from pipelines.evaluation.statistics.limits import SHARES_SUM, HealthierProcess, LimitProcess, alternatives, growth


def test_the_shares_of_all_turns_sum_to_one() -> None:
    """1/((t + 2) log²(t + 2)) from t = 0 on; what lies beyond n is 1/log n."""
    most = 200_000
    known = math.fsum(1.0 / (n * math.log(n) ** 2) for n in range(2, most))
    assert pytest.approx(known + 1.0 / math.log(most), abs=1e-4) == SHARES_SUM


@pytest.mark.parametrize(
    ("limit", "rates"),
    [(0.02, (0.03, 0.04, 0.08, 0.16)), (0.2, (0.3, 0.4, 0.8)), (0.5, (0.75,)), (0.6, (0.9,)), (2 / 3, (5 / 6,)), (0.9, (0.95,))],
)
def test_a_limit_is_held_against_rates_above_it(limit: float, rates: tuple[float, ...]) -> None:
    """1.5, 2, 4 and 8 times the limit, as far as they are rates; where none is, halfway to one."""
    assert alternatives(limit) == pytest.approx(rates)


def test_a_bet_by_hand() -> None:
    # of a rate of .2 against a limit of .1: a bad turn doubles what is at stake, a good one leaves .8/.9 of it
    assert growth(0.2, 0.1, bad=True, stake=1.0) == pytest.approx(math.log(2.0))
    assert growth(0.2, 0.1, bad=False, stake=1.0) == pytest.approx(math.log(0.8 / 0.9))
    assert growth(0.2, 0.1, bad=True, stake=0.25) == pytest.approx(math.log(1.25))


def test_two_turns_against_one_alternative_by_hand() -> None:
    """Limit .5, alternative .75: a bad turn multiplies by 1.5, a good one by .5. Two bad turns: what began with the first has grown
    twice, what began with the second once, and the rest has not begun."""
    process = LimitProcess(limit=0.5)
    process.bet(bad=True, stake=1.0)
    first, second = (1.0 / (SHARES_SUM * n * math.log(n) ** 2) for n in (2, 3))
    assert process.log_e == pytest.approx(math.log(first * 1.5))
    process.bet(bad=True, stake=1.0)
    assert process.log_e == pytest.approx(math.log(first * 1.5**2 + second * 1.5))
    assert (process.turns, process.rise, process.began) == (2, [pytest.approx(2 * math.log(1.5))], [0])
    assert process.calm == 0.0, "a rate of a quarter would have been half as bad: nothing speaks for it"


def test_what_is_seen_began_after_the_last_turn_that_spoke_against_it() -> None:
    process = LimitProcess(limit=0.5)
    for bad in (True, False, False, True, True):  # +.41, −.69: below nothing; −.69; then the rise that is seen
        process.bet(bad=bad, stake=1.0)
    assert (process.onset, process.rise) == (3, [pytest.approx(2 * math.log(1.5))])
    assert process.calm == pytest.approx(max(0.0, 2 * math.log(1.5) + 2 * math.log(0.5)))
    process.restart()
    assert (process.onset, process.rise, process.log_e, process.turns) == (5, [0.0], -math.inf, 5)


def test_the_alternative_that_fits_best_says_when_it_began() -> None:
    """Limit .02: one bad turn of three fits eight times the limit best, and the two before it were good."""
    process = LimitProcess(limit=0.02)
    for bad in (False, False, True):
        process.bet(bad=bad, stake=1.0)
    assert process.began == [2, 2, 2, 2]
    assert process.onset == 2
    assert max(process.rise) == process.rise[3] == pytest.approx(math.log(8.0))


def test_good_turns_speak_for_a_healthier_version_by_hand() -> None:
    """Against a rate of .5: .2 and .025 are expected of it. A good turn multiplies by .8/.5 and .975/.5, a bad one by .4 and .05."""
    process = HealthierProcess(rate=0.5)
    assert process.log_e == 0.0
    process.bet(bad=False, stake=1.0)
    process.bet(bad=True, stake=1.0)
    assert process.log_e == pytest.approx(math.log((1.6 * 0.4 + 1.95 * 0.05) / 2))
