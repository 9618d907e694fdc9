"""What an update leaves behind: on the way, for whoever resumes it, and at its end."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """A published candidate."""

    candidate: str
    metrics: dict[str, Any]
    tracker: dict[str, Any]


@dataclass
class Progress:
    """What a resumed run must know besides weights and optimizer; JSON in the checkpoint."""

    next_step: int = 0
    began: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the parent had left when the update began (`states.Inherited`)."""
    plan: list[list[list[str]]] = field(default_factory=list[list[list[str]]])
    """Inference ids of each micro-batch of each step: turns that are erased meanwhile are missing from it and move no other."""
    anchor: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """log π_ref of each turn's tokens, by inference id."""
    kept: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """What top-p kept, log, of each turn's tokens where the engine did not say it, by inference id."""
    start: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    """Log-probabilities and entropies of the first step's turns under the parent, by inference id."""
    dtype: str = ""
    """What `auto` was resolved to: the rest of the run computes in it too."""
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    histogram: list[int] = field(default_factory=list[int])
    lessons: dict[str, Any] = field(default_factory=dict[str, Any])
    """`Lessons` of the corrections."""
    corrections: dict[str, Any] = field(default_factory=dict[str, Any])
    """What is said of them in the metrics."""
