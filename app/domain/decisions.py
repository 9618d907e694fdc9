"""What was decided and what it earned, as other tools want it exported."""

from dataclasses import dataclass
from datetime import datetime


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
