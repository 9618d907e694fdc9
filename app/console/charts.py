"""Charts as inline SVG: a value over time with its interval, evidence against its threshold, slots as shapes.

Colours stand out from both grounds and from each other for colour-blind people, and nothing is told by colour alone: the champion's line is
solid, the candidate's dashed, and states have shapes. Styles are classes, because the pages' policy allows no inline style.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 150, 44, 8, 8, 22
MARKS = {"done": "M2 7h10", "held": "M3 3l8 8M11 3l-8 8", "failed": "M7 2v6M7 11v1", "skipped": "M3 7h2M9 7h2", "running": "M4 3l6 4-6 4z"}
"""A shape for each state of a slot, in a square of 14."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value at a moment, with its interval."""

    at: datetime
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class _Scale:
    first: datetime
    span_s: float
    low: float
    high: float

    def x(self, at: datetime) -> float:
        return LEFT + (at - self.first).total_seconds() / self.span_s * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        bounded = min(self.high, max(self.low, value))
        return TOP + (self.high - bounded) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def over_time(lines: Sequence[Line], *, title: str, threshold: float | None = None, zero: bool = False) -> str:
    """Lines with bands; `threshold` is drawn dotted. Empty text without any point."""
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    scale = _scale(drawn, threshold, zero=zero)
    inside = [_frame(scale)]
    if threshold is not None:
        inside.append(_rule(scale, threshold, "threshold"))
    for number, line in enumerate(drawn):
        inside.append(_drawn(scale, line, f"s{number % 4}"))
    told = "; ".join(_told(line) for line in drawn)
    legend = "".join(_key(number, line) for number, line in enumerate(drawn)) if len(drawn) > 1 else ""
    label = html.escape(f"{title}: {told}")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT + (18 if len(drawn) > 1 else 0)}"'
    return f'<svg class="chart" {size} role="img" aria-label="{label}">{"".join(inside)}{legend}</svg>'


def _key(number: int, line: Line) -> str:
    """What the line is called, in its colour and stroke."""
    name = f"{'╌' if line.dashed else '━'} {html.escape(line.name[:20])}"
    return f'<text class="key s{number % 4}" x="{LEFT + number * 150}" y="{HEIGHT + 12}">{name}</text>'


def _told(line: Line) -> str:
    last = line.points[-1]
    interval = f" [{last.low:.3g}, {last.high:.3g}]" if last.low is not None and last.high is not None else ""
    return f"{line.name} {last.value:.3g}{interval}"


def _scale(lines: Sequence[Line], threshold: float | None, *, zero: bool) -> _Scale:
    points = [point for line in lines for point in line.points]
    newest = [line.points[-1] for line in lines]
    values = [p.value for p in points] + [v for p in newest for v in (p.low, p.high) if v is not None and math.isfinite(v)]
    values += [threshold] if threshold is not None else []
    values += [0.0] if zero else []
    low, high = min(values), max(values)
    pad = (high - low) * 0.08 or 0.1
    first, last = min(p.at for p in points), max(p.at for p in points)
    return _Scale(first, max(1.0, (last - first).total_seconds()), low - pad, high + pad)


def _frame(scale: _Scale) -> str:
    marks = [scale.low + (scale.high - scale.low) * share for share in (0.08, 0.5, 0.92)]
    digits = min(6, max(0, 2 - math.floor(math.log10(scale.high - scale.low))))
    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(v):.1f}" y2="{scale.y(v):.1f}"/>'
        f'<text x="{LEFT - 4}" y="{scale.y(v) + 4:.1f}" text-anchor="end">{v:.{digits}f}</text>'
        for v in marks
    )
    hours = scale.span_s / 3600
    span = f"{hours / 24:.1f} days" if hours >= 48 else f"{hours:.1f} h" if hours >= 1.5 else f"{scale.span_s / 60:.0f} min"
    times = f'<text x="{LEFT}" y="{HEIGHT - 6}">{scale.first:%m-%d %H:%M}</text>'
    return f'{grid}{times}<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">+ {span}</text>'


def _rule(scale: _Scale, value: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(value):.1f}" y2="{scale.y(value):.1f}"/>'


def _drawn(scale: _Scale, line: Line, series: str) -> str:
    path = " ".join(f"{scale.x(p.at):.1f},{scale.y(p.value):.1f}" for p in line.points)
    sure = [p for p in line.points if p.low is not None and p.high is not None and math.isfinite(p.low) and math.isfinite(p.high)]
    upper = [f"{scale.x(p.at):.1f},{scale.y(p.high or 0.0):.1f}" for p in sure]
    lower = [f"{scale.x(p.at):.1f},{scale.y(p.low or 0.0):.1f}" for p in reversed(sure)]
    band = f'<polygon class="band {series}" points="{" ".join([*upper, *lower])}"/>' if len(sure) > 1 else ""
    if len(sure) == 1:
        at, one = scale.x(sure[0].at), sure[0]
        ends = f'y1="{scale.y(one.low or 0.0):.1f}" y2="{scale.y(one.high or 0.0):.1f}"'
        band = f'<line class="whisker {series}" x1="{at:.1f}" x2="{at:.1f}" {ends}/>'
    dot = f'<circle class="dot {series}" cx="{scale.x(line.points[-1].at):.1f}" cy="{scale.y(line.points[-1].value):.1f}" r="3"/>'
    return f'{band}<polyline class="line {series}{" dashed" if line.dashed else ""}" points="{path}"/>{dot}'


def strip(slots: Sequence[tuple[str, str]], *, title: str) -> str:
    """Slots as shapes, oldest first: (state, what the tooltip says)."""
    if not slots:
        return ""
    drawn = "".join(
        f'<g transform="translate({n % 24 * 15},{n // 24 * 17})"><title>{html.escape(told)}</title>'
        f'<rect class="slot {html.escape(state)}" width="14" height="14" rx="2"/><path class="mark" d="{MARKS.get(state, "")}"/></g>'
        for n, (state, told) in enumerate(slots)
    )
    rows = math.ceil(len(slots) / 24)
    return f'<svg class="strip" viewBox="0 0 360 {rows * 17}" role="img" aria-label="{html.escape(title)}">{drawn}</svg>'
