"""Charts are valid SVG, told in words for who does not see them, and never by colour alone."""

from datetime import UTC, datetime, timedelta
from typing import Any
from xml.etree import ElementTree

import pytest

from app.console.charts import MARKS, Line, Point, over_time, strip

START = datetime(2026, 1, 1, tzinfo=UTC)


def line(name: str, *values: float, dashed: bool = False) -> Line:
    points = [Point(at=START + timedelta(hours=n), value=v, low=v - 0.1, high=v + 0.1) for n, v in enumerate(values)]
    return Line(name=name, points=points, dashed=dashed)


def test_each_series_has_its_line_its_band_and_its_name() -> None:
    drawn = ElementTree.fromstring(over_time([line("first", 0.1, 0.2), line("<second>", 0.3, 0.4, dashed=True)], title="t", threshold=0.0))
    assert len([e for e in drawn.iter() if e.tag == "polyline"]) == 2
    assert len([e for e in drawn.iter() if e.tag == "polygon"]) == 2
    assert [e.get("class") for e in drawn.iter() if e.tag == "polyline"] == ["line s0", "line s1 dashed"]
    assert any((e.text or "").endswith("<second>") for e in drawn.iter())
    assert "first 0.2 [0.1, 0.3]" in (drawn.get("aria-label") or "")
    assert [e for e in drawn.iter() if e.get("class") == "threshold"]


def test_without_a_point_nothing_is_drawn_and_with_one_a_whisker() -> None:
    assert over_time([Line(name="none", points=[])], title="t") == ""
    drawn = ElementTree.fromstring(over_time([line("one", 0.5)], title="t"))
    assert [e.get("class") for e in drawn.iter() if e.tag == "line"].count("whisker s0") == 1


def test_an_interval_without_end_is_not_drawn() -> None:
    endless = Line(name="n", points=[Point(at=START, value=0.0, low=float("-inf"), high=float("inf"))])
    drawn = ElementTree.fromstring(over_time([endless], title="t"))
    assert not [e for e in drawn.iter() if "whisker" in (e.get("class") or "")]
    assert all("inf" not in (value or "") for e in drawn.iter() for name, value in e.items() if name != "aria-label")


def test_slots_differ_in_shape_as_well_as_in_colour() -> None:
    drawn = ElementTree.fromstring(strip([(state, f"{state} <b>") for state in MARKS], title="slots"))
    shapes = [e.get("d") for e in drawn.iter() if e.tag == "path"]
    assert len(set(shapes)) == len(MARKS)
    assert "done <b>" in [e.text for e in drawn.iter() if e.tag == "title"]


def drawn_of(*series: Line, **more: Any) -> ElementTree.Element:
    return ElementTree.fromstring(over_time(series, title="t", **more))


def plain(*values: float, apart: timedelta = timedelta(hours=1)) -> Line:
    return Line(name="plain", points=[Point(at=START + n * apart, value=value) for n, value in enumerate(values)])


def attributes(drawn: ElementTree.Element, tag: str, *names: str, of: str | None = None) -> list[tuple[str | None, ...]]:
    return [tuple(e.get(name) for name in names) for e in drawn.iter(tag) if of is None or e.get("class") == of]


def test_a_line_from_zero_to_one_by_hand() -> None:
    """308 wide from 44, 120 high from 8; the values take 1.16 of it, with 0.08 above and below: one lies at 8 + 120 · 0.08 / 1.16."""
    drawn = drawn_of(plain(0.0, 1.0))
    assert drawn.get("viewBox") == "0 0 360 150"
    assert attributes(drawn, "polyline", "points") == [("44.0,119.7 352.0,16.3",)]
    assert attributes(drawn, "circle", "class", "cx", "cy", "r") == [("dot s0", "352.0", "16.3", "3")]
    grid = attributes(drawn, "line", "x1", "x2", "y1", "y2", of="grid")
    assert grid == [("44", "352", "118.4", "118.4"), ("44", "352", "68.0", "68.0"), ("44", "352", "17.6", "17.6")]
    texts = [(e.get("x"), e.get("y"), e.text) for e in drawn.iter("text")]
    assert texts == [
        ("40", "122.4", "0.01"), ("40", "72.0", "0.50"), ("40", "21.6", "0.99"), ("44", "144", "01-01 00:00"), ("352", "144", "+ 60 min"),
    ]  # fmt: skip


def test_bands_and_whiskers_by_hand() -> None:
    """From 0 to 1 in the values, and the newest interval from 0 to 1: an interval before it is drawn and stretches nothing."""
    points = [Point(at=START, value=0.5, low=-9.0, high=9.0), Point(at=START + timedelta(hours=1), value=0.5, low=0.0, high=1.0)]
    drawn = drawn_of(Line(name="n", points=points))
    assert attributes(drawn, "polygon", "points") == [("44.0,8.0 352.0,16.3 352.0,119.7 44.0,128.0",)]
    alone = drawn_of(Line(name="n", points=points[1:]))
    assert attributes(alone, "line", "x1", "x2", "y1", "y2", of="whisker s0") == [("44.0", "44.0", "119.7", "16.3")]
    assert attributes(alone, "polygon", "points") == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.0, 1000.0), ["13", "500", "987"]), ((0.0, 1e-4), ["0.000001", "0.000050", "0.000099"]),
        ((0.0, 1e-5), ["0.000000", "0.000005", "0.000010"]),
        ((0.0, 10.0), ["0.1", "5.0", "9.9"]), ((5.0, 5.0), ["4.916", "5.000", "5.084"]), ((0.0, 100.0), ["1", "50", "99"]),
    ],
)  # fmt: skip
def test_marks_have_as_many_digits_as_tell_them_apart(values: tuple[float, float], words: list[str]) -> None:
    assert [e.text for e in drawn_of(plain(*values)).iter("text")][:3] == words


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        (timedelta(hours=48), "+ 2.0 days"), (timedelta(hours=47.9), "+ 47.9 h"), (timedelta(hours=1.5), "+ 1.5 h"),
        (timedelta(minutes=89), "+ 89 min"), (timedelta(0), "+ 0 min"),
    ],
)  # fmt: skip
def test_the_time_it_spans_is_told_in_a_unit_that_fits(apart: timedelta, words: str) -> None:
    assert [e.text for e in drawn_of(plain(0.0, 1.0, apart=apart)).iter("text")][-1] == words


def test_a_threshold_and_zero_are_in_sight() -> None:
    drawn = drawn_of(plain(2.0, 4.0), threshold=12.0, zero=True)
    (rule,) = attributes(drawn, "line", "x1", "x2", "y1", "y2", of="threshold")
    assert rule == ("44", "352", "16.3", "16.3"), "the highest, from 0 on"
    assert attributes(drawn_of(plain(2.0, 4.0)), "line", "y1", of="threshold") == []
    assert drawn_of(plain(0.0, 1.0)).get("aria-label") == "t: plain 1"
    half = Line(name="half", points=[Point(at=START, value=0.123456, low=0.1)])
    assert drawn_of(half).get("aria-label") == "t: half 0.123"


def test_several_series_have_a_key_each_and_four_colours_in_turns() -> None:
    drawn = drawn_of(*[plain(0.0, float(n)) for n in range(1, 6)])
    assert drawn.get("viewBox") == "0 0 360 168"
    assert attributes(drawn, "polyline", "class") == [("line s0",), ("line s1",), ("line s2",), ("line s3",), ("line s0",)]
    keys = [(e.get("class"), e.get("x"), e.get("y")) for e in drawn.iter("text")][-5:]
    assert keys[:2] + keys[4:] == [("key s0", "44", "162"), ("key s1", "194", "162"), ("key s0", "644", "162")]
    long = drawn_of(plain(0.0), Line(name="n" * 21, points=plain(1.0).points, dashed=True))
    assert [e.text for e in long.iter("text")][-2:] == ["━ plain", "╌ " + "n" * 20]


def test_twenty_four_slots_stand_in_a_row() -> None:
    drawn = ElementTree.fromstring(strip([("done", "d")] * 23 + [("held", "h"), ("new", "n")], title="slots"))
    places = [e.get("transform") for e in drawn.iter("g")]
    assert places[:2] + places[23:] == ["translate(0,0)", "translate(15,0)", "translate(345,0)", "translate(0,17)"]
    assert drawn.get("viewBox") == "0 0 360 34"
    assert ElementTree.fromstring(strip([("done", "d")] * 24, title="slots")).get("viewBox") == "0 0 360 17"
    assert [e.get("d") for e in drawn.iter("path")][-2:] == [MARKS["held"], ""]
    assert attributes(drawn, "rect", "class", "width", "height")[-1] == ("slot new", "14", "14")
    assert strip([], title="slots") == ""
