"""How practice is done. The defaults are the vetted setting."""

from typing import Literal

import msgspec

from app.domain.errors import BadConfig


class RolloutsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is practised, how much of it at a time, and when it makes room."""

    tasksets: tuple[str, ...] = ("small-functions",)
    """Names of shipped ones, or `package.module:Class` of yours."""
    group_size: int = 8
    """K: tries at one task that are compared with each other."""
    slots: int = 4
    """Boxes at work at a time, where nothing presses."""
    ahead: int = 1
    """Boxes that are opened for the next tries of a group while the others work; 0 opens each when it is wanted."""
    sandbox: Literal["bubblewrap", "ray"] = "bubblewrap"
    """Where grades are made: in boxes of this machine, or of a cluster (RATCHET_SANDBOX_URL)."""
    lease_s: float = 60.0
    heartbeat_s: float = 15.0
    admission_quantile: float = 0.95
    """Of past durations: a rollout begins only where it is over, by this, before its first turns are too old to learn from."""
    staleness: int = 1
    """How many promotions may happen between a rollout's first turn and its last."""
    live_first_token_s: float = 2.0
    """Where people wait longer than this for a first word (p95 of the last seconds), practice makes room."""
    most_live_queue: int = 2
    """As many people may wait for a first word while practice goes on: at a busy service some always do, for a moment."""
    probe_s: float = 0.5
    """How often the pressure is asked for; two of these and practice is at zero."""
    most_flagged_share: float = 0.5
    """Of a task's last tries; with more transcripts that the audit flags it is held until a person has looked."""
    most_fault_share: float = 0.5
    """The same, of tries that a part of ours failed in its box."""
    search_policy: str = ""
    """The policy whose one step of the harness it is to find files and lines (docs/component-models.md); empty: the harness has no such
    step."""
    search_budget_s: float = 10.0
    """A search that takes as long has paid all that time costs."""
    search_latency_weight: float = 0.3
    """What time may cost a search, of what it found."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise BadConfig("rollouts.group_size is at least 2: a group of one has nothing to be compared with")
        if self.slots < 1 or self.staleness < 0 or self.ahead < 0:
            raise BadConfig("rollouts.slots is at least 1, rollouts.staleness and rollouts.ahead at least 0")
        if not 0 < self.heartbeat_s < self.lease_s or not 0 < self.probe_s <= 1:
            raise BadConfig("rollouts.heartbeat_s is above 0 and below rollouts.lease_s, and rollouts.probe_s above 0 and at most 1")
        if not 0.5 <= self.admission_quantile < 1:
            raise BadConfig("rollouts.admission_quantile is from 0.5 to below 1")
        if not 0.0 < self.most_flagged_share <= 1.0 or not 0.0 < self.most_fault_share <= 1.0:
            raise BadConfig("rollouts.most_flagged_share and rollouts.most_fault_share are above 0 and at most 1")
        if self.search_budget_s <= 0 or not 0.0 <= self.search_latency_weight < 1.0:
            raise BadConfig("rollouts.search_budget_s is above 0, and rollouts.search_latency_weight from 0 to below 1")
