"""Charts are valid SVG, with a line per version and a dot per bucket."""

from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

from app.console.charts import bars, lines, reaction_series
from app.domain.views import LabelRow

START = datetime(2026, 1, 1, tzinfo=UTC)


def label(version: str, seconds: float, persistence: float | None) -> LabelRow:
    return LabelRow(
        version=version, segment="", tier="", reward=0.0, exclusion=None, persistence=persistence, follow_up=None, success=None,
        tokens=None, finished_at=START + timedelta(seconds=seconds), arm="champion",
    )  # fmt: skip


def test_each_version_gets_its_line() -> None:
    labels = [label(version, second, 0.5) for version in ("a", "b") for second in range(100)]
    drawn = ElementTree.fromstring(lines(reaction_series(labels, {"a": "first", "b": "<second>"}), title="t"))
    assert len([e for e in drawn.iter() if e.tag == "polyline"]) == 2
    assert "<second>" in [e.text for e in drawn.iter()]


def test_labels_without_an_edit_are_not_drawn() -> None:
    assert lines(reaction_series([label("a", 1, None)], {}), title="t") == ""


def test_a_bucket_with_too_few_labels_is_left_out() -> None:
    series = reaction_series([label("a", 0, 1.0), label("a", 100, 1.0), label("a", 100, 1.0), label("a", 100, 0.0)], {})
    assert len(series[0].points) == 1


def test_values_outside_the_range_are_counted_in_the_outermost_bars() -> None:
    drawn = ElementTree.fromstring(bars([-5.0, 0.0, 5.0], low=-1, high=1, buckets=4))
    titles = [e.text for e in drawn.iter() if e.tag == "title"]
    assert titles == ["1", "0", "1", "1"]  # 0.0 is the beginning of the third of four buckets over [-1, 1)
