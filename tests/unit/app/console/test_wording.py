"""How values are written on the pages."""

from datetime import timedelta

import pytest

from app.console import wording
from app.domain.ids import utc_now
from app.domain.views.measures import Measure


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5.0, "0 s"), (59.4, "59 s"), (60.0, "1 min"), (3_599.0, "60 min"), (3_600.0, "1 h 0 min"), (172_799.0, "47 h 59 min"),
        (172_800.0, "2 d"), (10 * 86_400.0, "10 d"),
    ],
)  # fmt: skip
def test_a_length_of_time_is_in_its_largest_unit(seconds: float, words: str) -> None:
    assert wording.span(seconds) == words


def test_a_moment_is_so_long_ago_or_so_far_off_or_over() -> None:
    now = utc_now()
    assert wording.age(now - timedelta(hours=5, minutes=7, seconds=30)) == "5 h 7 min ago"
    assert wording.left(now + timedelta(hours=5, minutes=7, seconds=30)) == "5 h 7 min left"
    assert wording.left(now - timedelta(seconds=1)) == "over"


def test_what_is_not_known_is_a_dash() -> None:
    assert {wording.short(None), wording.share(None), wording.clock_time(None), wording.age(None), wording.left(None)} == {"–"}
    assert wording.measured(None) == "–"


def test_figures_are_short() -> None:
    assert wording.short("0123456789abcdef") == "0123456789ab"
    assert wording.share(0.0125) == "1.2 %"
    assert (wording.plural(1, "person", "people"), wording.plural(12_300, "person", "people")) == ("1 person", "12,300 people")
    assert (wording.plural(1, "turn"), wording.plural(0, "turn")) == ("1 turn", "0 turns")
    assert wording.measured(Measure(mean=0.5, low=0.25, high=0.75, n=3)) == "0.500 [0.250, 0.750]"
