"""Rows that the console's pages and the demo's terminal both show."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GateRow:
    """A gate's newest answer about a release."""

    gate: str
    verdict: str
    action: str | None
    reason: str
    decided_at: datetime
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One move of a release."""

    from_state: str | None
    to_state: str
    stage: int | None
    reason: str | None
    actor: str
    occurred_at: datetime


@dataclass(frozen=True, kw_only=True)
class ProgressRow:
    """How far a long task is."""

    task: str
    done: float
    total: float
    detail: dict[str, Any]
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Whom moving the pointer away from a version moves."""

    people: int
    """Served by it within a day."""
    episodes: int
    """Of those that were spoken in within the last half hour: they finish where they are."""
