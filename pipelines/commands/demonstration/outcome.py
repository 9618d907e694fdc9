"""What the demo found out, whether that is what it promised, and how it says so."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from app.domain.learning.cycles import Cycle
from app.domain.views.measures import Difference, Measure
from pipelines.commands.demonstration.comparing import Pair
from pipelines.commands.demonstration.planning import Part

PROMOTIONS_PROMISED = 1
"""More where there is time: the plan says how many."""
NEXT = (
    "Connect a product: send its questions to {url}/v1 as to any OpenAI endpoint, and what people did with the answers to {url}/feedback "
    '(README, "Connect a product").',
    "Look around: `make demo ARGS=--stay` keeps everything running, with the operators' pages at {url}/console.",
    "Production: `make up` on one machine; Kafka, PostgreSQL, a Ray cluster, S3 and vLLM by address (infra/README.md).",
)


@dataclass(frozen=True, kw_only=True)
class Harm:
    """What became of the planted candidate."""

    version: str
    state: str
    reason: str | None
    requests: int
    """Requests it served."""
    people: int
    people_meanwhile: int
    """Everybody whom the policy served from its first request to its last."""
    units: int
    """People times stages, both arms, from its first request to its last."""
    detect_s: float
    """From its first request to the decision to take it back."""
    roll_back_s: float
    """From that decision to the last request it was given."""

    @property
    def share(self) -> float:
        """Of the people served meanwhile, those who were exposed to it."""
        return self.people / self.people_meanwhile if self.people_meanwhile else 0.0

    def as_json(self) -> dict[str, Any]:
        """The figures for programs; `to_roll_back_s` is from the first harmful exposure to the last."""
        return {**vars(self), "share_exposed": round(self.share, 4), "to_roll_back_s": round(self.detect_s + self.roll_back_s, 2)}

    @property
    def caught(self) -> bool:
        """Whether the live gate took it back and traffic left it."""
        return self.state in ("ABORTED", "REJECTED", "ROLLED_BACK")


@dataclass(kw_only=True)
class Outcome:
    """Filled in as the demo goes on."""

    model: str
    seed: int
    promoted: list[str] = field(default_factory=list[str])
    """Names of the candidates that became champion, in order."""
    first: str = ""
    last: str = ""
    persistence: Difference | None = None
    """Last champion minus first, on held-out people and prompts."""
    dissatisfied: Difference | None = None
    lengths: Difference | None = None
    """Tokens an answer, same people."""
    anchor_budget_used: list[float] = field(default_factory=list[float])
    """Per promoted version: share of the allowed divergence from the anchor."""
    harm: Harm | None = None
    pairs: list[Pair] = field(default_factory=list[Pair])
    """Answers of the first version and of the last champion to the same questions."""
    waits: list[float] = field(default_factory=list[float])
    """Seconds that people waited for each answer while no update computed."""
    waits_training: list[float] = field(default_factory=list[float])
    """The same while one did, on the same cores."""
    parts: list[tuple[Part, float]] = field(default_factory=list[tuple[Part, float]])
    """Seconds that each part took."""
    planned_s: float = 0.0
    first_promotion_s: float | None = None
    """From the start until the first candidate was champion."""
    stages_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))
    answers: int = 0
    events: int = 0
    wall_s: float = 0.0
    trouble: str | None = None
    """Why it ended early."""

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the gain in edit persistence excludes zero."""
        return self.persistence is not None and self.persistence.low > 0

    @property
    def failures(self) -> list[str]:
        """What was promised and did not happen; empty for exit code 0."""
        missing = [] if self.trouble is None else [self.trouble]
        if len(self.promoted) < PROMOTIONS_PROMISED:
            missing.append("no candidate was promoted")
        if self.persistence is None:
            missing.append("edit persistence of the last champion was not measured against the first's")
        elif not self.is_clear:
            missing.append("the interval of the gain in edit persistence does not exclude zero")
        if self.harm is None:
            missing.append("no harmful candidate was planted")
        elif not self.harm.caught:
            missing.append(f"the harmful candidate was not taken back: it is {self.harm.state}")
        return missing

    def time_cycles(self, cycles: Sequence[Cycle]) -> None:
        """Add the seconds of each step of each finished cycle."""
        for cycle in cycles:
            for step, seconds in cycle.timings.items():
                self.stages_s[step].append(seconds)

    def as_json(self) -> dict[str, Any]:
        """The summary for programs."""
        return {
            "model": self.model, "seed": self.seed, "wall_s": round(self.wall_s, 1), "promoted": self.promoted,
            "first": self.first, "last": self.last, "persistence": _difference(self.persistence),
            "dissatisfied": _difference(self.dissatisfied), "lengths": _difference(self.lengths),
            "anchor_budget_used": [round(share, 4) for share in self.anchor_budget_used],
            "harm": None if self.harm is None else self.harm.as_json(), "answers": self.answers, "events": self.events,
            "planned_s": round(self.planned_s, 1), "first_promotion_s": self.first_promotion_s,
            "parts_s": [[part.name.lower(), round(lasted, 1)] for part, lasted in self.parts],
            "waited_s": _median(self.waits), "waited_while_training_s": _median(self.waits_training),
            "stages_s": {name: [round(s, 2) for s in values] for name, values in self.stages_s.items()}, "failures": self.failures,
        }  # fmt: skip

    def table(self) -> Table:
        """The summary for people at a terminal."""
        table = Table(title=self.title, show_header=False)
        for name, text in self.rows():
            table.add_row(name, text)
        return table

    @property
    def title(self) -> str:
        """What the summary is about."""
        return f"one real turn of the loop: {self.model}, {self.wall_s:.0f} s"

    def rows(self) -> list[tuple[str, str]]:
        """Every finding, name and text; what is missing comes last."""
        rows = self._rows()
        if self.waits:
            beside = f"; {_median(self.waits_training):.1f} s while an update computed on the same cores" if self.waits_training else ""
            rows.append(("people waited for an answer", f"{_median(self.waits):.1f} s (median){beside}"))
        if self.parts:
            rows.append(("time", ", ".join(f"{part.name.lower()} {lasted:.0f} s" for part, lasted in self.parts)))
        return [*rows, *(("MISSING", failure) for failure in self.failures)]

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("promoted", f"{len(self.promoted)}: {', '.join(self.promoted) or 'none'}")]
        rows.append(("answers, events", f"{self.answers} answers, {self.events} events accepted over HTTP"))
        if self.persistence is not None:
            rows += _compared("edit persistence, held-out people", self.persistence, self.first, self.last)
        if self.dissatisfied is not None:
            rows += _compared("dissatisfied follow-ups", self.dissatisfied, self.first, self.last)
        if self.lengths is not None:
            rows.append(("tokens an answer", f"{self.lengths.first.mean:.0f} → {self.lengths.second.mean:.0f}"))
        if self.anchor_budget_used:
            used = ", ".join(f"{share:.0%}" for share in self.anchor_budget_used)
            rows.append(("divergence from the anchor", f"{used} of what is allowed"))
        if self.harm is not None:
            rows.append(("planted candidate", f"{self.harm.version} was {self.harm.state}: {self.harm.reason or ''}"))
            served = f"{self.harm.requests} requests of {self.harm.people} of {self.harm.people_meanwhile} people ({self.harm.share:.0%})"
            rows.append(("served badly", f"{served}, in {self.harm.units} units of both arms"))
            rows.append(("time to detect, to roll back", f"{self.harm.detect_s:.1f} s, {self.harm.roll_back_s:.1f} s"))
        return rows


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2) if values else 0.0


def _compared(name: str, found: Difference, first: str, last: str) -> list[tuple[str, str]]:
    return [
        (name, f"{first}: {found.first} (n={found.first.n}) → {last}: {found.second} (n={found.second.n})"),
        ("  difference", f"{found.difference:+.3f}, {100 * found.level:.4g} % interval [{found.low:+.3f}, {found.high:+.3f}]"),
    ]


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "first": _measure(found.first), "second": _measure(found.second), "difference": round(found.difference, 4),
        "low": round(found.low, 4), "high": round(found.high, 4), "level": found.level,
    }  # fmt: skip


def _measure(found: Measure) -> dict[str, Any]:
    return {"n": found.n, "mean": round(found.mean, 4), "low": round(found.low, 4), "high": round(found.high, 4)}
