"""Charts as inline SVG: lines over time with their intervals, and bars of a distribution."""

import html
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.domain.views import LabelRow, Measure, measure

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 240, 40, 28, 10
COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#975a16", "#2c7a7b", "#742a2a")
BUCKETS = 24
LEAST_IN_BUCKET = 3


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line: times in seconds before the newest point, values in [0, 1]."""

    name: str
    points: tuple[tuple[float, Measure], ...]


def reaction_series(labels: Sequence[LabelRow], names: Mapping[str, str]) -> list[Series]:
    """Mean edit persistence per version and time bucket, with intervals; buckets with too few labels are left out."""
    spoken = [label for label in labels if label.persistence is not None]
    if not spoken:
        return []
    newest = max(label.finished_at for label in spoken)
    width = max(1.0, max((newest - label.finished_at).total_seconds() for label in spoken) / BUCKETS)
    grouped: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for label in spoken:
        bucket = int((newest - label.finished_at).total_seconds() / width)
        grouped[label.version][bucket].append(label.persistence or 0.0)
    return [_series(names.get(version, version[:12]), buckets, width) for version, buckets in grouped.items()]


def _series(name: str, buckets: Mapping[int, Sequence[float]], width: float) -> Series:
    enough = {bucket: measure(values, low=0, high=1) for bucket, values in buckets.items() if len(values) >= LEAST_IN_BUCKET}
    return Series(
        name=name, points=tuple((-(bucket + 0.5) * width, m) for bucket, m in sorted(enough.items(), reverse=True) if m is not None)
    )


def lines(series: Sequence[Series], *, title: str) -> str:
    """A line chart; empty text where there is nothing to draw."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    oldest = min(at for one in drawn for at, _ in one.points) or -1.0
    parts = [_frame(title, oldest)]
    for number, one in enumerate(sorted(drawn, key=lambda one: one.points[0][0])):
        parts.append(_line(one, COLOURS[number % len(COLOURS)], oldest))
        parts.append(_legend(one.name, COLOURS[number % len(COLOURS)], number))
    legend = 18 * math.ceil(len(drawn) / 3)
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT + legend}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'


def _x(at: float, oldest: float) -> float:
    return LEFT + (1 - at / oldest) * (WIDTH - LEFT - 10)


def _y(value: float) -> float:
    return TOP + (1 - min(1.0, max(0.0, value))) * (HEIGHT - TOP - BOTTOM)


def _frame(title: str, oldest: float) -> str:
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{_y(v):.1f}" y2="{_y(v):.1f}" class="grid"/>'
        f'<text x="{LEFT - 6}" y="{_y(v) + 4:.1f}" text-anchor="end">{v:.2f}</text>'
        for v in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    times = "".join(
        f'<text x="{_x(oldest * f, oldest):.1f}" y="{HEIGHT - 8}" text-anchor="middle">−{_span(-oldest * f)}</text>' for f in (0.95, 0.5)
    )
    return f"<title>{html.escape(title)}</title>{grid}{times}"


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _line(series: Series, colour: str, oldest: float) -> str:
    path = " ".join(f"{_x(at, oldest):.1f},{_y(m.mean):.1f}" for at, m in series.points)
    whiskers = "".join(_point(_x(at, oldest), m, colour) for at, m in series.points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{whiskers}'


def _point(x: float, found: Measure, colour: str) -> str:
    """A dot with its interval; hovering tells the numbers."""
    interval = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(found.low):.1f}" y2="{_y(found.high):.1f}" stroke="{colour}" opacity=".35"/>'
    dot = f'<circle cx="{x:.1f}" cy="{_y(found.mean):.1f}" r="2.5" fill="{colour}"><title>{found} of {found.n}</title></circle>'
    return interval + dot


def _legend(name: str, colour: str, number: int) -> str:
    x, y = LEFT + (number % 3) * 240, HEIGHT + 12 + 18 * (number // 3)
    return f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/><text x="{x + 16}" y="{y}">{html.escape(name)}</text>'


def bars(values: Sequence[float], *, low: float, high: float, buckets: int) -> str:
    """A histogram; values outside the range are counted in the outermost bars."""
    if not values:
        return ""
    counts = [0] * buckets
    for value in values:
        counts[min(buckets - 1, max(0, int((value - low) / (high - low) * buckets)))] += 1
    step, tallest = (WIDTH - LEFT - 10) / buckets, max(counts)
    drawn = "".join(
        f'<rect x="{LEFT + i * step + 1:.1f}" y="{_y(count / tallest):.1f}" width="{step - 2:.1f}" '
        f'height="{HEIGHT - BOTTOM - _y(count / tallest):.1f}" fill="{COLOURS[0]}"><title>{count}</title></rect>'
        for i, count in enumerate(counts)
    )
    ticks = "".join(
        f'<text x="{LEFT + f * (WIDTH - LEFT - 10):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{low + f * (high - low):g}</text>'
        for f in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="distribution">{drawn}{ticks}</svg>'
