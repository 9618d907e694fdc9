"""Charts are valid SVG, told in words for who does not see them, and never by colour alone."""

from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

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
