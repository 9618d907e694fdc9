"""Cycles and slots: when a turn of the loop may run, and what is remembered of it."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

MAX_ATTEMPTS = 2
"""An expired lease is resumed once; a cycle that dies twice in the same slot needs a person."""


class CycleStatus(StrEnum):
    """What became of a slot."""

    RUNNING = "running"
    DONE = "done"
    """A candidate was made and judged, whatever the verdict."""
    HELD = "held"
    """The update refused, with its reason."""
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """One slot of one policy."""

    policy: str
    slot: int
    """Start of the slot, Unix seconds, a multiple of the slot length."""
    status: CycleStatus
    step: str
    """Last durable step."""
    reason: str | None
    owner: str | None
    fencing_token: int
    attempt: int
    lease_expires_at: datetime | None
    batch_id: str | None
    run_id: str | None
    release_id: str | None
    timings: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds per step."""
    started_at: datetime
    finished_at: datetime | None


def slot_of(moment: datetime, slot_s: int) -> int:
    """Start of the slot that `moment` lies in: floor(epoch / slot) · slot. Epoch slots know no daylight saving and no restart."""
    return int(moment.timestamp()) // slot_s * slot_s
