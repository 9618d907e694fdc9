"""What was decided and what it earned, as other tools want it exported."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One labelled turn."""

    inference_id: str
    policy: str
    version: str
    finished_at: datetime
    arm: str
    stage: str
    probability: float
    reward: float
    exclusion: str | None
    """Why it is never trained on; None where it may be."""
    segment: str


@dataclass(frozen=True, kw_only=True)
class ExportedTurn(Decision):
    """One labelled turn whose tokens lie in a segment."""

    payload_segment: str
    finish_reason: str
    train_consent: bool
    held_out: bool
    terms: list[dict[str, Any]]
    """As the label has them: name, value, weight, detail."""
    rule_set: str
    labelled_at: datetime
