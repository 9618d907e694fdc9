"""The demo's terminal: a live view on a terminal, plain progress lines elsewhere."""

import re
import statistics
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from app.domain.release.releases import IN_FLIGHT, Release, ReleaseState
from app.domain.views.measures import Measure
from app.domain.views.operations import VersionRow
from app.domain.views.rows import ProgressRow
from pipelines.commands.demonstration.planning import Forecast, spoken
from pipelines.commands.demonstration.sight import COUNTS, Sight

PLAIN_EVERY_S = 15.0
FRESH_S = 15.0
"""A progress row older than this belongs to finished work."""
WAY = ("TRAINED", "OFFLINE", "QUEUED", "CANARY", "READY", "APPROVED", "PROMOTING", "CHAMPION")
LONGEST_DETAIL = 40
PICTURE_COLUMNS, PICTURE_LINES = 150, 38
ABOVE_LOG = 28
"""Lines of a view that what happened cannot have: the parts above it, and the frame."""
BAR = 20
"""Characters of the plain progress bar."""
GOOD = frozenset({ReleaseState.CHAMPION, ReleaseState.SUPERSEDED})


@dataclass(kw_only=True)
class Screen:
    """What is shown; `update` after each look, `say` whenever something happened."""

    title: str
    url: str
    console: Console = field(default_factory=Console)
    phase: str = "starting"
    shares: tuple[float, ...] = ()
    sampled: tuple[int, int] = (0, 1)
    """Labelled turns of the champion towards the next batch, and how many it takes."""
    forecast: Forecast | None = None
    waits: deque[float] = field(default_factory=lambda: deque[float](maxlen=20))
    """Seconds that people waited for their newest answers."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._said: deque[tuple[float, str]] = deque(maxlen=200)
        self._rate: deque[tuple[float, int]] = deque(maxlen=12)
        self._live: Live | None = None
        self._told_at = 0.0

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show it for the length of a block."""
        if not self.console.is_terminal:
            yield
            return
        with Live(Text("starting …"), console=self.console, refresh_per_second=4, screen=False, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began

    def say(self, sentence: str) -> None:
        """Something happened."""
        self._said.append((self.elapsed_s, sentence))
        if self._live is None:
            self.console.print(f"{_clock(self.elapsed_s)}  {sentence}", highlight=False, markup=False, soft_wrap=True)

    def update(self, sight: Sight) -> None:
        """Show a new look at the deployment."""
        self._rate.append((time.monotonic(), sight.accepted_events))
        if self._live is not None:
            self._live.update(self._picture(sight, lines=min(self.console.height - 1, 44)))
        elif time.monotonic() - self._told_at >= PLAIN_EVERY_S:
            self._told_at = time.monotonic()
            self.console.print(f"{_clock(self.elapsed_s)}  … {self._line(sight)}", highlight=False, markup=False, soft_wrap=True)

    def save(self, sight: Sight, path: Path, below: Sequence[RenderableType] = ()) -> None:
        """Write the view, and what is shown below it at the end, as a picture (SVG), in the reader's own fixed-width font: Rich's would be
        fetched from a stranger's server."""
        paper = Console(file=StringIO(), record=True, width=PICTURE_COLUMNS, height=PICTURE_LINES, force_terminal=True)
        paper.print(self._picture(sight, lines=PICTURE_LINES))
        for more in below:
            paper.print(more)
        path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", paper.export_svg(title="make demo"), flags=re.DOTALL))

    @property
    def done(self) -> float:
        """How far the demo is, 0 … 1, by what is known of the time left."""
        left = self.forecast.left_s() if self.forecast is not None else 0.0
        return self.elapsed_s / max(1e-9, self.elapsed_s + left)

    def _still(self) -> str:
        """How long still, and how long people wait, in words."""
        left = f"about {spoken(self.forecast.left_s())} left" if self.forecast is not None and self.forecast.parts else ""
        wait = f"people wait {statistics.median(self.waits):.1f} s for an answer" if self.waits else ""
        return " · ".join(part for part in (left, wait) if part)

    @property
    def events_per_s(self) -> float:
        """Accepted events per second over the last looks."""
        if len(self._rate) < 2:
            return 0.0
        (then, before), (now, after) = self._rate[0], self._rate[-1]
        return (after - before) / max(0.1, now - then)

    def _line(self, sight: Sight) -> str:
        running = ", ".join(f"{row.task} {row.done:.0f}/{row.total:.0f}" for row in sight.progress if _fresh(sight, row))
        version = next((v for v in sight.versions if sight.pointer and v.digest == sight.pointer.digest), None)
        persistence = f", persistence {version.persistence}" if version is not None and version.persistence else ""
        flight = ", ".join(f"{r.version_name} {_state(r, self.shares)}" for r in sight.releases if r.state in IN_FLIGHT)
        bar = "#" * round(self.done * BAR)
        parts = [
            f"[{bar:.<{BAR}}] {self.done:.0%} {self.phase}",
            self._still(),
            f"{self.events_per_s:.0f} events/s",
            f"champion {version.name if version else 'none'}{persistence}",
            flight,
            running,
        ]
        return " · ".join(part for part in parts if part)

    def _picture(self, sight: Sight, *, lines: int) -> RenderableType:
        layout = Layout()
        layout.split_column(
            Layout(self._head(), size=4), Layout(self._bars(sight), size=6), Layout(_versions(sight), size=8),
            Layout(_releases(sight, self.shares), size=8), Layout(self._log(lines - ABOVE_LOG), name="log"),
        )  # fmt: skip
        return Panel(layout, title=self.title, height=lines)

    def _head(self) -> RenderableType:
        line = Text.assemble((_clock(self.elapsed_s), "bold"), "  ", (self.phase, "bold cyan"), f"   {self.events_per_s:.0f} events/s")
        way = Table.grid(padding=(0, 2))
        way.add_row(ProgressBar(total=1.0, completed=self.done, width=40), f"{self.done:.0%}", self._still())
        return Group(line, way, Text(f"console {self.url}/console", style="dim"))

    def _bars(self, sight: Sight) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        done, total = self.sampled
        rows = [("labels for the next batch", float(done), float(total), "")]
        rows += [(row.task, row.done, row.total, _detail(row.detail)) for row in sight.progress if _fresh(sight, row)]
        for name, at, of, detail in rows[:5]:
            table.add_row(name, ProgressBar(total=max(of, 1), completed=min(at, of), width=40), f"{at:.0f}/{of:.0f}", detail)
        return table

    def _log(self, most: int) -> RenderableType:
        newest = list(self._said)[-max(1, most) :]
        lines = [Text(f"{_clock(at)}  {sentence}", overflow="ellipsis", no_wrap=True) for at, sentence in newest]
        return Group(*lines)


def _versions(sight: Sight) -> RenderableType:
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("version", "labelled turns", "edit persistence", "dissatisfied follow-ups", "task success"):
        table.add_column(name, justify="left" if name == "version" else "right")
    for version in list(sight.versions)[-6:]:
        table.add_row(
            Text(version.name + _role(sight, version)), str(version.turns), _shown(version.persistence), _shown(version.dissatisfied),
            _shown(version.success),
        )  # fmt: skip
    return table


def _releases(sight: Sight, shares: tuple[float, ...]) -> RenderableType:
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("candidate", "its way", "why"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for release in sight.releases[:6]:
        table.add_row(release.version_name, _way(release, shares), release.reason or "")
    return table


def _way(release: Release, shares: tuple[float, ...]) -> Text:
    if release.state not in IN_FLIGHT:
        return Text(release.state.value, style="green" if release.state in GOOD else "red")
    reached = WAY.index(release.state.value)
    marks = ["●" if i < reached else "◉" if i == reached else "○" for i in range(len(WAY))]
    return Text(f"{''.join(marks)} {_state(release, shares)}", style="yellow")


def _state(release: Release, shares: tuple[float, ...]) -> str:
    if release.state is ReleaseState.CANARY:
        return f"CANARY {shares[min(release.stage or 0, len(shares) - 1)]:.0%}"
    return release.state.value


def _role(sight: Sight, version: VersionRow) -> str:
    if sight.pointer is None:
        return ""
    return " ★" if version.digest == sight.pointer.digest else " (previous)" if version.digest == sight.pointer.previous else ""


def _shown(value: Measure | None) -> str:
    return "–" if value is None else str(value)


def _detail(detail: dict[str, object]) -> str:
    """The first few short values."""
    told = [f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in detail.items() if value is not None]
    return " ".join([text for text in told if len(text) <= LONGEST_DETAIL][:3])


def _fresh(sight: Sight, row: ProgressRow) -> bool:
    """Whether the work is under way; what only counts (the holdback's units) is none."""
    return row.task not in COUNTS and (sight.seen_at - row.updated_at).total_seconds() < FRESH_S


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
