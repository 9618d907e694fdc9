"""What one part of a benchmark hands back: a printed table, numbers for the JSON line, and bounds kept or broken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from pipelines.evaluation.statistics.units import IntArray
from tests.bench.gate_cells.canaries import NEVER


@dataclass(kw_only=True)
class Section:
    """A table in the making."""

    title: str
    rows: list[str] = field(default_factory=list[str])
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    kept: list[str] = field(default_factory=list[str])
    broken: list[str] = field(default_factory=list[str])

    def row(self, *cells: object) -> None:
        self.rows.append("| " + " | ".join(_cell(c) for c in cells) + " |")

    def header(self, *cells: str) -> None:
        self.row(*cells)
        self.rows.append("|" + "---|" * len(cells))

    def require(self, claim: str, kept: bool) -> None:
        (self.kept if kept else self.broken).append(claim if kept else f"{self.title}: {claim}")

    def text(self) -> str:
        held = f"kept: {'; '.join(self.kept)}" if self.kept else "asks nothing" if not self.broken else "none kept"
        verdict = f"BROKEN {'; '.join(self.broken)}; {held}" if self.broken else held
        return "\n".join([f"\n## {self.title}", "", *self.rows, "", f"-> {verdict}"])


def stopped(units: IntArray) -> float:
    """Share of canaries that were stopped at all."""
    return float(np.mean(units < NEVER))


def delay(units: IntArray) -> str:
    """Median units, with the share stopped if it is not all of them."""
    share = stopped(units)
    median = float(np.median(units))
    middle = f"{median:,.0f}" if median < NEVER / 2 else "-"
    return middle if share >= 0.995 else f"{middle} ({share:.2f})"


def error_of(rate: float, repetitions: int) -> float:
    """Standard error of a share."""
    return math.sqrt(rate * (1.0 - rate) / repetitions)


def repetitions_of(full: int, scale: float, *, least: int = 60) -> int:
    """Repetitions at this scale, never fewer than `least`."""
    return max(least, int(full * scale))


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
